"""What a study leaves beside its runs: `runs.csv`, `points.csv`, and pictures.

runs.csv     the frame: a line for each point and seed, its axes first
points.csv   a line for each point: the mean of each figure over seeds, and half the width of its interval
lines.png    figures against the first axis that has numbers, one line for each combination of the others
pareto.png   throughput against the 99th percentile of TTFT and TPOT; points that no other beats are joined
cdf.png      distributions of TTFT and TPOT, all seeds of a point together; at most six points, evenly chosen
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich.console
import rich.table

from jaxserve.errors import ConfigError
from jaxserve.lab.study.figures import Interval, interval
from jaxserve.lab.study.spec import Study
from jaxserve.lab.workloads.pictures import check_plot, line_style, plot_shares, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN: Mapping[str, str] = {
    "capacity": "capacity, requests/s",
    "request_throughput": "requests/s",
    "output_throughput": "tokens/s",
    "good_share": "good",
    "median_ttft_ms": "TTFT p50, ms",
    "p99_ttft_ms": "TTFT p99, ms",
    "median_tpot_ms": "TPOT p50, ms",
    "p99_tpot_ms": "TPOT p99, ms",
    "jain": "Jain",
    "qoe": "QoE",
}
_DRAWN = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "p99_tpot_ms")
_MOST_LINES = 6
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
        self.figures: Figures = {}
        for name in runs[0]["figures"]:
            values = [run["figures"][name] for run in runs]
            if all(value is not None for value in values):
                self.figures[name] = interval([float(value) for value in values], confidence)

    @property
    def label(self) -> str:
        """Its place in words."""
        return ", ".join(f"{_short(name)} {value}" for name, value in self.axes.items()) or "all"


def summarise(study: Study, runs: Sequence[dict[str, Any]]) -> list[PointSummary]:
    """The points of a study, in the order of its grid; `runs` as `run_study` gives them."""
    groups = [runs[start : start + study.seeds] for start in range(0, len(runs), study.seeds)]
    return [PointSummary(group[0]["axes"], group, study.confidence) for group in groups]


def write_tables(points: Sequence[PointSummary], folder: Path) -> None:
    """`runs.csv` and `points.csv`. Raises ConfigError."""
    rows = [{**run["axes"], "seed": run["seed"], **run["figures"]} for point in points for run in point.runs]
    _write_csv(folder / "runs.csv", rows)
    means = []
    for point in points:
        row = dict(point.axes)
        for name, one in point.figures.items():
            row |= {name: one.mean, f"{name}_half_width": one.half_width}
        means.append(row)
    _write_csv(folder / "points.csv", means)


def show_points(points: Sequence[PointSummary], study: Study, console: rich.console.Console) -> None:
    """Prints a line for each point: means, each with half the width of its interval."""
    names = [name for name in _SHOWN if any(name in point.figures for point in points)]
    table = rich.table.Table(box=None, header_style="bold")
    for axis in points[0].axes:
        table.add_column(_short(axis))
    for name in names:
        table.add_column(_SHOWN[name], justify="right")
    for point in points:
        cells = [_cell(point.figures.get(name)) for name in names]
        table.add_row(*(str(value) for value in point.axes.values()), *cells)
    console.print(table)
    console.print(
        f"means over {study.seeds} seeds, ± half the interval of {study.confidence:.0%} confidence; the first "
        f"{study.warmup:.0%} of the requests are left out"
        if study.seeds > 1
        else f"one seed; the first {study.warmup:.0%} of the requests are left out"
    )


def draw(points: Sequence[PointSummary], folder: Path) -> list[Path]:
    """The pictures that these points give; returns their files. Needs matplotlib."""
    check_plot("lab")
    figures = {"pareto.png": _draw_pareto(points), "cdf.png": _draw_distributions(points)}
    axis = next((name for name in points[0].axes if _is_numeric(points, name)), None)
    if axis is not None:
        figures["lines.png"] = _draw_lines(points, axis)
    for name, figure in figures.items():
        save_figure(figure, folder / name)
    return [folder / name for name in figures]


def _draw_lines(points: Sequence[PointSummary], axis: str) -> "Figure":
    names = [name for name in _DRAWN if all(name in point.figures for point in points)]
    if "capacity" in points[0].figures:
        names = ["capacity", *names[:3]]
    lines: dict[str, list[PointSummary]] = {}
    for point in points:
        others = {name: value for name, value in point.axes.items() if name != axis}
        label = ", ".join(f"{_short(name)} {value}" for name, value in others.items())
        lines.setdefault(label, []).append(point)
    figure = _new_figure(11, 7)
    for plot, name in zip(figure.subplots(2, 2).flat, names, strict=False):
        for number, (label, line) in enumerate(lines.items()):
            line = sorted(line, key=lambda point: point.axes[axis])
            values = [point.figures.get(name) for point in line]
            there = [(point.axes[axis], one) for point, one in zip(line, values, strict=True) if one is not None]
            plot.errorbar(
                [x for x, _ in there],
                [one.mean for _, one in there],
                yerr=[one.half_width or 0.0 for _, one in there],
                label=label,
                marker="o",
                markersize=3,
                capsize=2,
                **line_style(number),
            )
        plot.set(xlabel=_short(axis), ylabel=_SHOWN[name])
        plot.set_ylim(bottom=0)
    if len(lines) > 1:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    return figure


def _draw_pareto(points: Sequence[PointSummary]) -> "Figure":
    figure = _new_figure(11, 4.6)
    for plot, name in zip(figure.subplots(1, 2), ("p99_ttft_ms", "p99_tpot_ms"), strict=True):
        there = [point for point in points if name in point.figures]
        places = [(point.figures["output_throughput"].mean, point.figures[name].mean) for point in there]
        best = [place for place in places if not any(_beats(other, place) for other in places)]
        plot.plot(*zip(*sorted(best), strict=True), color="0.7") if best else None
        for number, (point, place) in enumerate(zip(there, places, strict=True)):
            style = line_style(number)
            plot.plot(*place, "o", color=style["color"])
            if len(there) <= 20:
                plot.annotate(point.label, place, fontsize="x-small", textcoords="offset points", xytext=(4, 3))
        plot.set(xlabel=_SHOWN["output_throughput"], ylabel=_SHOWN[name])
        plot.set_ylim(0, 1.1 * max((latency for _, latency in places), default=1.0))
    return figure


def _draw_distributions(points: Sequence[PointSummary]) -> "Figure":
    step = max(1, -(-len(points) // _MOST_LINES))
    figure = _new_figure(11, 4.6)
    for plot, name in zip(figure.subplots(1, 2), ("ttft_ms", "tpot_ms"), strict=True):
        series = {
            point.label: [value / 1e3 for run in point.runs for value in run["distributions"][name]]
            for point in points[::step]
        }
        plot_shares(plot, series)
        plot.set_title(name.removesuffix("_ms").upper())
        plot.legend(fontsize="x-small")
    return figure


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """No worse in throughput and latency, and not the same."""
    return one[0] >= other[0] and one[1] <= other[1] and one != other


def _is_numeric(points: Sequence[PointSummary], axis: str) -> bool:
    values = {point.axes[axis] for point in points}
    return len(values) > 1 and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _short(name: str) -> str:
    """A name without what all names of its kind begin with."""
    return name.removeprefix("load.").removeprefix("config.")


def _cell(one: Interval | None) -> str:
    if one is None:
        return "-"
    return f"{one.mean:.4g}" if one.half_width is None else f"{one.mean:.4g} ± {one.half_width:.2g}"


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def _new_figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure  # half a second, and not needed for tables

    return Figure(figsize=(width, height), layout="constrained")
