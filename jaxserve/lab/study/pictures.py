"""The pictures of a study: lines, throughput against late tokens, distributions, and differences seed by seed.

A *series* is a combination of all axes but the first one with numbers; it has one colour, dash and marker in every
picture. Times are on a logarithmic axis where the largest is more than ten times the smallest.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.lab.study.summary import SHOWN, Difference, Interval, PointSummary, shown_values
from jaxserve.lab.workloads.pictures import check_plot, line_style, plot_shares, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TIMES = ("median_ttft_ms", "p99_ttft_ms", "p99_tpot_ms")
_RATES = ("request_goodput", "output_throughput")  # the first that the points have
_DIFFERENCES = ("request_goodput", "output_throughput", "median_ttft_ms", "p99_ttft_ms", "p99_tpot_ms")
_MOST_LINES = 6
_MOST_VALUES = 4
_WIDE = 10.0  # largest over smallest, from where on an axis is logarithmic
_MARKERS = "osD^vPX*"
_Style = Mapping[str, Any]


def draw(points: Sequence[PointSummary], differences: Sequence[Difference], folder: Path) -> list[Path]:
    """The pictures that these points give; returns their files. Needs matplotlib."""
    check_plot("lab")
    axis = next((name for name in points[0].axes if _is_numeric(points, name)), None)
    series = _series(points, axis)
    figures = {"pareto.png": _draw_pareto(series, axis), "cdf.png": _draw_distributions(series, axis)}
    if axis is not None:
        figures["lines.png"] = _draw_lines(series, axis)
        if differences:
            figures["differences.png"] = _draw_differences(points, differences, axis)
    for name, figure in figures.items():
        save_figure(figure, folder / name)
    return [folder / name for name in figures]


def _series(points: Sequence[PointSummary], axis: str | None) -> dict[str, list[PointSummary]]:
    """The points of each series, by the values of `axis`."""
    names = shown_values(points)
    found: dict[str, list[PointSummary]] = {}
    for point in points:
        others = [f"{_short(name)} {names[name, str(value)]}" for name, value in point.axes.items() if name != axis]
        found.setdefault(", ".join(others) or "all", []).append(point)
    if axis is not None:
        for line in found.values():
            line.sort(key=lambda point: point.axes[axis])
    return found


def _draw_lines(series: Mapping[str, list[PointSummary]], axis: str) -> "Figure":
    points = [point for line in series.values() for point in line]
    names = [name for name in (*_rate_of(points), *_TIMES) if all(name in point.figures for point in points)]
    if "capacity" in points[0].figures:
        names = ["capacity", *names[:3]]
    figure = _new_figure(11, 7)
    for plot, name in zip(figure.subplots(2, 2).flat, names, strict=False):
        means = [point.figures[name].mean for point in points if name in point.figures]
        low = _logarithmic(plot, "y", means) if name in _TIMES else None
        for number, line in enumerate(series.values()):
            there = [(point.axes[axis], point.figures[name]) for point in line if name in point.figures]
            _draw_band(plot, there, _style(number), low)
        plot.set(xlabel=_short(axis), ylabel=SHOWN[name])
        if low is None:
            plot.set_ylim(bottom=0)
    _draw_legend(figure, series)
    figure.suptitle("means over seeds, bands of confidence", fontsize="small")
    return figure


def _draw_band(
    plot: "Axes", places: Sequence[tuple[float, Interval]], style: _Style, low: float | None, label: str | None = None
) -> None:
    """Means, and a band of their intervals, which ends at `low` where the axis is logarithmic."""
    xs, means = [x for x, _ in places], [one.mean for _, one in places]
    plot.plot(xs, means, markersize=4, label=label, **style)
    halves = [one.half_width or 0.0 for _, one in places]
    below = [mean - half for mean, half in zip(means, halves, strict=True)]
    if low is not None:
        below = [max(value, low) for value in below]
    above = [mean + half for mean, half in zip(means, halves, strict=True)]
    plot.fill_between(xs, below, above, color=style["color"], alpha=0.15, linewidth=0)


def _draw_pareto(series: Mapping[str, list[PointSummary]], axis: str | None) -> "Figure":
    figure = _new_figure(11, 4.6)
    for plot, name in zip(figure.subplots(1, 2), ("p99_ttft_ms", "p99_tpot_ms"), strict=True):
        lines = {
            label: [
                (point.figures["output_throughput"].mean, point.figures[name].mean)
                for point in line
                if name in point.figures and "output_throughput" in point.figures
            ]
            for label, line in series.items()
        }
        places = [place for line in lines.values() for place in line]
        best = [place for place in places if not any(_beats(other, place) for other in places)]
        plot.plot(*zip(*sorted(best), strict=True), color="0.8", linewidth=6, zorder=0) if best else None
        for number, line in enumerate(lines.values()):
            plot.plot([x for x, _ in line], [y for _, y in line], markersize=4, **_style(number))
            plot.plot(*line[-1], markersize=8, **_style(number)) if line else None
        plot.set(xlabel=SHOWN["output_throughput"], ylabel=SHOWN[name])
        if _logarithmic(plot, "y", [latency for _, latency in places]) is None:
            plot.set_ylim(0, 1.1 * max((latency for _, latency in places), default=1.0))
    _draw_legend(figure, series)
    along = ""
    if axis is not None:
        values = [point.axes[axis] for line in series.values() for point in line]
        along = f"along each line {_short(axis)} from {min(values):g} to {max(values):g}, the last larger; "
    figure.suptitle(f"{along}grey: what no other point beats", fontsize="small")
    return figure


def _draw_distributions(series: Mapping[str, list[PointSummary]], axis: str | None) -> "Figure":
    lines = [list(series)[place] for place in _spread(len(series), _MOST_LINES)]
    all_values = (
        sorted({point.axes[axis] for line in series.values() for point in line}) if axis is not None else [None]
    )
    values = [all_values[place] for place in _spread(len(all_values), _MOST_VALUES)]
    figure = _new_figure(max(7.0, 3.4 * len(values)), 6.4)
    plots = figure.subplots(2, len(values), squeeze=False)
    for row, name in zip(plots, ("ttft_ms", "tpot_ms"), strict=True):
        for plot, value in zip(row, values, strict=True):
            shown = {
                label: [ms / 1e3 for run in point.runs for ms in run["distributions"][name]]
                for label in lines
                for point in series[label]
                if axis is None or point.axes[axis] == value
            }
            plot_shares(plot, shown)
            if (legend := plot.get_legend()) is not None:
                legend.remove()
            _logarithmic(plot, "x", [1e3 * seconds for one in shown.values() for seconds in one])
            at = "" if axis is None else f", {_short(axis)} {value:g}"
            plot.set_title(f"{name.removesuffix('_ms').upper()}{at}", fontsize="small")
    handles, labels = plots[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize="small", ncols=3)
    told = []
    if axis is not None and len(values) < len(all_values):
        told.append(f"{len(values)} of {len(all_values)} values of {_short(axis)}")
    if len(lines) < len(series):
        told.append(f"{len(lines)} of {len(series)} lines")
    figure.suptitle(f"all seeds together{'; shown: ' if told else ''}{' and '.join(told)}", fontsize="small")
    return figure


def _draw_differences(points: Sequence[PointSummary], differences: Sequence[Difference], axis: str) -> "Figure":
    names = shown_values(points)
    figures = [name for name in _DIFFERENCES if all(name in one.figures for one in differences)]
    figures = [name for name in figures if name != "output_throughput" or "request_goodput" not in figures][:4]
    figure = _new_figure(11, 7)
    plots = figure.subplots(2, 2)
    labels: dict[str, list[Difference]] = {}
    for one in differences:
        others = [f"{_short(name)} {names[name, str(value)]}" for name, value in one.axes.items() if name != axis]
        labels.setdefault(", ".join(others), []).append(one)
    for plot, name in zip(plots.flat, figures, strict=False):
        plot.axhline(0, color="0.6", linewidth=1)
        for number, (label, line) in enumerate(labels.items()):
            there = sorted(((one.axes[axis], one.figures[name]) for one in line), key=lambda place: place[0])
            _draw_band(plot, there, _style(number + 1), None, label)  # the first colour is what they differ from
        plot.set(xlabel=_short(axis), ylabel=f"difference of {SHOWN[name]}")
    for plot in list(plots.flat)[len(figures) :]:
        plot.remove()
    first = differences[0]
    against = f"{_short(first.axis)} {names[first.axis, str(first.against)]}"
    figure.suptitle(f"against {against}, seed by seed; bands of confidence", fontsize="small")
    figure.legend(*plots.flat[0].get_legend_handles_labels(), loc="outside lower center", fontsize="small", ncols=3)
    return figure


def _draw_legend(figure: "Figure", series: Mapping[str, object]) -> None:
    from matplotlib.lines import Line2D

    if len(series) > 1:
        handles = [Line2D([], [], label=label, markersize=4, **_style(n)) for n, label in enumerate(series)]
        figure.legend(handles=handles, loc="outside lower center", fontsize="small", ncols=3)


def _style(number: int) -> dict[str, Any]:
    return {**line_style(number), "marker": _MARKERS[number % len(_MARKERS)]}


def _logarithmic(plot: "Axes", which: str, values: Sequence[float]) -> float | None:
    """Makes an axis logarithmic if these need it; half of the smallest, where bands end. None: it stays as it is."""
    least = min((value for value in values if value > 0), default=0.0)
    if not least or max(values) <= _WIDE * least:
        return None
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    plot.set(**{f"{which}scale": "log"})
    axis = plot.xaxis if which == "x" else plot.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 3)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
    return least / 2


def _rate_of(points: Sequence[PointSummary]) -> list[str]:
    return [name for name in _RATES if all(name in point.figures for point in points)][:1]


def _spread(count: int, most: int) -> list[int]:
    """At most so many of the places below `count`, evenly, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(number * (count - 1) / (most - 1)) for number in range(most)]


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """No worse in throughput and latency, and not the same."""
    return one[0] >= other[0] and one[1] <= other[1] and one != other


def _is_numeric(points: Sequence[PointSummary], axis: str) -> bool:
    values = {point.axes[axis] for point in points}
    return len(values) > 1 and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _short(name: str) -> str:
    """A name without what all names of its kind begin with."""
    return name.removeprefix("load.").removeprefix("config.")


def _new_figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure  # half a second, and not needed for tables

    return Figure(figsize=(width, height), layout="constrained")
