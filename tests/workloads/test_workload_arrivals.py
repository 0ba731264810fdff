"""When requests are due: the statistics of each kind of arrival, seeded."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.lab.workloads.arrivals import ArrivalOptions, Diurnal, Ramp, arrival_times, draw_times, time_shapes
from jaxserve.lab.workloads.samples import Part, Sample, Shape

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
    with pytest.raises(ConfigError, match="not two"):
        ArrivalOptions(rate=2.0, ramp=Ramp.parse("linear:1:2"))
    for text in ("linear", "linear:1", "cubic:1:2", "linear:0:3", "linear:1:inf", "linear:1:2:3"):
        with pytest.raises(ConfigError, match="--ramp"):
            Ramp.parse(text)
    with pytest.raises(ConfigError, match="1 of 2 requests say no arrival time"):
        arrival_times(samples(2, [0.0, None]), ArrivalOptions(), 0)
    with pytest.raises(ConfigError, match="order"):
        arrival_times(samples(2, [1.0, 0.0]), ArrivalOptions(), 0)


# ---- a day -----------------------------------------------------------------------------------------------------------


def hourly_rates(times: np.ndarray, day_s: float, days: int) -> np.ndarray:
    """Requests a second in each of 24 parts of the day, over all days."""
    counts = np.histogram(times % day_s, bins=24, range=(0.0, day_s))[0]
    return counts / (day_s / 24 * days)


@pytest.mark.parametrize("burstiness", [1.0, math.inf])
def test_a_day_follows_its_curve(burstiness: float) -> None:
    diurnal = Diurnal.wave(2.0, 10.0, day_s=240.0)
    days = 20
    times = draw_times(6 * 240 * days, ArrivalOptions(diurnal=diurnal, burstiness=burstiness), 0)
    assert (np.diff(times) >= 0).all()
    assert times[-1] == pytest.approx(240 * days, rel=0.02)  # the mean is 6 a second
    found = hourly_rates(times[times < 240 * days], 240.0, days)
    middle = (np.arange(24) + 0.5) / 24
    expected = 2 + 8 * (1 - np.cos(2 * math.pi * middle)) / 2
    np.testing.assert_allclose(found, expected, rtol=0.15 if burstiness == 1 else 0.05)


def test_a_curve_of_ones_own_has_straight_lines_between_its_points() -> None:
    """From 1 to 3 a second and back: in a quarter of the day 1.5 x 10 s, in half of it twice that and five more."""
    diurnal = Diurnal(curve=(1.0, 3.0), day_s=40.0)
    np.testing.assert_allclose(
        diurnal.times(np.array([0.0, 15.0, 40.0, 80.0, 95.0])), [0.0, 10.0, 20.0, 40.0, 50.0], atol=0.05
    )


def test_days_that_cannot_be() -> None:
    for text in ("1:2", "1:2:x", "a"):
        with pytest.raises(ConfigError, match="--diurnal"):
            Diurnal.parse(text)
    with pytest.raises(ConfigError, match="above 0"):
        Diurnal.parse("0:2:60")
    with pytest.raises(ConfigError, match="seconds"):
        Diurnal.parse("1:2:0")
    with pytest.raises(ConfigError, match="not two"):
        ArrivalOptions(rate=1.0, diurnal=Diurnal.parse("1:2:60"))
    assert ArrivalOptions(diurnal=Diurnal.parse("1:2:60")).label == "days of 60 s, 1 to 2 requests / s"


def shapes(*times: float | None) -> list[Shape]:
    return [Shape(parts=(Part(number, 3),), output_len=1, arrival_s=time_s) for number, time_s in enumerate(times)]


def test_shapes_get_the_times_that_samples_get() -> None:
    options = ArrivalOptions(rate=4.0, burstiness=0.5)
    timed = list(time_shapes(iter(shapes(*[None] * 50)), options, 3))
    np.testing.assert_array_equal([s.arrival_s for s in timed], arrival_times(samples(50), options, 3))
    assert [s.arrival_s for s in time_shapes(shapes(0.0, 1.5), ArrivalOptions(), 0)] == [0.0, 1.5]
    assert [s.arrival_s for s in time_shapes(shapes(None, None), ArrivalOptions(), 0)] == [0.0, 0.0]
    with pytest.raises(ConfigError, match="no arrival time"):
        list(time_shapes(shapes(0.0, None), ArrivalOptions(), 0))
    with pytest.raises(ConfigError, match="order"):
        list(time_shapes(shapes(1.0, 0.0), ArrivalOptions(), 0))


def test_times_are_given_one_by_one_where_the_number_is_known() -> None:
    def endless() -> Iterator[Shape]:
        for number in itertools.count():
            yield from shapes(None)
            assert number < 3, "read further than was asked"

    timed = time_shapes(endless(), ArrivalOptions(rate=1.0), 0, count=1_000_000)
    assert len(list(itertools.islice(timed, 3))) == 3
