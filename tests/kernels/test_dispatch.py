"""The choice of an implementation: said in the log, loud when impossible; and what an op gets from its record."""

import dataclasses
import importlib.util
import itertools
import logging
import types
from collections.abc import Callable

import jax
import numpy as np
import pytest

from jaxserve.config.schema import KernelsConfig
from jaxserve.errors import ConfigError, how_to_install
from jaxserve.kernels.cases import REAL, case
from jaxserve.kernels.dispatch import ENTRY_POINTS, Device, Op
from jaxserve.kernels.ops import OPS, PAGED_ATTENTION
from jaxserve.kernels.xla_attention import XLA_ATTENTION
from jaxserve.runtime.resolve import choose
from jaxserve.values.registry import Registry

CPU = Device(backend="cpu", kind="cpu")
H200 = Device(backend="gpu", kind="NVIDIA H200", compute_capability=(9, 0))
A100 = Device(backend="gpu", kind="NVIDIA A100", compute_capability=(8, 0))
B200 = Device(backend="gpu", kind="NVIDIA B200", compute_capability=(10, 0))
V99 = Device(backend="tpu", kind="TPU v99")
V5E = Device(backend="tpu", kind="TPU v5 lite")
LLAMA = REAL["llama3-8b-tp1/decode64/64/bfloat16"].use
DEMO = case("demo", "short", 24).use
ODD_PAGES = dataclasses.replace(DEMO, page_size=17)  # no multiple of any vector


@pytest.mark.parametrize(
    ("device", "use", "name", "reason"),
    [
        (CPU, LLAMA, "numba_cpu", "it is the one made for cpu"),
        (CPU, ODD_PAGES, "xla", "'numba_cpu' cannot run this model (the page size is 17, and must be a multiple of"),
        (V5E, LLAMA, "mosaic_tpu", "the one made for tpu"),
        (H200, LLAMA, "mosaic_gpu", "the one made for gpu"),
        (H200, DEMO, "xla_batched", "'mosaic_gpu' cannot run this model (queries in float32"),
        (
            A100,
            LLAMA,
            "xla_batched",
            "it needs the instructions of compute capability 9.x (Hopper), and NVIDIA A100 has",
        ),
        (B200, DEMO, "xla_batched", "and NVIDIA B200 has 10.0"),
        (V99, LLAMA, "xla_batched", "'mosaic_tpu' cannot run this model ("),
    ],
)
def test_auto_takes_the_best_that_can_and_says_why(device, use, name, reason, caplog):
    caplog.set_level(logging.INFO, logger="jaxserve.kernels.dispatch")
    assert PAGED_ATTENTION.resolve(device=device, uses=[use]).name == name
    (record,) = caplog.records
    assert f"paged_attention on {device.kind}: {name!r}, since " in record.getMessage()
    assert reason in record.getMessage()


@pytest.mark.parametrize("device", [A100, H200, V5E, V99])
def test_an_accelerator_gets_the_implementation_for_cpus_only_by_name(device):
    for use in (LLAMA, dataclasses.replace(LLAMA, page_size=17)):
        assert PAGED_ATTENTION.resolve(device=device, uses=[use]) is not XLA_ATTENTION
    assert PAGED_ATTENTION.resolve(device=device, uses=[DEMO], choice="xla") is XLA_ATTENTION


def test_a_implementation_by_name_by_path_or_as_it_is():
    for choice in ("xla", "jaxserve.kernels.xla_attention:XLA_ATTENTION", XLA_ATTENTION):
        assert PAGED_ATTENTION.resolve(device=CPU, choice=choice) is XLA_ATTENTION
    assert PAGED_ATTENTION.resolve(device=CPU, choice="numba_cpu", uses=[LLAMA]).name == "numba_cpu"


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
    assert PAGED_ATTENTION.resolve(device=CPU, uses=[LLAMA]) is XLA_ATTENTION
    (record,) = caplog.records
    assert f"'numba_cpu' cannot run this model (Numba is not installed; {how_to_install('cpu')})" in record.getMessage()


