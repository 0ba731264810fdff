"""The common part of all command lines: two options, the exit codes, and the report of a failure.

It is loaded for `--help`, too, so it imports nothing that only a command needs.
"""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxserve.errors import EngineStopped, SeveralMistakes, UserError

DEFECT = 1
USER_ERROR = 2
INTERRUPTED = 130

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}  # subcommands inherit them

ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML file; without it, all defaults.")]
ModelOption = Annotated[
    Path | None,
    typer.Option("--model", help="Directory of a model, demo, or demo-vision; default: model.path of the config."),
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Change a setting: KEY=VALUE. Repeatable.")]


def with_model(overrides: Sequence[str] | None, model: Path | None) -> list[str]:
    """The settings of --set, and --model behind them."""
    return [*(overrides or ()), *([f"model.path={json.dumps(str(model))}"] if model is not None else ())]


def one_line(error: BaseException) -> str:
    """The message in one line, however many lines it has."""
    return " ".join(str(error).split())


def run_app(command: Any, program: str, arguments: Sequence[str] | None = None) -> int:
    """Runs a Click command and returns the exit code. A mistake of the user becomes one line on stderr."""
    try:
        code = command.main(args=arguments, prog_name=program, standalone_mode=False)
    except typer.TyperException as error:
        _complain(f"error: {' '.join(_message(error).split())} (see {_path(error) or program} --help)")
        return USER_ERROR
    except SeveralMistakes as error:
        for mistake in str(error).splitlines():
            _complain(f"error: {mistake}")
        return USER_ERROR
    except UserError as error:
        _complain(f"error: {one_line(error)}")
        return USER_ERROR
    except EngineStopped as error:  # of several hosts, one is lost; the log has said it, too
        _complain(f"error: {one_line(error)}")
        return DEFECT
    except typer.Abort:
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def _message(error: typer.TyperException) -> str:
    """What is wrong; of an option that other engines have, what it is here."""
    context, option = getattr(error, "ctx", None), getattr(error, "option_name", None)
    if option is None or not hasattr(error, "possibilities"):  # no other error has guesses beside an option
        return error.format_message()
    from jaxserve.other_names import Place, answer  # a right command needs no table

    name = option.lstrip("-").replace("-", "_")
    takes_settings = any(one.name == "set_" for one in getattr(getattr(context, "command", None), "params", ()))
    found = (answer(name, Place.FLAG) or answer(name.removeprefix("no_"), Place.FLAG)) if takes_settings else None
    return error.format_message() if found is None else f"No such option: {option}; {found}"


def _path(error: typer.TyperException) -> str | None:
    """The command whose help has more, as it was called."""
    path: str | None = getattr(getattr(error, "ctx", None), "command_path", None)
    return path


def _complain(line: str) -> None:
    """Where the log is JSON already, so is its last line."""
    logger = logging.getLogger("jaxserve")
    if logger.handlers:  # a command has set it up, so that this module is loaded
        from jaxserve.telemetry.logs import JsonFormatter

        if any(isinstance(handler.formatter, JsonFormatter) for handler in logger.handlers):
            logger.critical("%s", line)
            return
    print(line, file=sys.stderr, flush=True)
