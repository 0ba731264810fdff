"""The ladder of degradation on a clock of the test: which pressure for how long takes which rung, and gives it back."""

import dataclasses
from typing import Any

import pytest

from jaxserve.errors import ConfigError
from jaxserve.sched.ladder import Ladder, LadderOptions, Pressure, Rung

OPTIONS = LadderOptions(highest=Rung.DRAIN, up_s=5.0, down_s=30.0, calm=0.5)
CALM, BETWEEN, LATE = Pressure(), Pressure(queue=0.7), Pressure(queue=1.0)
SLOW, BROKEN_STORE = Pressure(steps=3.0), Pressure(tiers=2.0)


def after(looks: list[tuple[float, Pressure]], start: Rung = Rung.NONE, options: LadderOptions = OPTIONS) -> Rung:
    """The rung after (seconds since the last look, pressure) of each look."""
    ladder, now_s = Ladder(options=options, rung=start), 100.0
    for seconds, pressure in looks:
        now_s += seconds
        ladder = ladder.observe(now_s, pressure)
    return ladder.rung


@pytest.mark.parametrize(
    ("looks", "start", "rung"),
    [
        pytest.param([(0, CALM)] * 5, Rung.NONE, Rung.NONE, id="nothing happens to a healthy engine"),
        pytest.param([(0, LATE), (4.9, LATE)], Rung.NONE, Rung.NONE, id="not long enough"),
        pytest.param([(0, LATE), (5, LATE)], Rung.NONE, Rung.NO_PREFETCH, id="long enough"),
        pytest.param([(0, SLOW), (5, SLOW)], Rung.NONE, Rung.NO_PREFETCH, id="slow steps"),
        pytest.param([(0, LATE), (4, BETWEEN), (1, LATE), (4, LATE)], Rung.NONE, Rung.NONE, id="with a break"),
        pytest.param([(0, LATE), (60, LATE)], Rung.NONE, Rung.NO_PREFETCH, id="one rung at a look"),
        pytest.param([(0, LATE), (5, LATE), (4, LATE)], Rung.NONE, Rung.NO_PREFETCH, id="each rung has its time"),
        pytest.param([(0, LATE), *[(5, LATE)] * 7], Rung.NONE, Rung.DRAIN, id="all the way down"),
        pytest.param([(0, BETWEEN), *[(60, BETWEEN)] * 3], Rung.REFUSE, Rung.REFUSE, id="neither high nor calm"),
        pytest.param([(0, CALM), (29, CALM)], Rung.REFUSE, Rung.REFUSE, id="not calm for long enough"),
        pytest.param([(0, CALM), (30, CALM)], Rung.REFUSE, Rung.SMALL_CHUNKS, id="calm for long enough"),
        pytest.param([(0, CALM), (29, LATE), (1, CALM), (29, CALM)], Rung.REFUSE, Rung.REFUSE, id="calm anew"),
        pytest.param([(0, CALM), *[(30, CALM)] * 9], Rung.REFUSE, Rung.NONE, id="all the way back"),
        pytest.param([(0, CALM), *[(30, CALM)] * 9], Rung.DRAIN, Rung.DRAIN, id="no way back from the end"),
        pytest.param([(0, BROKEN_STORE), *[(5, BROKEN_STORE)] * 9], Rung.NONE, Rung.NO_STORE, id="a store in trouble"),
        pytest.param([(0, BROKEN_STORE), (60, BROKEN_STORE)], Rung.REFUSE, Rung.SMALL_CHUNKS, id="which is no load"),
    ],
)
def test_rungs(looks: list[tuple[float, Pressure]], start: Rung, rung: Rung) -> None:
    assert after(looks, start) is rung


def test_a_load_that_swings_around_the_limit_changes_nothing() -> None:
    ladder = Ladder(options=OPTIONS)
    for second in range(600):
        ladder = ladder.observe(float(second), LATE if second % 4 < 2 else BETWEEN)
        assert ladder.rung is Rung.NONE


def test_the_highest_rung_and_the_order_of_all() -> None:
    looks = [(0.0, LATE), *[(5.0, LATE)] * 20]
    assert [after(looks, options=dataclasses.replace(OPTIONS, highest=rung)) for rung in Rung] == list(Rung)
    assert [Rung.of(rung.label) for rung in Rung] == list(Rung)


@pytest.mark.parametrize("wrong", [{"up_s": -1.0}, {"down_s": -1.0}, {"calm": 0.0}, {"calm": 1.0}])
def test_wrong_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"degrade\.{next(iter(wrong))} is"):
        LadderOptions(**wrong)