@pytest.mark.usefixtures("no_numba")
def test_without_numba_its_implementation_by_name_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"names 'numba_cpu', which cannot .* pip install .*\[cpu\]'"):
        PAGED_ATTENTION.resolve(device=CPU, choice="numba_cpu", uses=[LLAMA])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": CPU, "choice": "xlaa"}, "Did you mean 'xla'"),
        ({"device": Device(backend="abacus", kind="beads")}, "known: cpu, gpu, tpu"),
        ({"device": CPU, "choice": "jaxserve.kernels.cases:CASES"}, "needs a PagedAttention"),
        ({"device": H200, "choice": "numba_cpu", "uses": [LLAMA]}, "it runs on CPUs alone"),
        ({"device": CPU, "choice": "numba_cpu", "uses": [ODD_PAGES]}, "the page size is 17"),
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
        (
            {"device": V99, "uses": [DEMO]},
            r"runs float32 queries of 4 heads .* on TPU v99: .* head dims that .* slow",
        ),
        ({"device": CPU, "uses": [dataclasses.replace(DEMO, cache_dtype="int4")]}, "cache dtype 'int4' is not one of"),
    ],
)
def test_what_cannot_run_is_refused_at_start(arguments, message):
    with pytest.raises(ConfigError, match=message):
        PAGED_ATTENTION.resolve(**arguments)


# --- another op -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doubling:
    """One implementation of an op that this file alone knows: x -> 2 x."""

    name: str
    call: Callable[[np.ndarray], np.ndarray]
    refuses: Callable[[int], str | None] = lambda use: None
    prepare: Callable[[int], object] = lambda use: None


def make_fast(device: Device) -> Doubling:
    return Doubling(
        name="fast",
        call=lambda x: x + x,
        refuses=lambda use: f"{use} numbers, and {device.kind} holds 100" if use > 100 else None,
    )


def validate(use: int) -> None:
    if use < 1:
        raise ConfigError(f"{use} numbers to double")


PLAIN, WRONG = Doubling(name="plain", call=lambda x: 2 * x), Doubling(name="wrong", call=lambda x: x * 2.1)
DOUBLE: Op[Doubling, int] = Op(
    name="double",
    kind=Doubling,
    implementations=Registry(
        "double implementation",
        ENTRY_POINTS,
        {"fast": f"{__name__}:make_fast", "plain": f"{__name__}:PLAIN", "wrong": f"{__name__}:WRONG"},
    ),
    preferred={"cpu": ("fast", "plain"), "tpu": ("fast",)},
    reference="plain",
    validate=validate,
    describe=lambda use: f"{use} numbers",
    cases={"few": 3},
    case_of=lambda use: min(use, 7),
    error=lambda implementation, case: float(abs(implementation.call(np.ones(case)) - 2).max()),
    limit=lambda implementation, use: 1e-6,
)


def test_another_op_is_chosen_by_its_record(caplog):
    caplog.set_level(logging.INFO, logger="jaxserve.kernels.dispatch")
    assert DOUBLE.resolve(device=CPU, uses=[5]).name == "fast"
    assert DOUBLE.resolve(device=CPU, uses=[500]) is PLAIN
    assert DOUBLE.resolve(device=CPU, uses=[500], choice="plain") is PLAIN
    assert [record.getMessage() for record in caplog.records] == [
        "double on cpu: 'fast', since it is the one made for cpu",
        "double on cpu: 'plain', since 'fast' cannot run this model (500 numbers, and cpu holds 100)",
        "double on cpu: 'plain', since kernels.double names it",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"choice": "plane"}, "no double implementation is called 'plane'; known: fast, plain, wrong.*mean 'plain'"),
        ({"choice": "fast", "uses": [500]}, "kernels.double names 'fast', which cannot run this model: 500 numbers"),
        ({"choice": XLA_ATTENTION}, "but double needs a Doubling"),
        ({"uses": [0]}, "0 numbers to double"),
        ({"device": H200}, "known: cpu, tpu"),
        ({"device": V5E, "uses": [500]}, "no implementation of double runs 500 numbers on TPU v5 lite: 'fast' cannot"),
    ],
)
def test_another_op_refuses_by_its_record(arguments, message):
    with pytest.raises(ConfigError, match=message):
        DOUBLE.resolve(**({"device": CPU} | arguments))


def test_a_start_reads_the_setting_of_another_op_and_checks_it():
    def start(double, self_check=True):
        settings = types.SimpleNamespace(double=double, self_check=self_check)
        config = types.SimpleNamespace(kernels=settings)
        return choose(DOUBLE, config, (3, 5), jax.devices("cpu")[0])  # pyright: ignore[reportArgumentType]

    assert start("auto").name == "fast"
    with pytest.raises(
        ConfigError, match=r"the double implementation 'wrong' is wrong on cpu.* kernels\.double: plain"
    ):
        start("wrong")
    assert start("wrong", self_check=False) is WRONG


def test_each_op_has_a_setting_and_each_setting_an_op():
    named = {name for name, field in KernelsConfig.model_fields.items() if field.default == "auto"}
    assert named == {op.name for op in OPS}
    for op in OPS:
        assert set(op.implementations.names()) >= {op.reference, *itertools.chain(*op.preferred.values())}
