"""The choice of a body: said in the log, loud when impossible."""

import dataclasses
import importlib.util
import logging

import pytest

from jaxserve.errors import ConfigError
from jaxserve.kernels.cases import REAL, case
from jaxserve.kernels.dispatch import default_page_size, resolve
from jaxserve.kernels.paged_attention import Device
from jaxserve.kernels.xla_attention import BODY

CPU = Device(backend="cpu", kind="cpu")
H200 = Device(backend="gpu", kind="NVIDIA H200", compute_capability=(9, 0))
A100 = Device(backend="gpu", kind="NVIDIA A100", compute_capability=(8, 0))
V5E = Device(backend="tpu", kind="TPU v5 lite")
LLAMA = REAL["llama3-8b-tp1/decode64/64/bfloat16"].use
DEMO = case("demo", "crumbs", 24).use
ODD_PAGES = dataclasses.replace(DEMO, page_size=17)  # no multiple of any vector


@pytest.mark.parametrize(
    ("device", "use", "name", "reason"),
    [
        (CPU, LLAMA, "numba_cpu", "it is the body made for cpu"),
        (CPU, ODD_PAGES, "xla", "'numba_cpu' cannot run this model (the page size is 17, and must be a multiple of"),
        (V5E, LLAMA, "mosaic_tpu", "the body made for tpu"),
        (H200, LLAMA, "mosaic_gpu", "the body made for gpu"),
        (A100, LLAMA, "xla", "'mosaic_gpu' cannot run this model"),
        (H200, DEMO, "xla", "'mosaic_gpu' cannot run this model"),
    ],
)
def test_auto_takes_the_best_that_can_and_says_why(device, use, name, reason, caplog):
    caplog.set_level(logging.INFO, logger="jaxserve.kernels.dispatch")
    assert resolve(device=device, uses=[use]).name == name
    (record,) = caplog.records
    assert f"paged_attention on {device.kind}: body {name!r}, since " in record.getMessage()
    assert reason in record.getMessage()


def test_a_body_by_name_by_path_or_as_it_is():
    for choice in ("xla", "jaxserve.kernels.xla_attention:BODY", BODY):
        assert resolve(device=CPU, choice=choice) is BODY
    assert resolve(device=CPU, choice="numba_cpu", uses=[LLAMA]).name == "numba_cpu"


@pytest.fixture
def no_numba(monkeypatch):
    """As where `jaxserve` is installed without its extra `cpu`."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "numba" else find_spec(name, *rest)
    )


@pytest.mark.usefixtures("no_numba")
def test_without_numba_auto_takes_xla_and_says_what_is_missing(caplog):
    caplog.set_level(logging.INFO, logger="jaxserve.kernels.dispatch")
    assert resolve(device=CPU, uses=[LLAMA]) is BODY
    (record,) = caplog.records
    assert "'numba_cpu' cannot run this model (Numba is not installed; pip install 'jaxserve[cpu]')" in (
        record.getMessage()
    )


@pytest.mark.usefixtures("no_numba")
def test_without_numba_its_body_by_name_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"names 'numba_cpu', which cannot .* pip install 'jaxserve\[cpu\]'"):
        resolve(device=CPU, choice="numba_cpu", uses=[LLAMA])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": CPU, "choice": "xlaa"}, "Did you mean 'xla'"),
        ({"device": Device(backend="abacus", kind="beads")}, "known: cpu, gpu, tpu"),
        ({"device": CPU, "op": "conv"}, "known: paged_attention"),
        ({"device": CPU, "choice": "jaxserve.kernels.cases:CASES"}, "needs a PagedAttention"),
        ({"device": H200, "choice": "numba_cpu", "uses": [LLAMA]}, "it runs on CPUs alone"),
        ({"device": CPU, "choice": "numba_cpu", "uses": [ODD_PAGES]}, "the page size is 17"),
        (
            {"device": CPU, "choice": "numba_cpu", "uses": [dataclasses.replace(LLAMA, cache_dtype="int8")]},
            "the cache holds int8, and can be read as float32 or bfloat16 alone",
        ),
        ({"device": A100, "choice": "mosaic_gpu", "uses": [LLAMA]}, "names 'mosaic_gpu', which cannot run this model"),
        (
            {
                "device": CPU,
                "uses": [dataclasses.replace(DEMO, spec=dataclasses.replace(DEMO.spec, num_query_heads=3))],
            },
            "3 query heads",
        ),
        (
            {"device": CPU, "uses": [dataclasses.replace(DEMO, spec=dataclasses.replace(DEMO.spec, window=0))]},
            "window is 0",
        ),
        ({"device": CPU, "uses": [dataclasses.replace(DEMO, cache_dtype="int4")]}, "cache dtype 'int4' is not one of"),
    ],
)
def test_what_cannot_run_is_refused_at_start(arguments, message):
    with pytest.raises(ConfigError, match=message):
        resolve(**arguments)


def test_page_sizes_are_positive_and_known_backends_only():
    assert all(default_page_size(b) > 0 for b in ("cpu", "gpu", "tpu"))
    with pytest.raises(ConfigError):
        default_page_size("abacus")
