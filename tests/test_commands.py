"""Mistakes in options of commands: each is one line and exit code 2, before anything is asked, started or written."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli import COMMANDS, load_command, main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["health", ""], "the address is ''"),
        (["health", "127.0.0.1:9", "--timeout", "nan"], "'--timeout'"),
        (["health", "127.0.0.1:9", "--timeout", "-1"], "'--timeout'"),
        (["top", "127.0.0.1:9", "--every", "inf"], "'--every'"),
        (["top", "127.0.0.1:9", "--tls-ca", "x"], "--tls-ca is given, but http://127.0.0.1:9/metrics is not https"),
        (["top", "https://127.0.0.1:9", "--once", "--tls-ca", ""], "--tls-ca: cannot read ."),
        (["kv-server", "--port", "0", "--set", "store.kind=memory"], "does not use store.kind (--set)"),
        (["bench", "startup", "--timeout", "nan"], "'--timeout'"),
        (["bench", "startup", "--timeout", "inf"], "'--timeout'"),
        (["serve", "demo", "--port", "99999"], "error: --port: serve.http.port is 99999"),
        (["serve", "demo", "-tp", "0"], "error: -tp: parallel.tensor is 0"),
        (["serve", "demo", "--tensor-parallel-size=0"], "error: --tensor-parallel-size: parallel.tensor is 0"),
        (["serve", "demo", "-tp", "x"], "Invalid value for '-tp'"),
        (["serve", "demo", "-m", "other"], "two models are given, demo and -m other"),
        (["run", "demo", "--model", "other"], "two models are given, demo and --model other"),
        (["chat", "demo", "-m", "other"], "two models are given, demo and -m other"),
        (["chat", "--url", "http://localhost:1", "demo", "--model", "b"], "two models are given, demo and --model b"),
        (["run", "demo", "--prompt", "x", "--temperature", "-1"], "error: --temperature: temperature is -1.0"),
        (["chat", "demo", "--top-p", "2"], "error: --top-p: top_p is 2.0"),
        (["route", "--port", "77777"], "error: --port: serve.grpc.port is 77777"),
        (["kv-server", "--port", "-1"], "error: --port: kv_server.port is -1"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert not out and words in line


def _commands(path: list[str], command: Any) -> Iterator[tuple[list[str], Any]]:
    """With those of commands."""
    yield path, command
    for name, one in getattr(command, "commands", {}).items():
        yield from _commands([*path, name], one)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_long_name_behind_one_dash(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its letters would be options: `-model demo` is `-m odel` and a prompt."""
    for path, command in _commands([name], load_command(name)):
        names = [one for param in command.params for one in (*param.opts, *param.secondary_opts) if one[:2] == "--"]
        for option in [*names, "--help"]:
            for typed in (option[1:], f"{option[1:]}=x", option[1:].replace("-", "_").replace("_", "-", 1)):
                assert main([*path, typed, "demo"]) == 2
                said = f"error: No such option: {typed.partition('=')[0]}; did you mean {option}? (see jaxserve"
                assert capsys.readouterr().err.startswith(said)


def test_a_value_may_be_such_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--prompt", "-seed"], ["-m", "-seed"], ["-vm", "-seed"], ["--", "-seed"]):
        assert main(["run", *arguments, "--set", "nothing=1"]) == 2
        assert "did you mean --seed" not in capsys.readouterr().err
    for arguments in (["run", "-v", "-seed"], ["run", "-mx", "-seed"], ["run", "--prompt=x", "-seed"], ["-version"]):
        assert main(arguments) == 2
        assert "; did you mean --" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "more", "words"),
    [
        ("", [], ". exists already; give a new or empty directory"),
        ("data.jsonl", [], "data.jsonl exists already"),
        ("new", ["--rate", "inf"], "--rate is inf"),
    ],
)
def test_a_draft_head_needs_a_place_and_a_rate(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    out: str,
    more: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text('{"prompt": "a"}\n')
    assert main(["train-draft", "demo", out, "--data", "data.jsonl", *more]) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]
