"""Results as tables for a person.

Owns the look. Refuses to compute.
"""

import math
from collections.abc import Sequence

import rich.box
import rich.console
import rich.table
import rich.text

from jaxserve.bench.metrics import Metrics, Spread
from jaxserve.bench.report import OfflineReport, Run, ServeReport

_NAMES = (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("itl_ms", "ITL"), ("e2el_ms", "E2EL"))
_MAX_DETAILS = 3


def show_serve(report: ServeReport, console: rich.console.Console) -> None:
    """One run in full, or a sweep as one line for each run."""
    if len(report.runs) == 1:
        _show_run(report.runs[0], console)
    else:
        console.print(_title("one line for each load"), _sweep_rates(report.runs))
        console.print(_title("times in ms"), _sweep_times(report.runs))
    for run in report.runs:
        prefix = f"{run.label}: " if len(report.runs) > 1 else ""
        for kind, count in run.metrics.failures.items():
            _print_failures(console, prefix, kind, count, run)
        for line in run.notes:
            console.print(rich.text.Text(f"{prefix}note: {line}"))
        for line in run.warnings:
            console.print(rich.text.Text(f"{prefix}warning: {line}", style="bold yellow"))


def show_offline(report: OfflineReport, console: rich.console.Console) -> None:
    """Figures, then distributions."""
    console.print(_title(report.title))
    table = _table(headed=False)
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in report.figures.items():
        table.add_row(name, _number(value))
    console.print(table)
    if report.spreads:
        console.print(_spread_table(list(report.spreads.items())))
    for line in report.warnings:
        console.print(rich.text.Text(f"warning: {line}", style="bold yellow"))


def _show_run(run: Run, console: rich.console.Console) -> None:
    console.print(_title(f"{run.label}: {run.metrics.duration_s:.2f} s"))
    table = _table(headed=False)
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in _figures(run.metrics):
        table.add_row(name, value)
    table.add_row("generator: loop late p99, max (ms)", f"{run.lag.loop_p99_ms:.2f}, {run.lag.loop_max_ms:.2f}")
    table.add_row("generator: share of a core", f"{run.lag.cpu_share:.0%}")
    console.print(table)
    console.print(_spread_table([(f"{name} (ms)", getattr(run.metrics, field)) for field, name in _NAMES]))


def _figures(metrics: Metrics) -> list[tuple[str, str]]:
    rows = [
        ("answered, failed", f"{metrics.completed}, {metrics.failed}"),
        ("input, output tokens", f"{metrics.input_tokens}, {metrics.output_tokens}"),
        ("requests / s", f"{metrics.request_throughput:.2f}"),
        ("output tokens / s", f"{metrics.output_throughput:.1f}"),
        ("all tokens / s", f"{metrics.total_token_throughput:.1f}"),
        ("most output in one second", f"{metrics.max_output_tokens_per_s:.0f}"),
        ("most requests at once", f"{metrics.max_concurrency}"),
    ]
    if metrics.cached_tokens is not None:
        rows.insert(2, ("of the input, cached", f"{metrics.cached_tokens}"))
    if metrics.request_goodput is not None:
        rows.append(("goodput, requests / s", f"{metrics.request_goodput:.2f}"))
    return rows


def _spread_table(spreads: Sequence[tuple[str, Spread]]) -> rich.table.Table:
    table = _table()
    table.add_column("")
    percents = [percent for percent in spreads[0][1].percentiles if percent != 50]  # that is the median
    for heading in ("mean", "median", "std", *(f"p{percent:g}" for percent in percents)):
        table.add_column(heading, justify="right")
    for name, spread in spreads:
        values = (spread.mean, spread.median, spread.std, *(spread.percentiles[percent] for percent in percents))
        table.add_row(name, *(_number(value) for value in values))
    return table


def _sweep_rates(runs: Sequence[Run]) -> rich.table.Table:
    table = _table()
    with_goodput = runs[0].metrics.request_goodput is not None
    for heading in (
        "",
        "answered",
        "failed",
        "requests/s",
        "output tokens/s",
        *(["goodput/s"] if with_goodput else []),
    ):
        table.add_column(heading, justify="right" if heading else "left")
    for run in runs:
        metrics = run.metrics
        cells = [str(metrics.completed), str(metrics.failed)]
        cells += [_number(metrics.request_throughput), _number(metrics.output_throughput)]
        table.add_row(run.label, *cells, *([_number(metrics.request_goodput)] if with_goodput else []))
    return table


def _sweep_times(runs: Sequence[Run]) -> rich.table.Table:
    """Median and the highest percentile: the others are in the file."""
    table = _table()
    table.add_column("")
    percent = max(runs[0].metrics.ttft_ms.percentiles, default=None)
    for _, name in _NAMES:
        table.add_column(f"{name} p50", justify="right")
        if percent is not None:
            table.add_column(f"p{percent:g}", justify="right")
    for run in runs:
        cells = []
        for field, _ in _NAMES:
            spread: Spread = getattr(run.metrics, field)
            cells += [_number(spread.median)] + ([_number(spread.percentiles[percent])] if percent is not None else [])
        table.add_row(run.label, *cells)
    return table


def _print_failures(console: rich.console.Console, prefix: str, kind: str, count: int, run: Run) -> None:
    console.print(rich.text.Text(f"{prefix}failed: {count} x {kind}", style="bold red"))
    details = dict.fromkeys(outcome.detail for outcome in run.outcomes if outcome.failure == kind)
    for detail in list(details)[:_MAX_DETAILS]:
        console.print(rich.text.Text(f"    {detail}"))


def _table(*, headed: bool = True) -> rich.table.Table:
    return rich.table.Table(box=rich.box.SIMPLE_HEAD, show_header=headed, pad_edge=False)


def _title(text: str) -> rich.text.Text:
    """Not the table's own title, which would be broken at the width of the table."""
    return rich.text.Text(text, style="bold")


def _number(value: float | int | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    decimals = 2 if abs(value) < 100 else 1 if abs(value) < 10_000 else 0
    return f"{value:.{decimals}f}"
