"""Command-line options of datasets and arrivals, for measuring and simulating, and the parsing of lists of numbers."""

from pathlib import Path
from typing import Annotated

import typer

from jaxserve.errors import ConfigError
from jaxserve.lab.workloads.datasets import DATASET_NAMES

DatasetOption = Annotated[str, typer.Option("--dataset", help=f"One of {', '.join(DATASET_NAMES)}.")]
PathOption = Annotated[Path | None, typer.Option("--dataset-path", help="File of a trace, or JSONL of prompts.")]
NumPromptsOption = Annotated[
    int | None, typer.Option("--num-prompts", help="Requests; of a file the first so many. Default: 100, or the file.")
]
InputLenOption = Annotated[int, typer.Option("--input-len", help="Tokens of a prompt, after its prefix if any.")]
OutputLenOption = Annotated[int, typer.Option("--output-len", help="Tokens to ask for.")]
RangeOption = Annotated[float, typer.Option("--range-ratio", help="random: lengths vary by this share, both ways.")]
CvOption = Annotated[
    float, typer.Option("--length-cv", help="lognormal: deviation of the lengths over their mean, --input-len or so.")
]
PrefixesOption = Annotated[int, typer.Option("--num-prefixes", help="prefix-repetition: how many there are.")]
PrefixLenOption = Annotated[
    int, typer.Option("--prefix-len", help="prefix-repetition, agent: tokens at the beginning of each prompt.")
]
ScaleOption = Annotated[float, typer.Option("--length-scale", help="sharegpt, traces: multiply every length.")]
SpeedOption = Annotated[float, typer.Option("--speed", help="Traces: replay so many times faster.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Of everything that is random.")]
RateOption = Annotated[float | None, typer.Option("--rate", help="Requests a second; inf: all at once.")]
BurstinessOption = Annotated[float, typer.Option("--burstiness", help="1: Poisson; less: bursty; inf: even.")]
RampOption = Annotated[str | None, typer.Option("--ramp", help="linear:START:END or exponential:START:END.")]
DiurnalOption = Annotated[
    str | None,
    typer.Option("--diurnal", help="LOW:HIGH:SECONDS_OF_A_DAY, such as 1:8:3600: the rate rises and falls each day."),
]
GoodputOption = Annotated[list[str] | None, typer.Option("--goodput", help="ttft:MS, tpot:MS or e2el:MS. Repeatable.")]
PercentilesOption = Annotated[str, typer.Option("--percentiles", help="Of every distribution.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="File for the result.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="PNG file for a plot.")]


def default_count(num_prompts: int | None, path: Path | None) -> int | None:
    """100 prompts by default; None, for files, takes the whole file."""
    return 100 if num_prompts is None and path is None else num_prompts


def parse_numbers(text: str | None, option: str) -> list[float]:
    """From '1,2.5,inf'; none from None. Raises ConfigError."""
    try:
        return [] if text is None else [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} is {text!r}; write numbers with commas between them") from error


def parse_counts(text: str | None, option: str) -> list[int]:
    """From '1,4,16'; none from None. Raises ConfigError."""
    try:
        return [] if text is None else [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} is {text!r}; write whole numbers with commas between them") from error
