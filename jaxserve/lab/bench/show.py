"""Results as tables for a person: the metrics as `workloads.tables` draws them, with failures, notes and warnings."""

import rich.console
import rich.text

from jaxserve.lab.bench.report import OfflineReport, Run, ServeReport
from jaxserve.lab.workloads.tables import (
    compare_rates,
    compare_times,
    figures_table,
    format_number,
    make_title,
    new_table,
    spread_table,
    times_table,
)

_MAX_DETAILS = 3


def show_serve(report: ServeReport, console: rich.console.Console) -> None:
    """One run in full, or a sweep as one line for each run."""
    if len(report.runs) == 1:
        _show_run(report.runs[0], console)
    else:
        runs = [(run.label, run.metrics) for run in report.runs]
        console.print(make_title("one line for each load"), compare_rates(runs))
        console.print(make_title("times in ms"), compare_times(runs))
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
    console.print(make_title(report.title))
    table = new_table(headed=False)
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in report.figures.items():
        table.add_row(name, format_number(value))
    console.print(table)
    if report.spreads:
        console.print(spread_table(list(report.spreads.items())))
    for line in report.warnings:
        console.print(rich.text.Text(f"warning: {line}", style="bold yellow"))


def _show_run(run: Run, console: rich.console.Console) -> None:
    console.print(make_title(f"{run.label}: {run.metrics.duration_s:.2f} s"))
    generator = [
        ("generator: loop late p99, max (ms)", f"{run.lag.loop_p99_ms:.2f}, {run.lag.loop_max_ms:.2f}"),
        ("generator: share of a core", f"{run.lag.cpu_share:.0%}"),
    ]
    console.print(figures_table(run.metrics, generator), times_table(run.metrics))


def _print_failures(console: rich.console.Console, prefix: str, kind: str, count: int, run: Run) -> None:
    console.print(rich.text.Text(f"{prefix}failed: {count} x {kind}", style="bold red"))
    details = dict.fromkeys(outcome.detail for outcome in run.outcomes if outcome.failure == kind)
    for detail in list(details)[:_MAX_DETAILS]:
        console.print(rich.text.Text(f"    {detail}"))
