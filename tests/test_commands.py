"""Mistakes in options of commands: each is one line and exit code 2, before anything is asked, started or written."""

from pathlib import Path

import pytest

from jaxserve.cli import main


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
