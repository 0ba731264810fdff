"""Simulated runs as pictures: steps over time, pages, latencies.

Every function returns a matplotlib `Figure`, which a notebook shows by itself and `save_figure` writes. They need the
extra `lab`.

The Gantt chart has two parts, since a run has tens of thousands of steps, and a picture a thousand columns. The upper
part shows the shares of the time over the whole run, the lower one single steps of a short window.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.lab.simulation.results import LabResult
from jaxserve.lab.simulation.simulate import SimulatedStep
from jaxserve.lab.workloads.pictures import check_plot, line_style, plot_shares, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_gantt", "plot_latencies", "plot_overview", "plot_pages", "save_figure"]

_KINDS = ("decode only", "prompts and decode", "prompts only")
_COLORS: Mapping[str, str] = {
    "decode only": "#1b6ca8",
    "prompts and decode": "#edae49",
    "prompts only": "#d1495b",
    "idle": "#e6e8eb",
    "host": "#56606b",
}
_WINDOW_STEPS = 60
_NUM_BINS = 200
_SHOWN = 99.5  # percent of the latencies; a few very late requests would flatten all the rest


def plot_gantt(result: LabResult, start_s: float | None = None, end_s: float | None = None) -> "Figure":
    """Where the device's time went, and the steps of a window; without one, some 60 around the fullest queue.

    Of several replicas the steps of all are drawn over each other: simulate one for this. Raises ConfigError when the
    run kept no steps, or none of them lies in the window.
    """
    steps = _steps_of(result)
    figure = _new_figure(11, 5.2)
    shares, lanes = figure.subplots(2, 1, height_ratios=(1, 1))
    _draw_shares(shares, result)
    shares.set(title=f"{result.label}: share of the device's time")
    window = _window(steps, start_s, end_s)
    if not window:
        raise ConfigError(f"{result.label} has no step between {start_s} and {end_s} s")
    first_s, last_s = window[0].device_start_s, max(_end_s(step) for step in window)
    shares.set_xlim(0, result.simulation.duration_s)
    shares.axvspan(first_s, last_s, color="black", alpha=0.25, lw=0)
    _draw_lanes(lanes, window, first_s)
    lanes.set(title=f"steps from {first_s:.3f} s on (the dark line above)")
    _add_legend(figure, [*_KINDS, "idle", "host"])
    return figure


def plot_pages(results: Sequence[LabResult]) -> "Figure":
    """Pages that sequences hold, and sequences that wait, over time. Raises ConfigError when steps were not kept."""
    figure = _new_figure(11, 5.2)
    _draw_pages(figure.subplots(2, 1, sharex=True), results)
    return figure


def plot_latencies(results: Sequence[LabResult]) -> "Figure":
    """Distributions of TTFT and TPOT, one line for each run."""
    figure = _new_figure(11, 4.2)
    _draw_latencies(figure.subplots(1, 2), results)
    return figure


def plot_overview(results: Sequence[LabResult], title: str = "") -> "Figure":
    """All pictures for runs beside each other: latencies, pages, queue, and what each device did."""
    num_lanes = len(results)
    figure = _new_figure(12, 7.5 + 1.1 * num_lanes)
    figure.suptitle(title or "simulated runs")
    parts: Any = figure.subfigures(2, 1, height_ratios=(7.0, 0.9 + 1.1 * num_lanes))
    upper, lower = parts
    axes = upper.subplots(2, 2)
    _draw_latencies(axes[0], results)
    _draw_pages(axes[1], results)
    strips = lower.subplots(num_lanes, 1, sharex=True, squeeze=False)[:, 0]
    for number, (axis, result) in enumerate(zip(strips, results, strict=True)):
        _draw_shares(axis, result)
        axis.set_ylabel(result.label, rotation=0, ha="right", va="center", labelpad=4)
        if number < num_lanes - 1:
            axis.set_xlabel("")
    strips[0].set_xlim(0, max(result.simulation.duration_s for result in results))
    strips[0].set_title("share of the devices' time")
    _add_legend(lower, [*_KINDS, "idle"])
    return figure


def _new_figure(width: float, height: float) -> "Figure":
    check_plot("lab")
    from matplotlib.figure import Figure  # half a second, and not needed for figures in text

    return Figure(figsize=(width, height), layout="constrained")


def _steps_of(result: LabResult) -> Sequence[SimulatedStep]:
    if not result.simulation.steps:
        raise ConfigError(f"{result.label} has no steps to draw: simulate with keep_steps=True")
    return result.simulation.steps


def _end_s(step: SimulatedStep) -> float:
    return step.device_start_s + step.device_s


def _kind(step: SimulatedStep) -> str:
    return _KINDS[0] if not step.chunks else _KINDS[1] if step.decode_rows else _KINDS[2]


def _draw_latencies(axes: Any, results: Sequence[LabResult]) -> None:
    of_ttft: dict[str, list[float]] = {}
    of_tpot: dict[str, list[float]] = {}
    for result in results:
        ttfts, tpots = of_ttft.setdefault(result.label, []), of_tpot.setdefault(result.label, [])
        for request in result.simulation.requests:
            if request.error or request.first_token_s is None or request.last_token_s is None:
                continue
            ttfts.append(request.first_token_s - request.arrival_s)
            if request.output_tokens > 1:
                tpots.append((request.last_token_s - request.first_token_s) / (request.output_tokens - 1))
    for axis, name, series in ((axes[0], "TTFT", of_ttft), (axes[1], "TPOT", of_tpot)):
        plot_shares(axis, series)
        axis.set(title=name)
        axis.grid(alpha=0.3)
        ends = [float(np.percentile(values, _SHOWN)) for values in series.values() if values]
        if ends and max(ends) > 0:
            axis.set(
                xlim=(0, max(ends) * 1.05e3), xlabel=f"milliseconds (the slowest {100 - _SHOWN:g} % may be outside)"
            )


def _draw_pages(axes: Any, results: Sequence[LabResult]) -> None:
    """Averages over bins of time; of several replicas the sum."""
    for number, result in enumerate(results):
        _steps_of(result)
        edges = np.linspace(0.0, max(result.simulation.duration_s, 1e-9), _NUM_BINS + 1)
        for axis, read in ((axes[0], _held), (axes[1], _waiting)):
            means, label = _over_time(result, read, edges), result.label
            if means.min() < 0:  # a scheduler without counts
                means, label = np.full(len(means), np.nan), f"{label} (does not say)"
            axis.stairs(means, edges, label=label, baseline=None, **line_style(number))
    num_pages = max(result.num_pages * result.num_replicas for result in results)
    if num_pages:
        axes[0].axhline(num_pages, color="black", lw=1, ls="--", label=f"all {num_pages} pages")
    axes[0].set(title="pages that sequences hold", xlabel="seconds", ylabel="pages")
    axes[1].set(title="sequences that wait", xlabel="seconds", ylabel="sequences")
    for axis in axes:
        axis.set_ylim(0, max(1.0, axis.get_ylim()[1]))  # where no sequence waits the scale is one of whole sequences
        axis.grid(alpha=0.3)
        axis.legend()


def _held(step: SimulatedStep) -> float:
    return step.held_pages


def _waiting(step: SimulatedStep) -> float:
    return step.waiting


def _over_time(result: LabResult, read: Callable[[SimulatedStep], float], edges: np.ndarray) -> np.ndarray:
    """The mean of a value of steps within each bin, summed over engines. A step counts until the next one begins, or
    until it is done where the engine slept after it.
    """
    total = np.zeros(len(edges) - 1)
    for lane in result.lanes:
        begins = np.fromiter((step.start_s for step in lane), float, len(lane))
        done = np.fromiter((_end_s(step) + step.commit_s for step in lane), float, len(lane))
        values = np.fromiter((read(step) for step in lane), float, len(lane))
        ends = np.minimum(np.append(begins[1:], np.inf), done)
        total += _within_bins(begins, ends, values, edges)
    return total / np.diff(edges)


def _within_bins(begins: np.ndarray, ends: np.ndarray, weights: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Weight times seconds of the spans within each bin; spans may lie over each other."""

    def passed(moments: np.ndarray) -> np.ndarray:  # sum of weight x max(0, edge - moment), at each edge
        order = np.argsort(moments)
        before = np.searchsorted(moments[order], edges)
        sums = np.concatenate([[0.0], np.cumsum(weights[order])])
        products = np.concatenate([[0.0], np.cumsum((weights * moments)[order])])
        return sums[before] * edges - products[before]

    return np.maximum(np.diff(passed(begins) - passed(ends)), 0.0)


