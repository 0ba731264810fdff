"""docs/simulation.md: its commands and its Python run as they stand."""

import dataclasses
import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from test_simulate_cli import LIMITS, write_log

from jaxserve.cli import main
from jaxserve.lab.bench.cli import serve_command
from jaxserve.lab.simulation.cli import simulate_command

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/simulation.md").read_text()
COMMANDS = re.findall(r"^ {4}(jaxserve simulate (?:.*\\\n)*.*)$", TEXT, re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout as far as the commands look at it, and the log of an engine."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    write_log(tmp_path / "steps.jsonl", dataclasses.replace(LIMITS, max_model_len=1024, num_pages=2000))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_three_commands() -> None:
    assert len(COMMANDS) == len(re.findall(r"^ {4}jaxserve ", TEXT, re.MULTILINE)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=[" ".join(c.split()[2:4]) for c in COMMANDS])
def test_command(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = shlex.split(command.replace("\\\n", " "))[1:]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "failed; the first" not in out
    names = [value for option, value in itertools.pairwise(arguments) if option in ("--policy", "--router")]
    for name in names:
        assert name in out
    if "--json" in arguments:
        assert [run["label"] for run in json.loads((folder / "run.json").read_text())["runs"]] == names
        assert (folder / "run.png").stat().st_size > 10_000


@pytest.mark.slow
def test_python(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    names: dict[str, Any] = {"__name__": "simulation"}
    for block in blocks:
        exec(block, names)
        out = capsys.readouterr().out
        assert "fcfs" in out and "failed; the first" not in out
    assert len(names["frame"]) == 500, "a line for each request"
    assert len(names["figure"].axes) > 3
    assert sorted(names["by_tenant"].groups) == sorted({one.request.tenant for one in names["pareto"]})
    assert len(names["by_tenant"].groups) == 3
    # What the comment beside it promises.
    assert len(names["results"][0].steps_frame()) == names["results"][0].simulation.num_steps


def test_every_option_that_it_names_exists() -> None:
    names = simulate_command.__annotations__ | serve_command.__annotations__  # it measures what --client-costs reads
    known = {f"--{name.rstrip('_').replace('_', '-')}" for name in names}
    assert set(re.findall(r"--[a-z][a-z-]+", TEXT)) <= known
