"""jaxserve through `AsyncLLM`: every request a stream, every token an update, as in a user's program.

The settings that are not jaxserve's defaults are here.
"""

import asyncio
import contextlib
import time

from jaxserve import AsyncLLM, SamplingParams, __version__
from jaxserve.lab.bench.about import about_device, about_machine
from peers.values import AS_PUBLISHED, Answer, Ask, Settings


class Engine:
    """A loop of asyncio that lives as long as the model; runs happen in it one after the other."""

    def __init__(self, settings: Settings) -> None:
        if settings.device == "cpu":
            room = {"cache.memory_bytes": settings.kv_bytes}
        else:
            room = {"cache.memory_fraction": settings.memory_share}
        overrides = {
            "model.path": settings.model,
            "model.random_weights": settings.random_weights,
            "model.skip_tokenizer": True,
            "model.dtype": "auto" if settings.dtype == AS_PUBLISHED else settings.dtype,
            "model.max_len": settings.max_len,
            **room,
            "runtime.background_buckets": False,  # nothing is compiled beside what is measured
            **settings.overrides,
        }
        self._llm = AsyncLLM.from_config(None, overrides)
        self._loop = asyncio.new_event_loop()
        self.about = {
            "versions": {"jaxserve": __version__, **about_machine()["versions"]},
            "settings": {name: value for name, value in overrides.items() if name != "model.path"},
            "device": about_device(),
        }

    def run(self, asks: list[Ask]) -> list[Answer]:
        return self._loop.run_until_complete(self._run(asks))

    async def _run(self, asks: list[Ask]) -> list[Answer]:
        start_s = time.perf_counter()
        return await asyncio.gather(*(self._answer(ask, start_s) for ask in asks))

    async def _answer(self, ask: Ask, start_s: float) -> Answer:
        if ask.due_s:
            await asyncio.sleep(start_s + ask.due_s - time.perf_counter())
        sampling = SamplingParams(temperature=0.0, max_tokens=ask.num_tokens, ignore_eos=True, detokenize=False)
        tokens: list[int] = []
        times_s: list[float] = []
        async with contextlib.aclosing(self._llm.generate(list(ask.prompt), sampling)) as updates:
            async for update in updates:
                tokens += update.token_ids
                times_s += [time.perf_counter() - start_s] * len(update.token_ids)
        return Answer(tokens=tuple(tokens), times_s=tuple(times_s))
