"""`jaxserve chat`: turns in a pipe and on a real terminal, with a model in this process and with servers over HTTP."""

import contextlib
import http.server
import io
import json
import os
import pty
import select
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from fake_parts import Fakes
from http_parts import ToolTokenizer, http_served
from serve_parts import WAIT_S, Served

from jaxserve.cli import main
from jaxserve.cli.chat import Piece, talk
from jaxserve.errors import ConfigError, InvalidRequest


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch):
    """Puts lines into the pipe that the command reads."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


class Recorder:
    """A model that keeps what it was asked, and answers with the number of messages."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[str, str]]] = []

    def __call__(self, messages: Sequence[Mapping[str, str]]) -> Generator[Piece, None, None]:
        self.asked.append([(message["role"], message["content"]) for message in messages])
        yield Piece(thought="hm")
        yield Piece("n = ")
        yield Piece(str(len(messages)), is_cut=True)


def test_lines_are_turns_of_one_conversation(says, capsys: pytest.CaptureFixture[str]) -> None:
    model = Recorder()
    says("one\n\n /two\n/etc/hosts\n/system  be kind \nthree\n/reset\nfour\n/system\nfive\n/exit\nsix\n")
    talk("m", model, "at first")
    first, later = ("system", "at first"), ("system", "be kind")
    one = [("user", "one"), ("assistant", "n = 2")]
    two = [*one, ("user", "/two"), ("assistant", "n = 4")]
    hosts = [*two, ("user", "/etc/hosts"), ("assistant", "n = 6")]
    assert model.asked == [
        [first, *one[:-1]],
        [first, *two[:-1]],
        [first, *hosts[:-1]],
        [later, *hosts, ("user", "three")],
        [later, ("user", "four")],
        [("user", "four"), ("assistant", "n = 2"), ("user", "five")],
    ]
    assert capsys.readouterr() == ("n = 2\nn = 4\nn = 6\nn = 8\nn = 2\nn = 3\n", "")


def test_in_a_pipe_the_first_mistake_ends_it(says, capsys: pytest.CaptureFixture[str]) -> None:
    model = Recorder()
    says("one\n/what\ntwo\n")
    with pytest.raises(ConfigError, match="there is no command /what; there is /reset, /system"):
        talk("m", model, None)

    def refuses(messages: Sequence[Mapping[str, str]]) -> Generator[Piece, None, None]:
        yield Piece("beg")
        raise InvalidRequest("too long")

    says("one\ntwo\n")
    with pytest.raises(InvalidRequest, match="too long"):
        talk("m", refuses, None)
    assert len(model.asked) == 1
    assert capsys.readouterr().out == "n = 1\nbeg\n"


TALKER = """
import time
from jaxserve.cli.chat import Piece, talk
from jaxserve.errors import InvalidRequest

def answer(messages):
    if messages[-1]["content"] == "refuse":
        raise InvalidRequest("that one not")
    while messages[-1]["content"] == "go on":
        yield Piece("x")
        time.sleep(0.01)
    yield Piece(f"answer {len(messages)} \\x1b[31m")

talk("the-model", answer, None)
"""


