"""The choice between the CPU's own products and XLA's, where a start measures which are faster."""

import logging

import jax
import pytest

from jaxserve.config.schema import Config
from jaxserve.kernels import product_rates
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.matmul import Matmul, MatmulUse
from jaxserve.kernels.numba_matmul import make_matmul
from jaxserve.kernels.ops import MATMUL
from jaxserve.kernels.storage import Storage
from jaxserve.kernels.xla_matmul import XLA_MATMUL
from jaxserve.runtime.resolve import choose

BFLOAT16 = MatmulUse(dtype="bfloat16", num_devices=1)
CPU = Device(backend="cpu", kind="cpu")


def set_times(monkeypatch: pytest.MonkeyPatch, own: tuple[float, float], other: tuple[float, float]) -> None:
    def measure(matmul: Matmul, dtype: str) -> list[float]:
        assert dtype == "bfloat16"
        return list(other if matmul is XLA_MATMUL else own)

    monkeypatch.setattr(product_rates, "measure_products", measure)


@pytest.mark.parametrize(
    ("own", "other", "chosen"),
    [
        ((1.0, 4.0), (2.0, 8.0), "numba_cpu"),
        ((2.0, 8.0), (1.0, 4.0), "xla"),
        ((1.0, 4.0), (1.8, 1.0), "xla"),  # tiles: prompts lose 4 times as long, streams gain 1.8
        ((1.0, 1.5), (1.8, 1.0), "numba_cpu"),
    ],
)
def test_auto_takes_what_loses_less_and_says_so(
    own: tuple[float, float],
    other: tuple[float, float],
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    set_times(monkeypatch, own, other)
    assert choose(MATMUL, Config(), (BFLOAT16,), jax.devices("cpu")[0]).name == chosen
    said = [record.getMessage() for record in caplog.records if "as measured now" in record.getMessage()]
    assert said and all(f"{other[1] * 1e3:.3g} ms at 512 rows" in line for line in said)
    named = Config.model_validate({"kernels": {"matmul": "numba_cpu"}})
    assert choose(MATMUL, named, (BFLOAT16,), jax.devices("cpu")[0]).name == "numba_cpu"


def test_bfloat16_alone_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:

    def measure(matmul: Matmul, dtype: str) -> list[float]:
        raise AssertionError("measured")

    monkeypatch.setattr(product_rates, "measure_products", measure)
    codes = MatmulUse(dtype="bfloat16", num_devices=1, storage=Storage(code="int8"))
    own = make_matmul(CPU)
    assert product_rates.slower_products(own, MatmulUse(dtype="float32", num_devices=1)) is None
    assert product_rates.slower_products(own, codes) is None
    assert product_rates.slower_products(XLA_MATMUL, BFLOAT16) is None
    with pytest.raises(AssertionError, match="measured"):
        product_rates.slower_products(own, BFLOAT16)


def test_a_measurement_has_a_time_for_each_number_of_rows() -> None:
    found = [product_rates.measure_products(one, "bfloat16") for one in (make_matmul(CPU), XLA_MATMUL)]
    assert all(len(times) == len(product_rates.ROWS) and min(times) > 0 for times in found)
