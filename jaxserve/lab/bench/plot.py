"""Results as a picture: one run over time with its distributions, or a sweep.

It needs matplotlib, of the extra `bench`, and only when a plot is asked for.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.lab.bench.report import Run, ServeReport
from jaxserve.lab.workloads.metrics import Spread, request_times
from jaxserve.lab.workloads.pictures import PALETTE, plot_shares, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_serve(report: ServeReport, path: Path) -> None:
    """Draws one run, or a sweep, as a PNG. Raises ConfigError when it cannot be written."""
    from matplotlib.figure import Figure  # half a second, and not needed for figures in text

    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    figure.suptitle(f"{report.target.get('model') or ''}, {report.target.get('backend')}, {report.load.get('dataset')}")
    if len(report.runs) == 1:
        _plot_run(report.runs[0], axes)
    else:
        _plot_sweep(report.runs, axes)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    save_figure(figure, path)


def _plot_run(run: Run, axes: Any) -> None:
    answered = [o for o in run.outcomes if o.failure is None]
    times = [request_times(o) for o in answered]
    plot_shares(axes[0, 0], {"TTFT": [t.ttft_s for t in times], "E2EL": [t.e2el_s for t in times]})
    plot_shares(
        axes[0, 1],
        {"ITL": [s for t in times for s in t.itls_s], "TPOT": [t.tpot_s for t in times if t.tpot_s is not None]},
    )
    outputs_s = np.array([t - run.start_s for o in answered for t in o.output_times_s])
    num_bins = max(1, min(200, int(np.ceil(run.metrics.duration_s))))
    counts, edges = np.histogram(outputs_s, bins=num_bins, range=(0.0, max(run.metrics.duration_s, 1e-9)))
    axes[1, 0].stairs(counts / np.diff(edges), edges, color=PALETTE[0], fill=True, alpha=0.6)
    axes[1, 0].set(xlabel="seconds", ylabel="outputs / s", title="output over time")
    starts = sorted((o.start_s - run.start_s, 1) for o in run.outcomes)
    edges_s = sorted(starts + [(o.end_s - run.start_s, -1) for o in run.outcomes])
    axes[1, 1].step(
        [time_s for time_s, _ in edges_s], np.cumsum([change for _, change in edges_s]), where="post", color=PALETTE[1]
    )
    axes[1, 1].set(xlabel="seconds", ylabel="requests", title="open requests")


def _plot_sweep(runs: Sequence[Run], axes: Any) -> None:
    by_rate = all(run.max_concurrency == runs[0].max_concurrency for run in runs)
    x: list[Any] = [run.rate if by_rate else run.max_concurrency for run in runs]
    if math.inf in x:  # has no place on a scale: names in a row take the numbers' place
        x = [f"{rate:g}" for rate in x]
    label = "requests / s asked for" if by_rate else "requests at once"
    _plot_lines(axes[0, 0], x, {"output tokens / s": [run.metrics.output_throughput for run in runs]})
    good = {"answered": [run.metrics.request_throughput for run in runs]}
    if runs[0].metrics.request_goodput is not None:
        good["good"] = [run.metrics.request_goodput or 0.0 for run in runs]
    _plot_lines(axes[0, 1], x, good)
    axes[0, 1].set(ylabel="requests / s")
    for axis, field in ((axes[1, 0], "ttft_ms"), (axes[1, 1], "tpot_ms")):
        spreads: list[Spread] = [getattr(run.metrics, field) for run in runs]
        lines = {"median": [s.median for s in spreads]}
        lines |= {
            f"p{percent:g}": [s.percentiles[percent] for s in spreads]
            for percent in spreads[0].percentiles
            if percent != 50
        }
        _plot_lines(axis, x, lines)
        axis.set(ylabel=f"{field.removesuffix('_ms').upper()}, ms")
    for axis in axes.flat:
        axis.axhline(0, color="none")  # so that the scale is chosen with zero in it, and leaves room above the highest
        axis.set(xlabel=label, ylim=(0, None))


def _plot_lines(axis: "Axes", x: list[Any], lines: dict[str, Any]) -> None:
    for (name, values), color in zip(lines.items(), PALETTE * 2, strict=False):
        axis.plot(x, [np.nan if value is None else value for value in values], marker="o", label=name, color=color)
    axis.legend()
