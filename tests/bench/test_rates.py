"""What a machine can do: the arithmetic of its rates with a fake, one real process, and that records name them."""

import sys
import time
from pathlib import Path

import pytest

from jaxserve.lab.bench.rates import machine_rates, measure_rates

NAMES = ("read_gb_per_s", "multiply_add_gflop_per_s")


def test_rates_are_what_all_threads_do_together() -> None:
    made: list[str] = []

    def make(name: str, amount: float):
        def work() -> float:
            time.sleep(0.01)
            return amount

        def begin():
            made.append(name)
            return work

        return begin

    found = measure_rates(make("read", 0.01), make("multiply", 1.0))
    assert tuple(found) == NAMES
    assert made == ["read"] * 3 + ["multiply"] * 3  # one for a thread alone, two for a pair: nobody shares memory
    for name, most in zip(NAMES, (1.0, 100.0), strict=True):
        assert 0 < found[name]["1 thread"] <= most
        assert 0 < found[name]["2 threads"] <= 2 * most


@pytest.mark.slow
def test_this_machine_reads_and_multiplies() -> None:
    found = machine_rates()
    assert found is not None
    assert all(found[name][threads] > 0 for name in NAMES for threads in ("1 thread", "2 threads"))


def test_what_cannot_be_measured_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    assert machine_rates() is None
