"""The result of a comparison, as tables and as a picture; `figures` has the rows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.table

from jaxserve.lab.workloads.pictures import PALETTE, save_figure
from jaxserve.lab.workloads.tables import format_number, new_table
from peers.figures import Agreement, Row
from peers.limits import Limit, shares

_UPRIGHT = 5  # names that have room beside each other
_COLUMNS = 3  # of the picture


def ratio_table(rows: Sequence[Row], ours: str, engines: Sequence[str], names: Mapping[str, str]) -> rich.table.Table:
    """A line for each figure: our median, and for each engine its median and how many times as good ours is."""
    table = new_table()
    table.add_column("")
    for engine in engines:
        table.add_column(engine, justify="right")
        if engine != ours:
            table.add_column("ratio", justify="right", style="bold")
    before = None
    for row in rows:
        if row.workload != before:
            table.add_row(names[row.workload], style="dim")
            before = row.workload
        cells = []
        for engine in engines:
            cells.append(format_number(row.medians.get(engine)))
            if engine != ours:
                cells.append(f"{row.ratios[engine]:.2f}x" if engine in row.ratios else "-")
        table.add_row(f"  {row.figure.name}", *cells)
    return table


def limit_table(
    rows: Sequence[Row], limits: Mapping[str, Mapping[str, Limit]], engines: Sequence[str], names: Mapping[str, str]
) -> rich.table.Table:
    """A line for each figure that has limits: of each engine the share of its byte limit / of its compute limit."""
    table = new_table()
    table.add_column("of the byte limit / of the multiply-adds")
    for engine in engines:
        table.add_column(engine, justify="right")
    for row in rows:
        if found := shares(row, limits):
            values = {
                name: " / ".join("-" if share is None else f"{share:.2f}" for share in of.values())
                for name, of in found.items()
            }
            table.add_row(names[row.workload], *(values.get(engine, "-") for engine in engines))
    return table


def agreement_table(found: Mapping[str, Agreement], reference: str) -> rich.table.Table:
    """A line for each engine but the one that the others are compared with."""
    table = new_table()
    for heading in ("", f"tokens as {reference}'s", "choices after the same tokens that agree"):
        table.add_column(heading, justify="right" if heading else "left")
    for engine, agreement in found.items():
        table.add_row(engine, f"{agreement.share_equal:.1%}", f"{agreement.share_same:.2%}")
    return table


def plot_rows(rows: Sequence[Row], engines: Sequence[str], names: Mapping[str, str], title: str, path: Path) -> None:
    """Bars of the medians, with lines from the least to the most of all rounds. Raises ConfigError."""
    from matplotlib.figure import Figure  # half a second, and not needed for figures in text

    lines = -(-len(rows) // _COLUMNS)
    figure = Figure(figsize=(5 * _COLUMNS, 3.2 * lines), layout="constrained")
    figure.suptitle(title)
    axes: Any = figure.subplots(lines, _COLUMNS, squeeze=False)
    for axis, row in zip(axes.flat, rows, strict=False):
        present = [engine for engine in engines if engine in row.medians]
        medians = [row.medians[engine] for engine in present]
        spread = [
            [median - min(row.rounds[engine]) for engine, median in zip(present, medians, strict=True)],
            [max(row.rounds[engine]) - median for engine, median in zip(present, medians, strict=True)],
        ]
        colors = [PALETTE[engines.index(engine) % len(PALETTE)] for engine in present]
        axis.bar(present, medians, yerr=spread, color=colors, capsize=3)
        axis.set_title(names[row.workload], fontsize=8)
        axis.set_ylabel(row.figure.name)
        axis.tick_params(axis="x", labelsize=8, rotation=20 if len(present) > _UPRIGHT else 0)
    for axis in list(axes.flat)[len(rows) :]:
        axis.axis("off")
    save_figure(figure, path)
