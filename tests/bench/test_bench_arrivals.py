"""When requests are due: the statistics of each kind of arrival, seeded."""

import math

import numpy as np
import pytest

from jaxserve.bench.arrivals import ArrivalOptions, Ramp, arrival_times
from jaxserve.bench.samples import Sample
from jaxserve.errors import ConfigError

COUNT = 20_000


def samples(count: int, times: list[float | None] | None = None) -> list[Sample]:
    given = times or [None] * count
    return [Sample(prompt="x", prompt_len=1, output_len=1, arrival_s=time_s) for time_s in given]


def gaps(options: ArrivalOptions, seed: int = 0, count: int = COUNT) -> np.ndarray:
    return np.diff(arrival_times(samples(count), options, seed), prepend=0.0)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed(burstiness: float) -> None:
    found = gaps(ArrivalOptions(rate=8.0, burstiness=burstiness))
    assert found.mean() == pytest.approx(1 / 8)
    assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.03)
    assert (found >= 0).all()


def test_poisson_counts_vary_as_much_as_their_mean() -> None:
    times = arrival_times(samples(COUNT), ArrivalOptions(rate=10.0), 3)
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1.0, rel=0.08)
    exponential = np.mean(np.diff(times) > 0.1)
    assert exponential == pytest.approx(math.exp(-1), rel=0.03)


def test_even_arrivals_have_one_gap() -> None:
    np.testing.assert_allclose(gaps(ArrivalOptions(rate=5.0, burstiness=math.inf)), 0.2, rtol=1e-6)


def test_seeds_change_the_gaps_and_not_the_load() -> None:
    options = ArrivalOptions(rate=4.0)
    first, second = (arrival_times(samples(100), options, seed) for seed in (1, 2))
    assert first[-1] == pytest.approx(25.0)
    assert second[-1] == pytest.approx(25.0)
    assert not np.allclose(first, second)
    np.testing.assert_array_equal(first, arrival_times(samples(100), options, 1))


@pytest.mark.parametrize("burstiness", [1.0, 4.0])
@pytest.mark.parametrize("kind", ["linear", "exponential"])
def test_a_ramp_goes_from_rate_to_rate(kind: str, burstiness: float) -> None:
    found = gaps(ArrivalOptions(ramp=Ramp.parse(f"{kind}:2:32"), burstiness=burstiness), count=60_000)
    rates = [1 / part.mean() for part in np.split(found, 60)]
    middle = 17.0 if kind == "linear" else 8.0
    assert rates[0] == pytest.approx(2.0, rel=0.2)
    assert rates[30] == pytest.approx(middle, rel=0.15)
    assert rates[-1] == pytest.approx(32.0, rel=0.15)


def test_without_a_rate_all_come_at_once_or_as_recorded() -> None:
    assert not arrival_times(samples(5), ArrivalOptions(), 0).any()
    assert not arrival_times(samples(3, [0.0, 1.0, 2.0]), ArrivalOptions(rate=math.inf), 0).any()
    np.testing.assert_array_equal(
        arrival_times(samples(3, [0.0, 0.5, 0.5]), ArrivalOptions(), 0), np.array([0.0, 0.5, 0.5])
    )


def test_what_cannot_be() -> None:
    for bad in ({"rate": 0.0}, {"rate": -1.0}, {"rate": math.nan}, {"burstiness": 0.0}):
        with pytest.raises(ConfigError, match="must be more than 0"):
            ArrivalOptions(**bad)
    with pytest.raises(ConfigError, match="not both"):
        ArrivalOptions(rate=2.0, ramp=Ramp.parse("linear:1:2"))
    for text in ("linear", "linear:1", "cubic:1:2", "linear:0:3", "linear:1:inf", "linear:1:2:3"):
        with pytest.raises(ConfigError, match="--ramp"):
            Ramp.parse(text)
    with pytest.raises(ConfigError, match="1 of 2 requests say no arrival time"):
        arrival_times(samples(2, [0.0, None]), ArrivalOptions(), 0)
    with pytest.raises(ConfigError, match="order"):
        arrival_times(samples(2, [1.0, 0.0]), ArrivalOptions(), 0)
