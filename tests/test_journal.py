"""A batch whose process is killed goes on with the next run, and gives each answer once."""

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_parts import Fakes

from jaxserve import run
from jaxserve.errors import ConfigError, EngineStopped
from jaxserve.offline import journal as journals
from jaxserve.offline.journal import Journal

FACTS = {"the content of --input": "a", "model.path": "m"}
WAIT_S = 120.0


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(sampling_defaults={"temperature": 0.0}).install(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    logger = logging.getLogger("jaxserve")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def make(path: Path, *numbers: int, facts: dict[str, str] = FACTS) -> None:
    journal = Journal(path, facts)
    for number in numbers:
        journal.append(number, [{"text": f"answer {number}"}])
    journal.sync()
    journal.close()


def known(path: Path) -> frozenset[int]:
    journal = Journal(path, FACTS)
    for number in journal.known:
        assert journal.results(number) == [{"text": f"answer {number}"}]
    journal.close()
    return journal.known


def test_a_journal_has_what_was_synced_and_its_owner_alone_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "j"
    before = os.umask(0)
    try:
        make(path, 3, 0)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    make(path, 7)
    assert known(path) == {0, 3, 7}
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_line_that_a_crash_has_cut_off_is_no_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    make(path, 0)
    head = path.read_bytes().splitlines(keepends=True)[0]
    make(path, 1)
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in (start + 1, start + 12, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert known(path) == {0}
    path.write_bytes(whole[:start] + b"\0" * 40 + whole[start:])  # a size that was on disk before its content
    assert known(path) == {0}
    make(path, 2)
    assert known(path) == {0, 2}
    path.write_bytes(head[:20])
    assert known(path) == set()


def test_a_journal_of_something_else_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "j"
    make(path, 0)
    with pytest.raises(ConfigError, match="of another batch: model.path was m and is n"):
        Journal(path, {**FACTS, "model.path": "n"})
    opened = Journal(path, FACTS)
    with pytest.raises(ConfigError, match="in use by another process"):
        Journal(path, FACTS)
    opened.close()
    for content in (b'{"prompt": "a"}\n', b"no end of line"):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(ConfigError, match="is no journal of this version"):
            Journal(tmp_path / "other", FACTS)
        assert (tmp_path / "other").read_bytes() == content
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ConfigError, match="cannot open the journal"):
        Journal(tmp_path / "link", FACTS)


# ---- the command -----------------------------------------------------------------------------------------------------

_PROGRAM = """
import sys, time
sys.path.insert(0, {tests!r})
from fake_parts import Fakes
from jaxserve import run
from jaxserve.offline import journal
from jaxserve.testing import FakeRunner

journal.SYNC_S = 0.02
plain = FakeRunner.dispatch

def dispatch(self, plan):
    time.sleep(0.01)
    return plain(self, plan)

FakeRunner.dispatch = dispatch
Fakes(sampling_defaults={{"temperature": 0.0}}).install()
sys.exit(run.main(sys.argv[1:]))
"""


def write_batch(folder: Path) -> Path:
    """The first entry outlasts many that follow it, so that results wait for it; two are errors."""
    lengths = itertools.cycle([60, 1, 5, 2, 9, 3])
    entries: list[dict[str, Any]] = [
        {"id": i, "prompt": chr(97 + i % 20), "max_tokens": next(lengths), "n": 1 + i % 2} for i in range(60)
    ]
    entries[7]["max_tokens"] = entries[50]["max_tokens"] = 0
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


@pytest.mark.slow
def test_a_batch_that_is_killed_goes_on_and_gives_each_answer_once(
    tmp_path: Path, fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    source, journal, target = write_batch(tmp_path), tmp_path / "j", tmp_path / "out.jsonl"
    common = ["--set", "model.name=fake", "--input", str(source)]
    command = [sys.executable, "-c", _PROGRAM.format(tests=str(Path(__file__).parent)), *common]
    seen = b""
    for count in (5, 30):
        with subprocess.Popen(
            [*command, "--output", str(target), "--journal", str(journal)], stderr=subprocess.DEVNULL
        ) as process:
            deadline_s = time.monotonic() + WAIT_S
            while not journal.exists() or journal.read_bytes().count(b"\n") <= count:
                assert time.monotonic() < deadline_s and process.poll() is None, "the batch does not get on"
                time.sleep(0.005)
            process.send_signal(signal.SIGKILL)
        before, seen = seen, target.read_bytes()
        assert seen.startswith(before) or before.startswith(seen), "an answer that was there has changed"
    capsys.readouterr()
    assert run.main([*common, "--output", str(target), "--journal", str(journal)]) == run.SOME_FAILED
    told = capsys.readouterr().err
    num_known = int(told.split(" succeeded, ")[1].split()[0])
    assert num_known >= 30 and "58 of 60 entries" in told
    whole = tmp_path / "whole.jsonl"
    assert run.main([*common, "--output", str(whole)]) == run.SOME_FAILED
    assert target.read_bytes().startswith(seen)
    assert _without_hits(target) == _without_hits(whole)


def _without_hits(path: Path) -> list[dict[str, Any]]:
    """Whose pages were cached depends on what ran before."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line.get("usage", {}).pop("cached_tokens", None)
    return lines


def call(*arguments: str) -> int:
    return run.main(["--set", "model.name=fake", *arguments])


def test_what_the_engine_failed_at_runs_again(
    tmp_path: Path, fakes: Fakes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, journal, target = write_batch(tmp_path), tmp_path / "j", tmp_path / "out.jsonl"
    arguments = ["--input", str(source), "--output", str(target), "--journal", str(journal)]
    plain = journals.run_jobs

    def breaks(engine: Any, jobs: Any, on_result: Any, on_step: Any) -> None:
        def on_one(index: int, result: Any) -> None:
            on_result(index, EngineStopped("it has died") if index >= 40 else result)

        plain(engine, jobs, on_one, on_step)

    with monkeypatch.context() as patched:
        patched.setattr(journals, "run_jobs", breaks)
        assert call(*arguments) == run.SOME_FAILED
    assert "39 of 60 entries" in capsys.readouterr().err
    assert target.read_text().count("it has died") == 20
    assert call(*arguments) == run.SOME_FAILED
    assert f"58 of 60 entries of {source} succeeded, 40 of them in an earlier run" in capsys.readouterr().err
    assert call(*arguments) == run.SOME_FAILED
    assert "60 of them in an earlier run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--prompt", "a", "--journal", "j"], "--journal needs --input and --output"),
        (["--input", "in.jsonl", "--journal", "j"], "--journal needs --input and --output"),
        (["--input", "in.jsonl", "--output", "o", "--journal", "o"], "--journal and --output are the same file"),
        (["--journal", "j"], "--journal given, but nothing to answer"),
    ],
)
def test_wrong_use_is_told_before_anything_is_loaded(
    tmp_path: Path, fakes: Fakes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], text: str,
) -> None:  # fmt: skip
    write_batch(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert call(*arguments) == 2
    assert text in capsys.readouterr().err
    assert fakes.config is None


def test_a_pipe_cannot_be_read_again(tmp_path: Path, fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    try:
        pipe = f"/dev/fd/{reader}"
        assert call("--input", pipe, "--output", str(tmp_path / "o"), "--journal", str(tmp_path / "j")) == 2
    finally:
        os.close(reader)
        os.close(writer)
    assert "can be read again, not a pipe" in capsys.readouterr().err
    assert fakes.config is None
