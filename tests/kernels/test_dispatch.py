"""The choice of a body: said in the log, loud when impossible."""

import dataclasses
import logging

import pytest

from jaxserve.errors import ConfigError
from jaxserve.kernels.cases import MODELS
from jaxserve.kernels.dispatch import default_page_size, resolve
from jaxserve.kernels.xla_attention import BODY


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
def test_auto_names_its_choice_and_reason(backend, caplog):
    caplog.set_level(logging.INFO, logger="jaxserve.kernels.dispatch")
    assert resolve(backend=backend, cases=[MODELS["demo"]]) is BODY
    (record,) = caplog.records
    assert f"paged_attention on {backend}: body 'xla'" in record.getMessage()
    if backend != "cpu":
        assert "expect reference speed" in record.getMessage()


def test_a_body_by_name_by_path_or_as_it_is():
    for choice in ("xla", "jaxserve.kernels.xla_attention:BODY", BODY):
        assert resolve(backend="cpu", choice=choice) is BODY


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "cpu", "choice": "xlaa"}, "Did you mean 'xla'"),
        ({"backend": "abacus"}, "known: cpu, gpu, tpu"),
        ({"backend": "cpu", "op": "conv"}, "known: paged_attention"),
        ({"backend": "cpu", "choice": "jaxserve.kernels.xla_attention:attend"}, "needs a PagedAttention"),
        (
            {"backend": "cpu", "cases": [dataclasses.replace(MODELS["demo"], num_query_heads=3)]},
            "3 query heads",
        ),
        (
            {
                "backend": "cpu",
                "cases": [dataclasses.replace(MODELS["demo"], window=0)],
            },
            "window is 0",
        ),
    ],
)
def test_what_cannot_run_is_refused_at_start(arguments, message):
    with pytest.raises(ConfigError, match=message):
        resolve(**arguments)


def test_page_sizes_are_positive_and_known_backends_only():
    assert all(default_page_size(b) > 0 for b in ("cpu", "gpu", "tpu"))
    with pytest.raises(ConfigError):
        default_page_size("abacus")
