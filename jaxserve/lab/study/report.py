"""The tables of a study.

runs.csv           the frame: a line for each point and seed, its axes first
points.csv         a line for each point: the mean of each figure over seeds, and half the width of its interval
differences.csv    a line for each point: what it has more than the point of the first policy that is like it otherwise
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console
import rich.table

from jaxserve.errors import ConfigError
from jaxserve.lab.simulation.results import CLOCK_NOTE
from jaxserve.lab.study.figures import Interval
from jaxserve.lab.study.spec import Study
from jaxserve.lab.study.summary import SHOWN, Difference, PointSummary, shown_values

_GAP = 2  # between columns of a table
_COMPARED = ("capacity", "request_goodput", "output_throughput", "median_ttft_ms", "p99_ttft_ms", "p99_tpot_ms")


def write_tables(points: Sequence[PointSummary], differences: Sequence[Difference], folder: Path) -> list[Path]:
    """The files of the module's docstring; returns them. Without differences, two. Raises ConfigError."""
    rows = [{**run["axes"], "seed": run["seed"], **run["figures"]} for point in points for run in point.runs]
    tables = {"runs.csv": rows, "points.csv": [_line(one) for one in points]}
    if differences:
        tables["differences.csv"] = [_line(one) for one in differences]
    for name, lines in tables.items():
        _write_csv(folder / name, lines)
    return [folder / name for name in tables]


def show_points(
    points: Sequence[PointSummary], differences: Sequence[Difference], study: Study, console: rich.console.Console
) -> None:
    """Prints a line for each point: means, each with half the width of its interval; then the differences."""
    shown = shown_values(points)
    _print_table(points, [name for name in SHOWN if any(name in point.figures for point in points)], shown, console)
    console.print(
        f"means over {study.seeds} seeds, ± half the interval of {study.confidence:.0%} confidence; the first "
        f"{study.warmup:.0%} of the requests are left out"
        if study.seeds > 1
        else f"one seed; the first {study.warmup:.0%} of the requests are left out"
    )
    console.print(CLOCK_NOTE)
    if differences:
        first = differences[0]
        against = f"{_short(first.axis)} {shown[first.axis, str(first.against)]}"
        console.print(f"differences from {against}, seed by seed", style="bold")
        names = [name for name in _COMPARED if any(name in one.figures for one in differences)]
        _print_table(differences, names, shown, console)


def _print_table(
    lines: Sequence[PointSummary | Difference],
    names: Sequence[str],
    shown: Mapping[tuple[str, str], str],
    console: rich.console.Console,
) -> None:
    """As several tables below each other where one is too wide, each with the axes in front, which are never cut."""
    axes = [
        (_short(axis), [shown[axis, str(value)] for value in (line.axes[axis] for line in lines)])
        for axis in lines[0].axes
    ]
    columns = [(SHOWN[name], [_cell(line.figures.get(name)) for line in lines]) for name in names]
    room = console.width - sum(map(_width, axes))
    while columns:
        count, taken = 1, _width(columns[0])
        while count < len(columns) and taken + _width(columns[count]) <= room:
            taken += _width(columns[count])
            count += 1
        table = rich.table.Table(box=None, header_style="bold", padding=(0, _GAP, 0, 0))
        for title, _ in axes:
            table.add_column(title, no_wrap=True, overflow="fold")
        for title, _ in columns[:count]:
            table.add_column(title, justify="right", no_wrap=True)
        for cells in zip(*(cells for _, cells in (*axes, *columns[:count])), strict=True):
            table.add_row(*cells)
        console.print(table)
        columns = columns[count:]


def _width(column: tuple[str, Sequence[str]]) -> int:
    return max(map(len, (column[0], *column[1]))) + _GAP


def _line(one: PointSummary | Difference) -> dict[str, Any]:
    row = dict(one.axes)
    for name, found in one.figures.items():
        row |= {name: found.mean, f"{name}_half_width": found.half_width}
    return row


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
