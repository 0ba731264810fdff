"""The whole engine on a real checkpoint, small enough for a test: what the end-to-end tests share."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

from jaxserve.api import FinishReason, PromptInfo, SamplingParams, TokenLogprobs
from jaxserve.assemble import assemble
from jaxserve.config import load_config
from jaxserve.engine import AnyEngine, EngineGroup, Prompt
from jaxserve.sched import ContinuousScheduler

FIXTURES = Path(__file__).parents[1] / "fixtures"

# Two step shapes: enough for every kind of step, quick to compile. What one test has compiled the others find, if all
# their sizes are the same (tests/conftest.py).
SMALL = {
    "sched.max_rows": 8,
    "sched.max_step_tokens": 40,
    "runtime.token_buckets": [40],
    "runtime.row_buckets": [8],
}
# A fixture that answers ids, with a pool that holds three sequences of full length.
POOL = {
    "model__skip_tokenizer": True,
    "model__dtype": "float32",
    "model__max_len": 214,
    "cache__page_size": 16,
    "cache__num_pages": 42,
}
# The same of the model inside the package. An engine that is to run short gives out fewer, see `narrow`.
DEMO = {
    "model__max_len": 200,
    "cache__page_size": 16,
    "cache__num_pages": 60,
    "kernels__self_check": False,
}

# Sizes that no number of devices divides, biases, which must be padded too, and an output of its own in the last stage.
UNEVEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 48,
    "intermediate_size": 82,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_hidden_layers": 3,
    "vocab_size": 131,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@dataclasses.dataclass(kw_only=True)
class Result:
    """All that one sequence produced. Filled by `run`."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt: PromptInfo | None = None
    finish_reason: FinishReason | None = None
    error: Exception | None = None


def build(path: Path | str, **overrides: Any) -> AnyEngine:
    """An engine without a thread. Override names use `__` for the dot: `cache__num_pages=20`."""
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    return assemble(load_config(None, {"model.path": str(path), **SMALL, **named})).engine


def scheduler(engine: AnyEngine) -> ContinuousScheduler:
    """The scheduler inside, for its counters."""
    found = engine._scheduler
    assert isinstance(found, ContinuousScheduler)
    return found


def narrow(engine: AnyEngine, num_pages: int) -> AnyEngine:
    """From now on it gives out so few pages: the steps of an engine that has no more would be compiled for it alone."""
    scheduler(engine).resize_pool(num_pages, preempt=False)
    return engine


def always_loads(engine: AnyEngine) -> None:
    """Pages in host memory are loaded whatever that takes: a step of a small model is so short that computing may win
    by the clock of a busy machine."""
    scheduler(engine).memory.costs.note_commit = lambda *args: None


def run(engine: AnyEngine, asked: Sequence[tuple[Prompt, SamplingParams]], *, stagger: int = 0) -> list[list[Result]]:
    """Results [request][sequence]. With `stagger`, that many steps pass between two arrivals."""
    results: list[list[Result]] = []
    for prompt, sampling in asked:
        mine = [Result() for _ in range(sampling.n)]
        results.append(mine)

        def sink(update, mine=mine) -> None:
            result = mine[update.index]
            result.token_ids += update.token_ids
            result.text += update.text
            result.logprobs += update.logprobs or ()
            result.prompt = result.prompt or update.prompt
            result.finish_reason = result.finish_reason or update.finish_reason
            result.error = result.error or update.error

        engine.submit(engine.prepare(prompt, sampling), sink)
        for _ in range(stagger):
            engine.step()
    engine.run_until_idle()
    for replica in engine.replicas if isinstance(engine, EngineGroup) else (engine,):
        scheduler(replica).check()
        assert scheduler(replica).num_held_pages == 0
    return results


def travels(text: str) -> Iterator[tuple[str, list[int]]]:
    """Of optimised HLO: each exchange between devices and each copy, and the elements of every array that it yields."""
    for line in text.splitlines():
        kinds = r" = .* (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all|copy)(-start)?\("
        if found := re.search(kinds, line):
            shapes = re.findall(r"\w+\[([\d,]*)\]", line.split(" = ")[1].split("(%")[0])
            yield found.group(1), [prod(int(d) for d in dims.split(",") if d) for dims in shapes]
