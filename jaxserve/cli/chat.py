"""`jaxserve chat`: a conversation on the terminal, with a model in this process or with a running server.

On a terminal a line is a turn, and the answer is shown as it comes. In a pipe each line of stdin is a turn, stdout gets
the answers and nothing else, and the first error ends the command, since later turns build on the earlier ones.
"""

import contextlib
import io
import json
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import rich.console
import rich.text
import typer

from jaxserve.cli.http_call import call, http_url
from jaxserve.cli.options import ConfigOption, SetOption, one_line, one_model, sampling_flags, with_one_model
from jaxserve.config import FlagSetting, load_config
from jaxserve.errors import ConfigError, EngineStopped, JaxserveError
from jaxserve.offline.console import complain, set_up_logging
from jaxserve.serve.keys import read_keys

_COMMANDS = {
    "/reset": "begin a new conversation; the system message stays",
    "/system": "set the system message to the text behind it, or take it away",
    "/help": "show this list",
    "/exit": "end, as Ctrl-D does",
}
_STREAM_TIMEOUT_S = 600.0  # a server may have a queue, and a long prompt takes its time
_DONE = "[DONE]"
# Characters that would move the cursor of a terminal, or worse. A tab and the end of a line stay.
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {9, 10}, "\ufffd")


class Piece(NamedTuple):
    """What is new of an answer. `thought` is no part of it. `is_cut`: it ended since no more tokens were allowed."""

    text: str = ""
    thought: str = ""
    is_cut: bool = False


Answer = Callable[[Sequence[Mapping[str, str]]], Generator[Piece, None, None]]


def chat_command(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="Directory of a model, GGUF file, or demo, the default; with --url: a name it serves."),
    ] = None,
    url: Annotated[str | None, typer.Option(help="Talk to a running server: http://HOST:PORT.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer at most; default: all that fit.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: as the checkpoint says.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    api_key_file: Annotated[Path | None, typer.Option(help="With --url: file with the key of the server.")] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="With --url: PEM file of authorities for https.")] = None,
    model_option: Annotated[str | None, typer.Option("--model", "-m", hidden=True)] = None,
) -> int:
    """Talk with a model on the terminal, or in a pipe: each line of stdin is a turn."""
    flags = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    sampling = sampling_flags(context, flags)
    if url is None:
        if api_key_file is not None or tls_ca is not None:
            raise ConfigError("--api-key-file and --tls-ca are for a running server; give --url, too")
        opened = _model_here(config, with_one_model(context, set_, model, model_option), sampling)
    else:
        if config is not None or set_:
            raise ConfigError("--config and --set are for a model in this process; leave them out with --url")
        key = read_keys(str(api_key_file), "--api-key-file")[0] if api_key_file is not None else None
        named = one_model(context, model, model_option)
        opened = _server(url, named, sampling, key, None if tls_ca is None else str(tls_ca))
    with opened as (name, answer):
        talk(name, answer, system)
    return 0


@contextlib.contextmanager
def _model_here(
    config: Path | None, overrides: Sequence[str | FlagSetting], sampling: Mapping[str, Any]
) -> Iterator[tuple[str, Answer]]:
    from jaxserve.offline.llm import LLM  # not needed for a server

    set_up_logging(load_config(config, overrides).config.runtime, warnings_alone=True)
    with LLM.from_config(config, overrides) as llm:
        tokenizer = llm.get_tokenizer()
        if tokenizer is None:
            raise ConfigError("a chat is text, and model.skip_tokenizer is true; unset it")
        tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])  # a model that has none is told at once
        params = llm.get_default_sampling_params().clone(**{"max_tokens": None, **sampling})

        def answer(messages: Sequence[Mapping[str, str]]) -> Generator[Piece, None, None]:
            for update in llm.stream(messages, params):
                yield Piece(update.text, is_cut=update.finish_reason == "length")

        yield llm.model_name, answer


@contextlib.contextmanager
def _server(
    url: str, model: str | None, sampling: Mapping[str, Any], key: str | None, tls_ca: str | None
) -> Iterator[tuple[str, Answer]]:
    root = url.rstrip("/").removesuffix("/v1")  # as clients of OpenAI's API have it
    name = model if model is not None else _first_model(http_url(root, "/v1/models"), key, tls_ca)
    route = http_url(root, "/v1/chat/completions")

    def answer(messages: Sequence[Mapping[str, str]]) -> Generator[Piece, None, None]:
        body = {"model": name, "messages": messages, "stream": True, **sampling}
        ended = False
        with call(route, body=body, api_key=key, tls_ca=tls_ca, timeout_s=_STREAM_TIMEOUT_S) as events:
            for line in events:
                field, _, value = line.decode().partition(":")
                data = value.strip() if field == "data" else ""  # other lines are comments, which keep connections open
                ended = ended or data == _DONE
                if data and data != _DONE:
                    yield _piece(json.loads(data))
        if not ended:
            raise ConfigError(f"the answer of {route} broke off")

    yield name, answer


