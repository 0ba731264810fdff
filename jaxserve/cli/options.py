"""The common part of all command lines: two options, the exit codes, and the report of a failure.

It is loaded for `--help`, too, so it imports nothing that only a command needs.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from jaxserve.errors import ConfigError, EngineStopped, InvalidRequest, SeveralMistakes, UserError

if TYPE_CHECKING:
    from jaxserve.config import FlagSetting  # with pydantic, which no help needs

DEFECT = 1
USER_ERROR = 2
INTERRUPTED = 130

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}  # subcommands inherit them

ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML file; without it, all defaults.")]
ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model", "-m", help="Directory of a model, demo, or demo-vision; default: model.path of the config."
    ),
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Change a setting: KEY=VALUE. Repeatable.")]

_TYPED = "jaxserve.typed"  # key of a context's values


class Command(typer.core.TyperCommand):
    """A command that keeps the words it was called with, so that an error names a flag as it was typed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_TYPED] = tuple(args)
        _refuse_one_dash(ctx, args)
        return super().parse_args(ctx, args)


class Group(typer.core.TyperGroup):
    """A command of commands, whose own options are checked as theirs are."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _refuse_one_dash(ctx, args)
        return super().parse_args(ctx, args)


def _refuse_one_dash(context: Any, words: Sequence[str]) -> None:
    """Ends with an error at the long name of an option behind one dash: letters may stand for an option each, so that
    `-model demo` would be read as the model `odel`."""
    of_command = [one for one in context.command.get_params(context) if one.param_type_name == "option"]
    options = {name: one for one in of_command for name in (*one.opts, *one.secondary_opts)}
    rest = iter(words)
    for word in rest:
        name = word.partition("=")[0]
        if word == "--" or (not word.startswith("-") and not context.allow_interspersed_args):
            return
        long = f"-{name.replace('_', '-')}"
        if name.startswith("-") and name not in options and long in options:
            context.fail(f"No such option: {name}; did you mean {long}?")
        if word.startswith("-") and _wants_next(word, options):
            next(rest, None)  # which may begin with a dash


def _wants_next(word: str, options: Mapping[str, Any]) -> bool:
    """Whether the next word is the value of an option of this one: of a name, or of the last of several letters."""

    def has_value(option: Any) -> bool:
        return not (option.is_flag or option.count)

    if word in options or word.startswith("--"):
        return word in options and has_value(options[word])
    for place, letter in enumerate(word[1:], 2):
        option = options.get(f"-{letter}")
        if option is None or has_value(option):
            return option is not None and place == len(word)
    return False


def typed_flag(context: Any, parameter: str) -> str:
    """The name of the flag that gave `parameter` its value, as it was typed; of an argument: its name in the help."""
    [one] = (one for one in context.command.params if one.name == parameter)
    names = one.opts if one.param_type_name == "option" else ()
    for word in reversed(_words(context)):
        for name in names:
            is_short = len(name) == 2 and word.startswith(name)
            if word.partition("=")[0] == name or is_short:
                return str(name)
    return str(max(names, key=len)) if names else str(one.make_metavar(context)).strip("[]")


def flag_settings(context: Any, settings: Mapping[str, tuple[str, object]]) -> "list[FlagSetting]":
    """What the flags of a command set: parameter -> dotted name of the setting, and the value; None: not given."""
    from jaxserve.config import FlagSetting

    return [
        FlagSetting(name, value, typed_flag(context, parameter))
        for parameter, (name, value) in settings.items()
        if value is not None
    ]


def sampling_flags(context: Any, flags: Mapping[str, object]) -> dict[str, Any]:
    """Those of `flags`, by fields of `SamplingParams`, that were given. Raises InvalidRequest for a wrong value, with
    the flag, before minutes are spent on loading."""
    from jaxserve.api import SamplingParams

    given = {name: value for name, value in flags.items() if value is not None}
    for name, value in given.items():
        try:
            SamplingParams.from_dict({name: value})
        except InvalidRequest as error:
            raise InvalidRequest(f"{typed_flag(context, name)}: {error}") from error
    return given


def with_model(
    overrides: Sequence[str] | None, model: Path | str | None, flag: str = "--model"
) -> "list[str | FlagSetting]":
    """The settings of --set, and the model, which `flag` gave, behind them."""
    from jaxserve.config import FlagSetting

    given = [FlagSetting("model.path", str(model), flag)] if model is not None else []
    return [*(overrides or ()), *given]


def one_model(context: typer.Context, argument: str | None, option: str | None) -> str | None:
    """The model that the argument or --model names. Raises ConfigError where they name different ones."""
    if option is not None and argument is not None and argument != option:
        flag = typed_flag(context, "model_option")
        raise ConfigError(f"two models are given, {argument} and {flag} {option}; give one")
    return argument if option is None else option


def with_one_model(
    context: typer.Context, set_: Sequence[str] | None, argument: str | None, option: str | None
) -> "list[str | FlagSetting]":
    """The settings of --set, and the model of `one_model`."""
    source = "MODEL" if option is None else typed_flag(context, "model_option")
    return with_model(set_, one_model(context, argument, option), source)


def _words(context: Any) -> Sequence[str]:
    """Those in front of `--`, behind which nothing is a flag."""
    words: tuple[str, ...] = context.meta.get(_TYPED, ())
    return words[: words.index("--")] if "--" in words else words


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
    """What is wrong, with the flag as it was typed; of an option that other engines have, what it is here."""
    context, option = getattr(error, "ctx", None), getattr(error, "option_name", None)
    if option is None or not hasattr(error, "possibilities"):  # no other error has guesses beside an option
        parameter = getattr(error, "param", None)
        if context is None or parameter is None or len(parameter.opts) < 2:
            return error.format_message()
        all_names = parameter.get_error_hint()
        return error.format_message().replace(all_names, repr(typed_flag(context, parameter.name)))
    from jaxserve.values.other_names import Place, answer  # a right command needs no table

    parameters = [one.name for one in getattr(getattr(context, "command", None), "params", ())]
    parsed, option, found = option, _whole_option(context, option), None
    name = option.lstrip("-").replace("-", "_")
    if "set_" in parameters:
        names = (name, name.removeprefix("no_")) if option.startswith("--") else (option, name)
        found = next((said for one in names if (said := answer(one, Place.FLAG, parameters)) is not None), None)
    if found is None:
        return error.format_message().replace(f"No such option: {parsed}", f"No such option: {option}")
    return f"No such option: {option}; {found}"


def _whole_option(context: Any, option: str) -> str:
    """The word that has the option: of `-ngl` the parser reports `-n`, since letters may stand for an option each."""
    if context is None or option.startswith("--") or len(option) != 2:
        return option
    known = {name for one in context.command.params for name in one.opts}
    words = [word.partition("=")[0] for word in _words(context) if word[:1] == "-" and word[:2] != "--"]
    return next((word for word in words if option[1] in word and word not in known), option)


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
