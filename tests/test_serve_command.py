"""`jaxserve serve`: HTTP with one command, the name of the model, and what a start says about both."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from serve_parts import serve_bytes, served

from jaxserve.cli import main
from jaxserve.config import load_config
from jaxserve.config.addresses import LISTENABLE, listening_host
from jaxserve.config.model_path import model_name, resolve_model_path
from jaxserve.config.schema import HttpConfig, RuntimeConfig
from jaxserve.errors import CheckpointError
from jaxserve.offline.console import set_up_logging
from jaxserve.offline.llm import LLM
from jaxserve.serve.how_to_call import how_to_call

ROOT = Path(__file__).parents[1]
FAKE = "from fake_parts import Fakes; from jaxserve.cli import main; Fakes().install(); raise SystemExit(main())"


class Started(NamedTuple):
    address: str
    told: list[str]
    process: subprocess.Popen[str]


def _serve(*options: str) -> subprocess.Popen[str]:
    """`jaxserve serve demo --port 0` on the fake device."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.Popen(
        [sys.executable, "-c", FAKE, "serve", "demo", "--port", "0", "--max-model-len", "200", *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip


@pytest.fixture(scope="module")
def started() -> Iterator[Started]:
    """A server that has told everything."""
    with _serve("--set", "runtime.log_requests=true") as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            address = process.stdout.readline().removeprefix("serving HTTP on ").strip()
            told: list[str] = []
            for line in process.stderr:
                told.append(line.strip())
                if line.startswith("a page"):
                    break
            yield Started(address, told, process)
        finally:
            process.kill()


def _get(url: str, body: str | None = None) -> bytes:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, None if body is None else body.encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: bytes = answer.read()
    return content


def test_the_packaged_model_has_the_name_by_which_it_was_asked_for(started: Started) -> None:
    [model] = json.loads(_get(f"http://{started.address}/v1/models"))["data"]
    assert model["id"] == "demo"


def test_what_a_start_tells_works_as_it_stands(started: Started) -> None:
    [curl] = [line for line in started.told if line.startswith("curl ")]
    words = shlex.split(curl)
    answer = json.loads(_get(words[1], words[words.index("-d") + 1]))
    assert answer["model"] == "demo" and answer["choices"][0]["finish_reason"] in ("stop", "length")
    page = started.told[-1].rpartition(" ")[2]
    assert b"<html" in _get(page)
    [base] = [match[1] for line in started.told if (match := re.search(r"base_url (\S+) ", line))]
    assert base == f"http://{started.address}/v1"
    assert not [line for line in started.told if " INFO serving " in line], "stdout has said so"


def test_with_a_log_in_json_every_line_is_json_and_the_address_is_said_once() -> None:
    with _serve("--set", "runtime.log_format=json") as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            address = json.loads(first)["address"]
            assert b"demo" in _get(f"http://{address}/v1/models")
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0 and not out
    lines = [json.loads(line) for line in (first, *err.splitlines())]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    assert [line["message"] for line in lines if address in line["message"]] == [f"serving HTTP on {address}"]


def test_what_ends_a_start_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        try:
            assert main(["serve", "demo", "--port", port, "--set", "runtime.log_format=json"]) == 2
        finally:
            set_up_logging(RuntimeConfig())
    *_, last = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert last["level"] == "critical" and port in last["message"] and last["message"].startswith("error: ")


def test_it_ends_as_every_server_and_has_logged_what_it_refused(started: Started) -> None:
    assert started.process.stderr is not None
    with pytest.raises(urllib.error.HTTPError):
        _get(f"http://{started.address}/v1/nothing")
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(timeout=120) == 0
    assert "route=other status=404 reason=not_found" in " ".join(started.process.stderr.read().split())


@pytest.mark.parametrize(
    ("address", "config", "chats", "words"),
    [
        ("0.0.0.0:80", HttpConfig(), True, ["http://127.0.0.1:80/v1/chat/completions", "'model \"x'"]),
        ("[::]:80", HttpConfig(tls_cert="c"), False, ["https://[::1]:80/v1/completions", "prompt"]),
        ("[0::0]:80", HttpConfig(), True, ["http://[::1]:80/v1/chat/completions"]),
        ("[fe80::1%eth0]:80", HttpConfig(), True, ["http://[fe80::1%25eth0]:80/v1/chat/completions"]),
        ("a:1", HttpConfig(api_keys_file="k"), True, ["authorization: Bearer KEY"]),
        ("a:1", HttpConfig(tls_cert="c", tls_client_ca="a"), True, ["--cert CERTIFICATE --key KEY"]),
    ],
)
def test_what_is_told_of_a_door(address: str, config: HttpConfig, chats: bool, words: list[str]) -> None:
    lines = how_to_call(address, 'model "x', config, chats=chats)
    assert all(word in "\n".join(lines) for word in words), lines
    command = shlex.split(lines[1])
    assert json.loads(command[command.index("-d") + 1])["model"] == 'model "x'
    assert not any("a page" in line for line in how_to_call(address, "m", HttpConfig(web_page=False), chats=chats))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "which model?"),
        (["demo", "--model", "demo-vision"], "two models are given"),
        (["demo", "--port", "70000"], "serve.http.port is 70000"),
        (["demo", "--dtype", "half"], "model.dtype is 'half'"),
        (["demo", "--set", "serve.http.port=x"], "serve.http.port is 'x'"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *arguments]) == 2
    out, err = capsys.readouterr()
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert not out and words in line


