"""Step logs of the model inside the package: replayed on a device of its own, every token is the same.

The log holds what makes a replay hard: rows taken away and computed again, prefixes that hit, pages that are copied,
draws under a mask, and noise of every request's own seed.
"""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
from whole import SMALL, always_loads, scheduler

from jaxserve.api import SamplingParams
from jaxserve.assemble import assemble
from jaxserve.config import load_config
from jaxserve.engine import Engine, Prompt
from jaxserve.lab.replay.command import replay_and_print
from jaxserve.lab.replay.core import replay
from jaxserve.sched.record import StepLog, StepRecord

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "w": {"enum": ["a", "b"]}}, "required": ["n", "w"]}
SETTINGS = {
    **SMALL,
    "model.path": "demo",
    "cache.num_pages": 10,
    "cache.page_size": 16,
    "model.max_len": 96,
    "sched.watermark": 0.0,
    "sched.growth": 0.0,
}


CODES = {
    "int8-a8, host memory": {
        "model.quantization": "int8-a8",
        "cache.host_bytes": 1 << 24,
        "cache.host_admission": "always",
    },
    "int4-int8": {"model.quantization": "int4", "cache.dtype": "int8"},
    "int8-float8_e4m3fn": {"model.quantization": "int8", "cache.dtype": "float8_e4m3fn"},
}


def _write(path: Path, settings: dict[str, Any]) -> tuple[Engine, list[list[int]]]:
    """The engine, and the tokens of each sequence."""
    engine = assemble(load_config(None, {**SETTINGS, **settings, "runtime.step_log": str(path)})).engine
    assert isinstance(engine, Engine)
    always_loads(engine)
    rng = random.Random(5)
    outputs: list[list[int]] = []

    def ask(prompt: Prompt, sampling: SamplingParams) -> None:
        mine: list[list[int]] = [[] for _ in range(sampling.n)]
        outputs.extend(mine)
        request = engine.prepare(prompt, sampling)
        engine.submit(request, lambda update, mine=mine: mine[update.index].extend(update.token_ids))

    shared = "The quick brown fox jumps over the lazy dog and then over"
    for number in range(12):
        masked = number % 5 == 2
        sampling = SamplingParams(
            max_tokens=rng.randint(10, 30),
            temperature=rng.choice([0.7, 1.0, 1.5]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            n=2 if number % 3 == 0 else 1,
            seed=number,
            ignore_eos=not masked,
            structured={"json_schema": json.dumps(SCHEMA)} if masked else None,
        )
        ask(shared + " then" * number, sampling)
        for _ in range(rng.randint(0, 3)):
            engine.step()
    engine.run_until_idle()
    # Two prompts that take all pages, and one that began in those.
    few = SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
    for prompt in ([*range(10, 100)], [*range(110, 200)], shared + " then" * 11):
        ask(prompt, few)
        engine.run_until_idle()
    engine.stop()
    return engine, outputs


def _read(path: Path) -> list[StepRecord]:
    with StepLog(path) as log:
        records = list(log)
        assert log.end is not None and log.end.dropped == 0
        return records


@pytest.mark.slow  # on a fake device, quick: tests/replay
@pytest.mark.parametrize("settings", CODES.values(), ids=CODES)
def test_a_replay_draws_the_same_tokens(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of weights and caches in fewer bits, and with pages that went to host memory."""
    path = tmp_path / "steps.jsonl"
    engine, outputs = _write(path, settings)
    records = _read(path)
    plans = [record.plan for record in records]
    assert scheduler(engine).num_preemptions > 0 and scheduler(engine).memory.num_hit_tokens > 0
    assert any(plan.masks for plan in plans) and any(plan.copies for plan in plans)
    if "cache.host_bytes" in settings:
        assert any(plan.saves for plan in plans) and any(plan.loads for plan in plans)
    assert all(record.device_ms > 0 and record.wait_ms >= 0 and record.pack_ms > 0 for record in records)
    drawn = sum(len(record.token_ids) for record in records)
    assert drawn >= sum(map(len, outputs)) > 150

    # All sizes are the log's, those of host memory included.
    sizes = ("cache.host_bytes", "cache.host_admission")
    kept = {name: value for name, value in settings.items() if name not in sizes}
    config = load_config(None, {"model.path": "demo", **kept})
    assert replay_and_print(path, config) == 0
    assert capsys.readouterr().out.startswith(f"{len(records)} steps, {drawn} tokens: all equal")

    # Once more, on the device that has done it all before: what it holds from then is written over before it is read.
    at = next(i for i, r in enumerate(records) if i > len(records) // 2 and r.token_ids)
    wrong = (*records[at].token_ids[:-1], records[at].token_ids[-1] ^ 1)
    changed = [*records[:at], dataclasses.replace(records[at], token_ids=wrong), *records[at + 1 :]]
    result = replay(engine._runner, changed, engine.model.vocab_size)
    assert result.steps == at and result.difference is not None
    assert result.difference.step_id == plans[at].step_id and result.difference.row == plans[at].sampled_rows[-1]
    assert result.difference.replayed == records[at].token_ids[-1]
