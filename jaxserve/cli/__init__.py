"""The console script `jaxserve`.

Its commands are listed here by name, with a line about each. A command is imported when it runs and not before, since
`jaxserve --help` should not cost the imports of all of them.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import typer
import typer.core

from jaxserve import __version__
from jaxserve.cli.options import HELP_OPTIONS, Group, run_app
from jaxserve.cli.options import Command as TypedCommand
from jaxserve.errors import ConfigError


class Command(NamedTuple):
    """Where a command is: `module:name` of its function, or of a Typer application. `about` is its help's beginning."""

    place: str
    about: str


COMMANDS = {
    "serve": Command(
        "jaxserve.run:serve_command",
        "Serve a model over HTTP until SIGTERM: OpenAI's and Anthropic's APIs, and a page for a chat.",
    ),
    "run": Command(
        "jaxserve.run:run_command",
        "Answer prompts (--prompt, --input) and exit, or serve the ports of a config; see also `jaxserve serve MODEL`.",
    ),
    "chat": Command(
        "jaxserve.cli.chat:chat_command",
        "Talk with a model on the terminal, or in a pipe: each line of stdin is a turn.",
    ),
    "bench": Command("jaxserve.lab.bench.cli:app", "Measure an endpoint, or a model in this process."),
    "simulate": Command(
        "jaxserve.lab.simulation.cli:simulate_command",
        "Run scheduling policies on paper: a load, a device that need not be here, one table. Exit code 3: all failed.",
    ),
    "study": Command(
        "jaxserve.lab.study.cli:study_command",
        "Run a grid of simulations with repeated seeds, and write one frame, tables and pictures.",
    ),
    "config": Command(
        "jaxserve.cli.commands:config_command", "Print the resolved config, each value with where it came from."
    ),
    "convert": Command(
        "jaxserve.cli.commands:convert_command", "Convert a checkpoint: Hugging Face to Orbax, or back."
    ),
    "calibrate-cache": Command(
        "jaxserve.cli.commands:calibrate_cache_command",
        "Measure the keys and values of a model on a text, for caches of eight bits.",
    ),
    "quantize": Command(
        "jaxserve.cli.commands:quantize_command",
        "Write a checkpoint of fewer bits, calibrated on a text, for jaxserve, vLLM and transformers.",
    ),
    "train-draft": Command(
        "jaxserve.lab.training.command:train_draft_command",
        "Train a draft head on the model's own answers. Exit code 4: it was stopped, and the same command goes on.",
    ),
    "plan": Command(
        "jaxserve.cli.commands:plan_command",
        "Say whether a config fits devices that are not here, and how fast it could be. Exit code 3: it does not fit.",
    ),
    "route": Command(
        "jaxserve.cli.commands:route_command",
        "One door for several servers: spread requests, and move them when a server dies.",
    ),
    "kv-server": Command(
        "jaxserve.cli.commands:kv_server_command",
        "Keep pages of keys and values for servers, in memory or in a directory, until SIGTERM.",
    ),
    "replay": Command(
        "jaxserve.cli.commands:replay_command",
        "Run the steps of a log again and compare every token. Exit code 3: one differs, and which is the first.",
    ),
    "steps": Command("jaxserve.cli.commands:steps_command", "Say where the time of a step log went, by kind of step."),
    "health": Command(
        "jaxserve.cli.commands:health_command",
        "Ask a server how it is: exit code 0 when it is serving, 1 when it is not or does not answer.",
    ),
    "top": Command("jaxserve.cli.commands:top_command", "Watch a running server: rates, pages, latencies."),
    "version": Command(
        "jaxserve.cli.commands:version_command", "Print the versions of jaxserve and of what it runs on."
    ),
}


class LazyGroup(Group):
    """Lists commands from the table in this module, and loads the one that runs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        if args[0] not in COMMANDS:
            from jaxserve.values.other_names import command_answer  # a right command needs no table

            if (here := command_answer(args[0])) is not None:
                raise ConfigError(f"No such command {args[0]!r}; here it is {here}")
        name, found, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name in COMMANDS else found, rest


def load_command(name: str) -> Any:
    """The command itself, with all its options."""
    module, _, attribute = COMMANDS[name].place.partition(":")
    found: typer.Typer | Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    app = typer.Typer(add_completion=False)
    app.command(name, cls=TypedCommand)(found)
    return typer.main.get_command(app)


def _print_version(given: bool) -> None:
    if given:
        print(f"jaxserve {__version__}")
        raise typer.Exit


def _before(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """LLM inference on JAX."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code. `arguments` default to those of the process."""
    # Rich would take a tenth of a second to draw boxes around the list.
    app = typer.Typer(cls=LazyGroup, add_completion=False, context_settings=HELP_OPTIONS, rich_markup_mode=None)
    app.callback()(_before)
    group: Any = typer.main.get_command(app)
    for name, command in COMMANDS.items():
        # A short help is shown as it is; a long one would be cut behind its first words.
        group.add_command(typer.core.TyperCommand(name, help=command.about, short_help=command.about))
    return run_app(group, "jaxserve", arguments)
