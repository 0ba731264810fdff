"""`jaxserve replay` and `jaxserve steps` on the fake device: verdicts, exit codes, and what is said where."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_parts import Fakes
from logged import write_log

from jaxserve import LLM, SamplingParams, cli
from jaxserve.sched import StepPlan

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    logger = logging.getLogger("jaxserve")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(mode="context").install(monkeypatch.setattr)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([*map(str, arguments)])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def log(tmp_path: Path, fakes: Fakes) -> Path:
    """Of a run of six prompts."""
    path = tmp_path / "steps.jsonl"
    settings = {"runtime.step_log": str(path), "cache.num_pages": 40, "model.name": "tiny"}
    llm = LLM.from_config(None, overrides=settings)
    prompts = ["abc", "hello", "x" * 30, "hello", "y", "zz"]
    llm.generate(prompts, SamplingParams(max_tokens=7, temperature=0.0), use_tqdm=False)
    llm._engine.stop()
    return path


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_log_replays(log: Path, call: Call, fakes: Fakes) -> None:
    records = _lines(log)[1:-1]
    code, out, err = call("replay", log, "--set", "model.name=tiny")
    assert code == 0
    assert out.startswith(f"{len(records)} steps, 42 tokens: all equal (")
    assert "note:" not in err
    assert fakes.config is not None and fakes.config.cache.num_pages == 40, "sizes left open are those of the log"
    assert fakes.config.runtime.step_log is None


def test_a_changed_token_is_told(log: Path, call: Call) -> None:
    lines = _lines(log)
    lines[4]["token_ids"][0] ^= 1
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, _ = call("replay", log)
    assert code == 3
    row = StepPlan.from_fields(lines[4]["plan"]).sampled_rows[0]
    assert out.startswith("different after 3 equal steps with ")
    assert f"step 3, row {row}: request 'req-" in out
    assert f"is {lines[4]['token_ids'][0]} in the log and {lines[4]['token_ids'][0] ^ 1} in the replay" in out


def test_settings_that_can_change_a_token_are_told(log: Path, call: Call) -> None:
    code, out, err = call("replay", log, "--set", "model.dtype=bfloat16")
    assert code == 0 and "all equal" in out, "the fake device has no types"
    assert 'note: model.dtype is "auto" in the log, "bfloat16" here' in err


def test_what_does_not_fit_is_refused_before_it_runs(log: Path, call: Call, fakes: Fakes) -> None:
    code, out, err = call("replay", log, "--set", "cache.num_pages=20")
    assert (code, out) == (2, "")
    assert "error: the log cannot be replayed on this device: it needs num_pages 40, here 20 (cache.num_pages)" in err
    assert fakes.runner is not None and fakes.runner.num_steps == 0


def test_a_log_without_an_end(log: Path, call: Call) -> None:
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:-1]))
    code, out, err = call("replay", log)
    assert code == 0 and "all equal" in out
    assert "note: the log has no end" in err
    assert "the log has no end" in call("steps", log)[1]


@pytest.mark.parametrize("command", ["replay", "steps"])
def test_a_file_that_is_no_log(tmp_path: Path, call: Call, fakes: Fakes, command: str) -> None:
    path = tmp_path / "other"
    path.write_text('{"prompt": "a"}\n')
    code, out, err = call(command, path)
    assert (code, out) == (2, "")
    assert f"error: {path}, line 1: this is no header of a step log" in err
    assert fakes.config is None, "a device was built for it"


def test_several_hosts_are_refused(log: Path, call: Call) -> None:
    code, _, err = call("replay", log, "--set", "hosts.coordinator=h:1", "--set", "hosts.num_processes=2")
    assert code == 2 and "one process" in err


def test_where_the_time_went(tmp_path: Path, call: Call) -> None:
    path = tmp_path / "log"
    write_log(path, 2)
    records = _lines(path)[1:-1]
    code, out, _ = call("steps", path)
    assert code == 0
    assert "fake, policy preemptive, replica 0: 4 rows, 14 pages of 4 tokens, contexts up to 48" in out
    kinds = {"decode": [], "prefill": [], "mixed": []}
    for record in records:
        plan = record["plan"]
        kind = "decode" if "chunks" not in plan else "mixed" if "decode_rows" in plan else "prefill"
        kinds[kind].append(record)
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith(" ") and line.split()}
    for kind, found in [*kinds.items(), ("all", records)]:
        tokens = sum(r["num_tokens"] for r in found)
        padded = sum(r["padded_tokens"] for r in found)
        n = len(found)
        assert n > 0, kind
        assert rows[kind][0] == str(n)
        assert rows[kind][2] == f"{tokens / n:.1f}"
        assert float(rows[kind][3].rstrip("%")) == pytest.approx(100 * padded / (tokens + padded), abs=0.051)
        assert rows[kind][4] == f"{sum(r['context_tokens'] for r in found) / n:.0f}"
    assert f"{sum(len(r['token_ids']) for r in records)} tokens drawn" in out