def _first_model(url: str, key: str | None, tls_ca: str | None) -> str:
    with call(url, api_key=key, tls_ca=tls_ca) as found:
        try:
            return str(json.loads(found.read())["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{url} names no model; give its name: jaxserve chat NAME --url …") from error


def _piece(event: Any) -> Piece:
    if "error" in event:
        raise ConfigError(f"the server ended the answer: {event['error'].get('message')}")
    choice = event["choices"][0] if event.get("choices") else {}
    delta = choice.get("delta", {})
    return Piece(
        delta.get("content") or "", delta.get("reasoning_content") or "", is_cut=choice.get("finish_reason") == "length"
    )


def talk(name: str, answer: Answer, system: str | None) -> None:
    """Reads turns from stdin until it ends or /exit, and writes the answers of `answer` to stdout.

    `name`: of the model, for people. Raises what `answer` raises, unless a person at a terminal can try again.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        import readline  # noqa: F401  # its import gives `input` the keys of an editor and a history
    screen = _Screen(is_terminal)
    screen.hint(f"{name}. /help lists the commands. Ctrl-C stops an answer, Ctrl-D ends.")
    turns: list[dict[str, str]] = []
    for line in _lines_of_terminal(screen) if is_terminal else sys.stdin:
        text = line.strip()
        command, _, rest = text.partition(" ")
        if not text:
            continue
        if command == "/exit":
            return
        if command == "/reset":
            turns = []
        elif command == "/system":
            system = rest.strip() or None
        elif command == "/help":
            for known, about in _COMMANDS.items():
                screen.hint(f"{known}  {about}")
        elif command.startswith("/") and not line.startswith(" ") and command.count("/") == 1:
            problem = (
                f"there is no command {command}; there is {', '.join(_COMMANDS)} (a blank in front makes it a message)"
            )
            if not is_terminal:
                raise ConfigError(problem)
            complain(problem)
        else:
            turns = _one_turn(answer, system, turns, text, screen)


def _one_turn(
    answer: Answer, system: str | None, turns: Sequence[dict[str, str]], text: str, screen: "_Screen"
) -> list[dict[str, str]]:
    """The turns with this one; those before if it has no answer."""
    asked = [*turns, {"role": "user", "content": text}]
    first = [] if system is None else [{"role": "system", "content": system}]
    said: list[str] = []
    try:
        with contextlib.closing(answer([*first, *asked])) as pieces:
            for piece in pieces:
                screen.show(piece)
                said.append(piece.text)
                if piece.is_cut:
                    screen.note("cut off: more tokens were not allowed, or do not fit; /reset makes room")
    except KeyboardInterrupt:
        if not screen.is_terminal:
            raise
        screen.note("stopped")
    except JaxserveError as error:
        screen.end()
        if isinstance(error, EngineStopped) or not screen.is_terminal:
            raise
        complain(f"error: {one_line(error)}")
        return list(turns)
    screen.end()
    return [*asked, {"role": "assistant", "content": "".join(said)}] if any(said) else list(turns)


def _lines_of_terminal(screen: "_Screen") -> Iterator[str]:
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            screen.hint("Ctrl-D or /exit ends")


class _Screen:
    """Where answers go. Hints and thoughts are for people, and are not shown in a pipe."""

    def __init__(self, is_terminal: bool) -> None:
        self.is_terminal = is_terminal
        self._console = rich.console.Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        self._in_line = self._thinks = False

    def hint(self, line: str) -> None:
        """A line of its own."""
        if self.is_terminal:
            self._console.print(rich.text.Text(line, style="dim"), soft_wrap=True)

    def note(self, line: str) -> None:
        """A hint about the answer, in a line of its own."""
        self.end()
        self.hint(f"({line})")

    def show(self, piece: Piece) -> None:
        """Adds to the answer, at once."""
        if piece.thought and self.is_terminal:
            self._thinks = self._in_line = True
            self._console.print(rich.text.Text(_harmless(piece.thought), style="dim"), end="", soft_wrap=True)
        if piece.text:
            if self._thinks:
                self.end()
            sys.stdout.write(_harmless(piece.text) if self.is_terminal else piece.text)
            sys.stdout.flush()
            self._in_line = not piece.text.endswith("\n")

    def end(self) -> None:
        """The answer, or its thought, has ended: what follows begins a line."""
        if self._in_line:
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._in_line = self._thinks = False


def _harmless(text: str) -> str:
    return text.translate(_CONTROLS)