class _Terminal:
    """A program on a terminal of its own."""

    def __init__(self, command: list[str]) -> None:
        self._ours, its = pty.openpty()
        environment = {**os.environ, "TERM": "xterm"}
        # A session of its own with this terminal: only then Ctrl-C sends a signal.
        self.process = subprocess.Popen(
            [sys.executable, "-c", _IN_FRONT, *command], stdin=its, stdout=its, stderr=its, env=environment,
            start_new_session=True,
        )  # fmt: skip
        os.close(its)
        self.shown = ""

    def until(self, words: str) -> None:
        """Reads until `words` are there, behind what an earlier call found."""
        found, end_s = "", time.monotonic() + WAIT_S
        while words not in found:
            assert time.monotonic() < end_s, (words, self.shown + found)
            if select.select([self._ours], [], [], 1.0)[0]:
                found += os.read(self._ours, 1).decode("utf-8", "replace")
        self.shown += found

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def end(self) -> int:
        """Reads the rest; the exit code."""
        rest = b""
        with contextlib.suppress(OSError):  # how Linux tells that the other end is closed
            while chunk := os.read(self._ours, 4096):
                rest += chunk
        self.shown += rest.decode("utf-8", "replace")
        return self.process.wait(timeout=WAIT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


_IN_FRONT = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


def test_on_a_terminal() -> None:
    """An answer that Ctrl-C stops is kept as far as it came; a mistake ends nothing; Ctrl-D does."""
    terminal = _Terminal([sys.executable, "-c", TALKER])
    try:
        terminal.until("the-model. /help lists the commands")
        for keys, shown in (
            ("go on\n", "xxxx"),
            ("\x03", "(stopped)"),
            ("hi\n", "answer 3 "),
            ("/help\n", "/exit  end"),
            ("/what\n", "there is no command /what"),
            ("refuse\n", "error: that one not"),
            ("hi\n", "answer 5 "),
            ("half\x03", "Ctrl-D or /exit ends"),
            ("/reset\n", "> "),
            ("hi\n", "answer 1 "),
        ):
            terminal.type(keys)
            terminal.until(shown)
            if not shown.startswith(("xxxx", "> ")):
                terminal.until("> ")
        terminal.type("\x04")
        assert terminal.end() == 0
    finally:
        terminal.close()
    assert "\x1b[31m" not in terminal.shown, "what a model writes does not steer the terminal"
    assert "\ufffd[31m" in terminal.shown


def test_a_model_in_this_process(says, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fakes = Fakes(sampling_defaults={"temperature": 0.0}).install(monkeypatch.setattr)
    says("hi\nyou\n")
    assert main(["chat", "demo", "--max-tokens", "2", "--set", "sched.max_rows=3"]) == 0
    assert capsys.readouterr().out == '!"\n!"\n', "as `jaxserve run --chat` answers"
    assert fakes.config is not None and fakes.config.sched.max_rows == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tls-ca", "x"], "--api-key-file and --tls-ca are for a running server; give --url, too"),
        (["--url", "a:1", "--set", "sched.max_rows=3"], "leave them out with --url"),
        (["--url", "http://:8000"], "is no address; give HOST:PORT"),
        (["--temperature", "-1"], "temperature"),
        (["demo", "--set", "model.skip_tokenizer=true"], "a chat is text"),
        (["nowhere/to/be/found"], "nowhere/to/be/found"),
    ],
)
def test_a_wrong_call_is_one_line(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Fakes().install(monkeypatch.setattr)
    assert main(["chat", *arguments]) == 2
    out, err = capsys.readouterr()
    [line] = [line for line in err.splitlines() if not line.startswith("jaxserve: ")]
    assert line.startswith("error: ") and words in line and out == ""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("the-key")
    parts = Served(tokenizer=ToolTokenizer(), vocab_size=259)
    with http_served(parts, api_keys_file=str(keys)):
        yield parts, keys


def test_a_running_server(says, server: tuple[Served, Path], capsys: pytest.CaptureFixture[str]) -> None:
    parts, keys = server
    call = ["chat", "--url", f"{parts.http_url}/v1", "--api-key-file", str(keys), "--temperature", "0"]
    says("hi\nyou\n")
    assert main([*call, "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out == '!"#\n!"#\n'
    says("hi\n")
    assert main([*call[:3], "fake"]) == 2
    assert "answers 401" in (told := capsys.readouterr().err) and told.endswith("--api-key-file\n")
    says("hi\n")
    assert main(["chat", "other", *call[1:]]) == 2
    assert "the model 'other' is not served here; there is 'fake'" in capsys.readouterr().err


class _Scripted(http.server.BaseHTTPRequestHandler):
    """Answers each POST with the events of the server."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.events)  # type: ignore[attr-defined]

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        (["[DONE]"], 0, ""),
        ([], 2, "broke off"),
        ([json.dumps({"error": {"message": "the engine has died"}})], 2, "ended the answer: the engine has died"),
    ],
)
def test_events_of_other_servers(says, end: list[str], code: int, words: str, capsys) -> None:
    """Comments keep a connection open, a thought is no part of the answer, and one that breaks off is no success."""
    deltas = [{"reasoning_content": "hm"}, {"content": "a"}, {"role": "assistant"}]
    data = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas] + [json.dumps({"choices": []}), *end]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Scripted) as scripted:
        scripted.events = b": wait\n\n" + b"".join(f"data: {one}\n\n".encode() for one in data)  # type: ignore[attr-defined]
        thread = threading.Thread(target=scripted.serve_forever)
        thread.start()
        says("hi\n")
        assert main(["chat", "m", "--url", f"http://127.0.0.1:{scripted.server_port}"]) == code
        scripted.shutdown()
        thread.join()
    out, err = capsys.readouterr()
    assert out == "a\n" and words in err
