"""Metrics as tables for a person: of one run, and of several beside each other, measured or simulated."""

import math
from collections.abc import Mapping, Sequence

import rich.box
import rich.console
import rich.table
import rich.text

from jaxserve.lab.workloads.metrics import Metrics, Spread

_NAMES = (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("itl_ms", "ITL"), ("e2el_ms", "E2EL"))
_WIDTH = 110


def make_console() -> rich.console.Console:
    """Standard output; tables of one width where it is a file or a pipe, wherever they are looked at."""
    console = rich.console.Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = _WIDTH
    return console


def figures_table(metrics: Metrics, more: Sequence[tuple[str, str]] = ()) -> rich.table.Table:
    """The figures of one run but for distributions; `more` rows come last."""
    table = new_table(headed=False)
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in (*_figures(metrics), *more):
        table.add_row(name, value)
    return table


def times_table(metrics: Metrics) -> rich.table.Table:
    """The distributions of one run."""
    return spread_table([(f"{name} (ms)", getattr(metrics, field)) for field, name in _NAMES])


def compare_rates(runs: Sequence[tuple[str, Metrics]], more: Mapping[str, Sequence[str]] = {}) -> rich.table.Table:
    """A line for each run with its throughput; `more` columns, by heading, come last."""
    table = new_table()
    with_goodput = runs[0][1].request_goodput is not None
    headings = ["answered", "failed", "requests/s", "output tokens/s", *(["goodput/s"] if with_goodput else []), *more]
    table.add_column("")
    for heading in headings:
        table.add_column(heading, justify="right")
    for number, (label, metrics) in enumerate(runs):
        cells = [str(metrics.completed), str(metrics.failed)]
        cells += [format_number(metrics.request_throughput), format_number(metrics.output_throughput)]
        cells += [format_number(metrics.request_goodput)] if with_goodput else []
        table.add_row(label, *cells, *(values[number] for values in more.values()))
    return table


def compare_times(runs: Sequence[tuple[str, Metrics]]) -> rich.table.Table:
    """A line for each run with the median and the highest percentile of each distribution: the others are in files."""
    table = new_table()
    table.add_column("")
    percent = max(runs[0][1].ttft_ms.percentiles, default=None)
    for _, name in _NAMES:
        table.add_column(f"{name} p50", justify="right")
        if percent is not None:
            table.add_column(f"p{percent:g}", justify="right")
    for label, metrics in runs:
        cells = []
        for field, _ in _NAMES:
            spread: Spread = getattr(metrics, field)
            cells.append(format_number(spread.median))
            if percent is not None:
                cells.append(format_number(spread.percentiles[percent]))
        table.add_row(label, *cells)
    return table


def spread_table(spreads: Sequence[tuple[str, Spread]]) -> rich.table.Table:
    """A line for each distribution."""
    table = new_table()
    table.add_column("")
    percents = [percent for percent in spreads[0][1].percentiles if percent != 50]  # that is the median
    for heading in ("mean", "median", "std", *(f"p{percent:g}" for percent in percents)):
        table.add_column(heading, justify="right")
    for name, spread in spreads:
        values = (spread.mean, spread.median, spread.std, *(spread.percentiles[percent] for percent in percents))
        table.add_row(name, *(format_number(value) for value in values))
    return table


def new_table(*, headed: bool = True) -> rich.table.Table:
    """An empty table in the look of all."""
    return rich.table.Table(box=rich.box.SIMPLE_HEAD, show_header=headed, pad_edge=False)


def make_title(text: str) -> rich.text.Text:
    """Not the table's own title, which would be broken at the width of the table."""
    return rich.text.Text(text, style="bold")


def format_number(value: float | int | None) -> str:
    """As many decimals as are worth reading; "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    decimals = 2 if abs(value) < 100 else 1 if abs(value) < 10_000 else 0
    return f"{value:.{decimals}f}"


def _figures(metrics: Metrics) -> list[tuple[str, str]]:
    rows = [
        ("answered, failed", f"{metrics.completed}, {metrics.failed}"),
        ("input, output tokens", f"{metrics.input_tokens}, {metrics.output_tokens}"),
        ("requests / s", f"{metrics.request_throughput:.2f}"),
        ("output tokens / s", f"{metrics.output_throughput:.1f}"),
        ("all tokens / s", f"{metrics.total_token_throughput:.1f}"),
        ("most requests at once", f"{metrics.max_concurrency}"),
    ]
    if metrics.max_output_tokens_per_s is not None:
        rows.insert(-1, ("most output in one second", f"{metrics.max_output_tokens_per_s:.0f}"))
    if metrics.cached_tokens is not None:
        rows.insert(2, ("of the input, cached", f"{metrics.cached_tokens}"))
    if metrics.drafted_tokens is not None and metrics.tokens_per_round is not None:
        share = (metrics.accepted_tokens or 0) / metrics.drafted_tokens
        rows.append(("drafts, accepted", f"{metrics.drafted_tokens}, {share:.0%}"))
        rows.append(("tokens a round", f"{metrics.tokens_per_round:.2f}"))
    if metrics.request_goodput is not None:
        rows.append(("goodput, requests / s", f"{metrics.request_goodput:.2f}"))
    return rows
