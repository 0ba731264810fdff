"""What the README and docs/simulation.md say of policies, as it stands there, on the demo model and the simulator."""

import ast
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxserve import config
from jaxserve.cli import main
from jaxserve.lab import LabResult
from jaxserve.offline import front_door
from jaxserve.sched import Policy

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SECTION = README.split("## For researchers")[1].split("\n## ")[0]
POLICY, ENGINE, SIMULATION = re.findall(r"^```python\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
FEW_SHAPES = {"sched.max_step_tokens": 128, "runtime.token_buckets": [128], "runtime.row_buckets": [1]}


@pytest.fixture
def names() -> dict[str, Any]:
    """What a notebook holds after the first cell."""
    names: dict[str, Any] = {"__name__": "readme"}
    exec(POLICY, names)
    return names


def test_it_is_one_small_class(names: dict[str, Any]) -> None:
    assert len(POLICY.strip().splitlines()) <= 20
    assert issubclass(names["CheapestPrompt"], Policy)
    for block in (ENGINE, SIMULATION):
        assert "CheapestPrompt" in block
        assert not any(isinstance(node, ast.ClassDef | ast.FunctionDef) for node in ast.walk(ast.parse(block)))


@pytest.mark.slow
def test_on_the_engine(
    names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two shapes in place of all, and nothing else is changed. Under fcfs the prompts run as they come."""
    load = config.load_config

    def load_small(path: Path | None, overrides: Mapping[str, object], **options: Any) -> config.ResolvedConfig:
        return load(path, {**overrides, **FEW_SHAPES, "runtime.compile_cache": str(tmp_path)}, **options)

    monkeypatch.setattr(front_door, "load_config", load_small)
    exec(ENGINE, names)
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == [[0, 1, 2], [0, 2, 1]]
    assert re.findall(r"`(\[[\d, ]+\])`", SECTION) == [str(order) for order in printed]
    third, second = names["outputs"][2], names["outputs"][1]
    assert third.num_cached_tokens > 0, "it came early because of what was cached"
    assert len(third.prompt_token_ids) > len(second.prompt_token_ids)


def test_on_the_simulator(
    names: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    exec(SIMULATION, names)
    assert "CheapestPrompt" in capsys.readouterr().out
    first_come, _, cheapest = results = names["results"]
    assert [result.label for result in results] == ["fcfs", "sjf", "CheapestPrompt"]
    assert order_of(first_come) != order_of(cheapest)
    # The figures of the text.
    seconds = [f"{result.as_json()['median_ttft_ms'] / 1e3:.1f}" for result in (first_come, cheapest)]
    shares = [f"{result.cached_share:.0%}".replace("%", " %") for result in (first_come, cheapest)]
    text = " ".join(SECTION.split())
    assert f"falls from {seconds[0]} to {seconds[1]} simulated seconds" in text, seconds
    assert f"{shares[1]} of the input was found in the prefix cache instead of {shares[0]}" in text, shares


def test_figures_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`jaxserve simulate` as docs/simulation.md has it, and the medians before it."""
    page = (ROOT / "docs/simulation.md").read_text()
    commands = re.findall(r"^(jaxserve simulate (?:.*\\\n)*.*)$", page, re.MULTILINE)
    [command] = [one for one in commands if "--device" in one]
    monkeypatch.chdir(ROOT)
    arguments = shlex.split(command.replace("\\\n", " "))[1:]
    assert main([*arguments, "--json", str(tmp_path / "runs.json")]) == 0
    runs = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert [run["label"] for run in runs] == ["fcfs", "sjf"]
    first_come, shortest = (f"{run['median_ttft_ms']:.0f}" for run in runs)
    text = " ".join(page.split())
    assert f"reduces the median time to the first token from {first_come} to {shortest} ms" in text


def order_of(result: LabResult) -> list[str]:
    """Request ids in the order of their first tokens."""
    return [r.request_id for r in sorted(result.simulation.requests, key=lambda r: r.first_token_s or 0.0)]
