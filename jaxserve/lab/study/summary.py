"""Points of a study over their seeds: means with intervals, and differences between those that met equal requests."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.lab.study.figures import Interval, interval
from jaxserve.lab.study.spec import Study

SHOWN: Mapping[str, str] = {
    "capacity": "capacity, requests/s",
    "request_throughput": "requests/s",
    "request_goodput": "goodput, requests/s",
    "output_throughput": "tokens/s",
    "good_share": "good",
    "median_ttft_ms": "TTFT p50, ms",
    "p99_ttft_ms": "TTFT p99, ms",
    "median_tpot_ms": "TPOT p50, ms",
    "p99_tpot_ms": "TPOT p99, ms",
    "jain": "Jain",
    "qoe": "QoE",
}
Figures = dict[str, Interval]


class PointSummary:
    """The runs of one point.

    Attributes:
      axes: its place in the grid.
      figures: mean and interval of each figure that every seed has as a number.
      runs: as `run_study` gives them.
    """

    def __init__(self, axes: dict[str, Any], runs: Sequence[dict[str, Any]], confidence: float) -> None:
        self.axes = axes
        self.runs = runs
        self.figures: Figures = {
            name: interval(values, confidence)
            for name in runs[0]["figures"]
            if (values := _values(runs, name)) is not None
        }


class Difference(NamedTuple):
    """What a point has more than the point that has `against` on `axis` and is like it otherwise.

    A seed is one list of requests, so the differences of each seed are taken first: their mean has an interval of its
    own, which the luck of a seed does not widen.
    """

    axes: Mapping[str, Any]
    axis: str
    against: Any
    figures: Figures


def summarise(study: Study, runs: Sequence[dict[str, Any]]) -> list[PointSummary]:
    """The points of a study, in the order of its grid; `runs` as `run_study` gives them."""
    groups = [runs[start : start + study.seeds] for start in range(0, len(runs), study.seeds)]
    return [PointSummary(group[0]["axes"], group, study.confidence) for group in groups]


def differences(points: Sequence[PointSummary], confidence: float) -> list[Difference]:
    """Every point against that with the first value of the grid's first axis that has words, or, without one, of its
    first axis. Empty where that axis has one value."""
    axes = list(points[0].axes)
    words = [name for name in axes if any(isinstance(point.axes[name], str) for point in points)]
    axis = next(iter(words or axes), None)
    if axis is None:
        return []
    first = points[0].axes[axis]
    found = []
    for point in points:
        if point.axes[axis] == first:
            continue
        base = next(one for one in points if one.axes == {**point.axes, axis: first})
        figures = {}
        for name in SHOWN:
            own, others = _values(point.runs, name), _values(base.runs, name)
            if own is not None and others is not None:
                figures[name] = interval([a - b for a, b in zip(own, others, strict=True)], confidence)
        found.append(Difference(point.axes, axis, first, figures))
    return found


def shown_values(points: Sequence[PointSummary]) -> dict[tuple[str, str], str]:
    """By axis and value: the value in few words. Of a class that is named by module or file, its own name, unless two
    values would look alike."""
    found: dict[tuple[str, str], str] = {}
    for axis in points[0].axes:
        values = list(dict.fromkeys(str(point.axes[axis]) for point in points))
        short = {value: _without_module(value) if axis in ("policy", "router") else value for value in values}
        counts = Counter(short.values())
        found |= {(axis, value): short[value] if counts[short[value]] == 1 else value for value in values}
    return found


def _without_module(value: str) -> str:
    name, mark, parameters = value.partition("?")
    return name.rpartition(":")[2] + mark + parameters


def _values(runs: Sequence[dict[str, Any]], name: str) -> list[float] | None:
    values = [run["figures"].get(name) for run in runs]
    return None if any(value is None for value in values) else [float(value) for value in values]
