"""The console script `jaxserve`.

Owns the names of its commands, where each of them is, and a line about it. Refuses behaviour. A command is imported
when it runs and not before, since `jaxserve --help` should not cost the imports of all of them.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import typer
import typer.core

from jaxserve.command_line import run_app


class Command(NamedTuple):
    """Where a command is: `module:name` of its function, or of a Typer application. `about` is its help's beginning."""

    place: str
    about: str


COMMANDS = {
    "run": Command("jaxserve.run:run_command", "Answer prompts (--prompt, --input) and exit, or serve until SIGTERM."),
    "bench": Command("jaxserve.bench.cli:app", "Measure an endpoint, or a model in this process."),
    "simulate": Command(
        "jaxserve.lab.cli:simulate_command",
        "Run scheduling policies on paper: a load, a device that need not be here, one table. Exit code 3: all failed.",
    ),
    "config": Command(
        "jaxserve.commands:config_command", "Print the resolved config, each value with where it came from."
    ),
    "convert": Command("jaxserve.commands:convert_command", "Convert a checkpoint: Hugging Face to Orbax, or back."),
    "plan": Command(
        "jaxserve.commands:plan_command",
        "Say whether a config fits devices that are not here, and how fast it could be. Exit code 3: it does not fit.",
    ),
    "route": Command(
        "jaxserve.commands:route_command",
        "One gRPC door for several servers: spread requests, and move them when a server dies.",
    ),
    "replay": Command(
        "jaxserve.commands:replay_command",
        "Run the steps of a log again and compare every token. Exit code 3: one differs, and which is the first.",
    ),
    "steps": Command("jaxserve.commands:steps_command", "Say where the time of a step log went, by kind of step."),
    "health": Command(
        "jaxserve.commands:health_command",
        "Ask a server how it is: exit code 0 when it is serving, 1 when it is not or does not answer.",
    ),
    "top": Command("jaxserve.commands:top_command", "Watch a running server: rates, pages, latencies."),
    "version": Command("jaxserve.commands:version_command", "Print the versions of jaxserve and of what it runs on."),
}


class LazyGroup(typer.core.TyperGroup):
    """Lists commands by what is written here, and loads the one that runs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, found, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name in COMMANDS else found, rest


def load_command(name: str) -> Any:
    """The command itself, with all its options."""
    module, _, attribute = COMMANDS[name].place.partition(":")
    found: typer.Typer | Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    app = typer.Typer(add_completion=False)
    app.command(name)(found)
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code. `arguments` default to those of the process."""
    listed: dict[str, Any] = {
        name: typer.core.TyperCommand(name, help=command.about) for name, command in COMMANDS.items()
    }
    # Rich would take a tenth of a second to draw boxes around the list.
    group = LazyGroup(name="jaxserve", commands=listed, help="LLM inference on JAX.", rich_markup_mode=None)
    return run_app(group, "jaxserve", arguments)


if __name__ == "__main__":
    sys.exit(main())