def _draw_shares(axis: "Axes", result: LabResult) -> None:
    steps = _steps_of(result)
    edges = np.linspace(0.0, max(result.simulation.duration_s, 1e-9), _NUM_BINS + 1)
    below = np.zeros(_NUM_BINS)
    for kind in _KINDS:
        chosen = [step for step in steps if _kind(step) == kind]
        begins = np.fromiter((step.device_start_s for step in chosen), float, len(chosen))
        ends = np.fromiter((_end_s(step) for step in chosen), float, len(chosen))
        share = _within_bins(begins, ends, np.ones(len(chosen)), edges) / (np.diff(edges) * result.num_replicas)
        axis.stairs(below + share, edges, baseline=below, fill=True, color=_COLORS[kind])
        below = below + share
    axis.stairs(np.ones(_NUM_BINS), edges, baseline=np.minimum(below, 1.0), fill=True, color=_COLORS["idle"])
    axis.set(ylim=(0, 1), xlabel="seconds", yticks=(0, 1))


def _window(steps: Sequence[SimulatedStep], start_s: float | None, end_s: float | None) -> Sequence[SimulatedStep]:
    if start_s is not None or end_s is not None:
        low, high = start_s or 0.0, float("inf") if end_s is None else end_s
        return [step for step in steps if _end_s(step) >= low and step.start_s < high]
    fullest = max(range(len(steps)), key=lambda i: (steps[i].waiting, steps[i].chunks))
    first = max(0, min(fullest - _WINDOW_STEPS // 3, len(steps) - _WINDOW_STEPS))
    return steps[first : first + _WINDOW_STEPS]


def _draw_lanes(axis: "Axes", window: Sequence[SimulatedStep], first_s: float) -> None:
    last_s = max(_end_s(step) for step in window)
    axis.broken_barh([(0.0, (last_s - first_s) * 1e3)], (0.0, 0.8), color=_COLORS["idle"])
    for kind in _KINDS:
        bars = [((step.device_start_s - first_s) * 1e3, step.device_s * 1e3) for step in window if _kind(step) == kind]
        axis.broken_barh(bars, (0.0, 0.8), facecolors=_COLORS[kind], edgecolors="white", linewidth=0.5)
    host = [((step.start_s - first_s) * 1e3, step.host_s * 1e3) for step in window]
    host += [((_end_s(step) - first_s) * 1e3, step.commit_s * 1e3) for step in window]
    axis.broken_barh(host, (1.0, 0.5), facecolors=_COLORS["host"], edgecolors=_COLORS["host"], linewidth=0.8)
    axis.set(yticks=(0.4, 1.25), yticklabels=("device", "host"), xlabel="milliseconds")
    axis.set(xlim=(0, (last_s - first_s) * 1e3), ylim=(-0.15, 1.65))


def _add_legend(figure: Any, names: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=_COLORS[name], label=name) for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(names), frameon=False)
