"""The command `jaxserve study`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from jaxserve.errors import ConfigError
from jaxserve.lab.study.pictures import draw
from jaxserve.lab.study.report import show_points, write_tables
from jaxserve.lab.study.run import run_study
from jaxserve.lab.study.spec import read_study
from jaxserve.lab.study.summary import differences, summarise
from jaxserve.lab.workloads.pictures import check_plot
from jaxserve.lab.workloads.tables import make_console
from jaxserve.offline.console import complain
from jaxserve.progress import show_progress


def study_command(
    file: Annotated[Path, typer.Argument(help="YAML: base, grid, seeds, warmup, targets, capacity; docs/study.md.")],
    out: Annotated[Path, typer.Option("--out", help="Directory of runs, tables and pictures; goes on if it is there.")],
    processes: Annotated[int | None, typer.Option(min=1, help="At once; default: one for each core.")] = None,
    plot: Annotated[bool, typer.Option(help="Draw pictures, which need matplotlib.")] = True,
) -> int:
    """Run a grid of simulations with repeated seeds, and write one frame, tables and pictures."""
    study = read_study(file)
    if plot:
        check_plot("lab")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be made: {error}") from error
    with show_progress(write=complain) as progress:
        runs = run_study(study, out, processes or os.cpu_count() or 1, progress)
        points = summarise(study, runs)
        compared = differences(points, study.confidence)
        written = write_tables(points, compared, out)
        if plot:
            progress.begin("drawing")
            written += draw(points, compared, out)
    show_points(points, compared, study, make_console())
    print(f"wrote {', '.join(map(str, written))}")
    return 0
