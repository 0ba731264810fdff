"""What every command line of the package shares: two options, the exit codes, and how a failure is told.

Owns these. Refuses commands, and to import what a command needs: this is loaded for `--help`, too.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxserve.errors import EngineStopped, UserError

DEFECT = 1
USER_ERROR = 2
INTERRUPTED = 130

ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML file; without it, all defaults.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Change a setting: KEY=VALUE. Repeatable.")]


def one_line(error: BaseException) -> str:
    """The message, however many lines it has."""
    return " ".join(str(error).split())


def run_app(command: Any, program: str, arguments: Sequence[str] | None = None) -> int:
    """Runs a Click command and returns the exit code. What the user caused becomes one line on stderr."""
    try:
        code = command.main(args=arguments, prog_name=program, standalone_mode=False)
    except typer.TyperException as error:
        _complain(f"error: {' '.join(error.format_message().split())} (see {program} --help)")
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


def _complain(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