@pytest.mark.parametrize(
    "host",
    ["", " ", "127.0.0.1 ", "a b", "a\0b", "localhost:80", "127.0.0.1:80", "[::1]:80", "[127.0.0.1]", "[::1", ":::",
     "http://localhost", "*", "-", "a..b", ".", "a" * 64, "ä.example", "0", "127.1", "0x7f.1", "256.1.1.1"],
)  # fmt: skip
def test_a_host_that_is_none_is_refused(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty one above all: for sockets it means every address, and an unset variable leaves it."""
    assert main(["serve", "demo", "--host", host]) == 2
    out, err = capsys.readouterr()
    wanted = f"error: --host: serve.host is {host!r:.80}, but must be {LISTENABLE}"
    assert not out and " ".join(wanted.split()) in err


@pytest.mark.parametrize("host", ["localhost", "a_b.example.", "10.0.0.1", "0.0.0.0", "::", "::1", "fe80::1%eth0"])
def test_a_host_is_a_name_or_an_address(host: str) -> None:
    assert listening_host(host) == host
    if ":" in host:
        assert listening_host(f"[{host}]") == host


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "0.0.0.0", "::", "[::]", "0::0", "::1", "[::1]"])
def test_what_is_printed_of_a_door_can_be_opened(host: str) -> None:
    if ":" in host:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6")
    config = HttpConfig(port=0)
    with served(serve_bytes(), host=host, http_config=config) as parts:
        *_, page = how_to_call(parts.http_url.removeprefix("http://"), "m", config, chats=True)
        assert b"<html" in _get(page.rpartition(" ")[2])


def test_run_takes_a_model_as_serve_and_chat_do(capsys: pytest.CaptureFixture[str]) -> None:
    """As `ollama run NAME` is typed, which talks: the answer names `jaxserve chat`."""
    assert main(["run", "demo"]) == 2
    assert "`jaxserve chat MODEL` is for a talk" in capsys.readouterr().err
    assert main(["run", "demo", "--model", "demo-vision", "--prompt", "a"]) == 2
    assert "two models are given, demo and --model demo-vision" in capsys.readouterr().err
    assert main(["run", "Owner/Name-1B", "--prompt", "a"]) == 2
    assert "hf download Owner/Name-1B" in capsys.readouterr().err


def test_run_says_how_to_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run"]) == 2
    assert "`jaxserve serve MODEL --port 8000` is for HTTP" in capsys.readouterr().err
    assert main(["run", "--help"]) == 0
    assert "jaxserve serve MODEL" in " ".join(capsys.readouterr().out.split())


def test_a_name_of_the_hub_is_answered_before_jax_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from jaxserve.cli import main\n"
        "assert main([sys.argv[1], *sys.argv[2:], 'Qwen/Qwen3-0.6B', '--set', 'serve.http.port=0']) == 2\n"
        "assert 'jax' not in sys.modules"
    )
    for arguments in (["serve"], ["run", "--model"], ["run", "--prompt", "a", "--model"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert "`hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B`" in line
        assert "`jaxserve serve models/Qwen3-0.6B`" in line


def test_the_same_from_python_and_from_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "a.yaml").write_text("model: {path: owner/name-1B}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="hf download owner/name-1B"):
        LLM(model="owner/name-1B")
    with pytest.raises(CheckpointError, match="hf download owner/name-1B"):
        resolve_model_path(load_config(folder / "a.yaml").config.model.path)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("owner/name-GGUF", r"hf download owner/name-GGUF FILE\.gguf .*jaxserve serve models/name-GGUF/FILE\.gguf"),
        ("./name", "give one with config.json"),
        ("name", "give one with config.json"),
        ("../owner/name/more", "give one with config.json"),
        ("owner/name.gguf", "give one with config.json"),
        ("file/name", "give one with config.json"),
        ("folder/name", "give one with config.json"),
        ("file", "is a file, but must be a directory; give one"),
    ],
)
def test_other_paths_are_no_names_of_the_hub(
    path: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "file").write_text("")
    (here / "folder").mkdir()
    monkeypatch.chdir(here)
    with pytest.raises(CheckpointError, match=words):
        resolve_model_path(path)


def test_names_of_models(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert [model_name(path) for path in ("demo", "demo-vision", str(tmp_path / "a"))] == ["demo", "demo-vision", "a"]
