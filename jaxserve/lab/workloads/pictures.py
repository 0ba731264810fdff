"""The common part of pictures of measured and simulated runs: colours, the plot of distributions, the file.

matplotlib is needed only when a picture is asked for.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.errors import ConfigError, how_to_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Lines that lie on each other stay visible: each has another pattern.
DASHES = ("-", (0, (5, 2)), (0, (2, 2)), (0, (7, 2, 2, 2)), (0, (1, 1)), (0, (9, 3)))
PALETTE = ("#1b6ca8", "#d1495b", "#edae49", "#00798c", "#7b4fa3", "#6b705c")


def check_plot(extra: str) -> None:
    """Raises ConfigError when matplotlib is not there, naming the extra of jaxserve that brings it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"plots need matplotlib: {how_to_install(extra)}") from error


def line_style(number: int) -> dict[str, Any]:
    """Colour and pattern of the line of series `number`."""
    return {"color": PALETTE[number % len(PALETTE)], "linestyle": DASHES[number % len(DASHES)]}


def plot_shares(axis: "Axes", series: Mapping[str, Sequence[float]]) -> None:
    """Draws for each series of seconds which share of its values lies below a time."""
    for number, (name, seconds) in enumerate(series.items()):
        values = np.sort(np.asarray(seconds)) * 1e3
        shares = (np.arange(len(values)) + 1) / max(len(values), 1)
        axis.plot(values, shares, label=name, **line_style(number))
    axis.set(xlabel="milliseconds", ylabel="share of values below", title=" and ".join(series), ylim=(0, 1.02))
    axis.legend()


def save_figure(figure: "Figure", path: Path) -> None:
    """Writes a PNG. Raises ConfigError."""
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
