"""Command lines of images and manifests, parsed by the real commands and not run."""

from collections.abc import Sequence
from typing import Any

import typer

from jaxserve.cli import COMMANDS, load_command
from jaxserve.run import run_command


def parse_run(arguments: Sequence[str]) -> dict[str, Any]:
    """The options of `python -m jaxserve.run`. Raises when it would refuse them."""
    app = typer.Typer(add_completion=False)
    app.command()(run_command)
    return typer.main.get_command(app).make_context("run", list(arguments)).params


def parse_jaxserve(arguments: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The command of `jaxserve` and its options."""
    name, *rest = arguments
    assert name in COMMANDS, f"jaxserve has no command {name}; it has {sorted(COMMANDS)}"
    return name, load_command(name).make_context(name, rest).params
