"""The model inside the package answers its held-out tasks, however the engine gets to the answer."""

import asyncio
from collections.abc import Mapping

import pytest
from demo_tasks import TASKS, check, held_out_items
from eval_demo import STRESS, evaluate
from whole import scheduler

from jaxserve import LLM, SamplingParams
from jaxserve.engine import AsyncEngine

ENOUGH = 0.95
SIZES = {"sched.max_rows": 16, "sched.max_step_tokens": 256}


def _llm(dtype: str = "auto", sizes: Mapping[str, object] = SIZES) -> LLM:
    fixed = {"model.path": "demo", "model.dtype": dtype, "runtime.compile_cache": None}
    return LLM.from_config(None, overrides={**fixed, **sizes})


def _shortfall(accuracy: dict[str, float]) -> dict[str, float]:
    return {task: share for task, share in accuracy.items() if share < ENOUGH}


def test_every_task() -> None:
    llm = _llm("float32")
    accuracy = evaluate(llm, 64, seed=11)
    assert set(accuracy) == set(TASKS)
    assert not _shortfall(accuracy)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "num_items"), [("float32", 128), ("bfloat16", 64)])
def test_every_task_on_many_items(dtype: str, num_items: int) -> None:
    """Fewer in bfloat16, which a CPU computes seven times slower."""
    assert not _shortfall(evaluate(_llm(dtype), num_items, seed=12))


@pytest.mark.slow
def test_every_task_cut_preempted_and_hit_by_prefix() -> None:
    llm = _llm(sizes=STRESS)
    assert not _shortfall(evaluate(llm, 32, seed=13, repeat=2))
    counters = scheduler(llm._engine)
    assert counters.num_preemptions > 0
    assert counters.memory.num_hit_tokens > 0


async def test_streamed_answers_are_the_same() -> None:
    llm = _llm("float32")
    items = [item for task in TASKS for item in held_out_items(task, 10, seed=14)]
    sampling = SamplingParams(temperature=0.0, max_tokens=None)
    whole = llm.chat([list(item.messages) for item in items], sampling, use_tqdm=False)
    streams = AsyncEngine(llm._engine)
    llm._engine.start()

    async def stream(prompt_token_ids: list[int]) -> str:
        request = await streams.run(lambda: llm._engine.prepare(prompt_token_ids, sampling))
        return "".join([update.text async for update in streams.stream(request)])

    streamed = await asyncio.gather(*(stream(list(output.prompt_token_ids)) for output in whole))
    assert streamed == [output.outputs[0].text for output in whole]
    right = sum(check(item, text) for item, text in zip(items, streamed, strict=True))
    assert right >= ENOUGH * len(items)
    await asyncio.to_thread(llm._engine.stop)
    streams.close()
