"""Other weights for an engine that runs: every token belongs to one version, nothing is lost, and what does not fit
changes nothing. The truth is the decoder as a function of its parameters, which `tests/models/test_trainable.py` holds
against checkpoints."""

import asyncio
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from whole import FIXTURES, POOL, SMALL, always_loads, scheduler

from jaxserve import LLM, AsyncLLM, SamplingParams
from jaxserve.assemble.live_weights import Policy
from jaxserve.engine import Update
from jaxserve.errors import CapacityError, CheckpointError, ConfigError, EngineStopped, InvalidRequest
from jaxserve.models import load_trainable
from jaxserve.sched import Limits, SchedulerOptions, create_scheduler

NAME = "llama"
SETTINGS: dict[str, object] = {"model.path": str(FIXTURES / NAME), **SMALL}
SETTINGS |= {name.replace("__", "."): value for name, value in POOL.items()}
SAMPLING = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True, logprobs=0)
PROMPTS = [[7 + i, 11, 13, 17 + i, 19] * 4 for i in range(3)]
CLOSE = 2e-4

Params = Mapping[str, jax.Array]


@functools.cache
def trainable() -> tuple[Any, Params, Callable[..., Any]]:
    decoder, params = load_trainable(FIXTURES / NAME, dtype="float32")
    return decoder, params, jax.jit(decoder.log_probs)


def other(seed: int) -> Params:
    """Weights near those of the checkpoint, and far enough for other log-probabilities."""
    keys = jax.random.split(jax.random.key(seed), len(trainable()[1]))
    return {
        name: array * (1 + 0.1 * jax.random.normal(key, array.shape))
        for key, (name, array) in zip(keys, trainable()[1].items(), strict=True)
    }


def wanted(params: Params, prompt: list[int], token_ids: list[int]) -> np.ndarray:
    """Log-probabilities of the generated tokens by the decoder as a function."""
    row = np.zeros((1, 128), np.int32)
    row[0, : len(prompt) + len(token_ids)] = prompt + token_ids
    lengths = jnp.asarray([len(prompt) + len(token_ids)])
    return np.asarray(trainable()[2](params, jnp.asarray(row), lengths))[0, len(prompt) - 1 :][: len(token_ids)]


def llm(**overrides: Any) -> LLM:
    return LLM.from_config(None, {**SETTINGS, **overrides}, progress=False)


def answers(engine: LLM) -> list[tuple[list[int], np.ndarray, tuple[Any, ...]]]:
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], SAMPLING, use_tqdm=False)
    found = []
    for output in outputs:
        [one] = output.outputs
        assert one.logprobs is not None
        drawn = [entry[token].logprob for entry, token in zip(one.logprobs, one.token_ids, strict=True)]
        found.append((one.token_ids, np.asarray(drawn), one.weights))
    return found


def check(
    found: list[tuple[list[int], np.ndarray, tuple[Any, ...]]],
    params: Params,
    version: str,
    prompts: list[list[int]] = PROMPTS,
) -> None:
    for prompt, (token_ids, logprobs, weights) in zip(prompts, found, strict=True):
        assert len(token_ids) == SAMPLING.max_tokens
        assert np.abs(logprobs - wanted(params, prompt, token_ids)).max() < CLOSE
        assert weights == (((0, version),) if version else ())


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        *(pytest.param({key: n}, marks=pytest.mark.slow) for key, n in (("parallel.tensor", 4), ("parallel.data", 2))),
        pytest.param({"parallel.pipeline": 2}, marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_of_the_new_weights(parallel: dict[str, object]) -> None:
    """From one device to several, where heads are padded and copied, to replicas, and to the stages of a pipeline. The
    tree stays the caller's, and a prompt that has been answered before meets no page of the old weights."""
    with llm(**parallel) as engine:
        before = answers(engine)
        check(before, trainable()[1], "")
        new = other(1)
        assert engine.update_weights(new, version="one") >= 0
        check(answers(engine), new, "one")
        engine.update_weights(trainable()[1], version="two")
        after = answers(engine)
        check(after, trainable()[1], "two")
        assert [one[0] for one in after] == [one[0] for one in before]


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    decoder, params, _ = trainable()
    name, array = next(iter(params.items()))
    without = {key: value for key, value in params.items() if key != name}
    donated = jnp.array(array)
    donated.delete()
    with llm() as engine:
        before = answers(engine)
        cases: list[tuple[Any, type[Exception], str]] = [
            (without, CheckpointError, rf"1 names .* {name} \(missing\)"),
            ({**params, "head": array}, CheckpointError, r"head \(unknown\)"),
            ({**without, 7: array}, CheckpointError, r"2 names .* 7 \(unknown\)"),
            ({**params, name: [1.0]}, CheckpointError, f"{name} is a list, but must be an array"),
            ({**params, name: donated}, CheckpointError, f"{name} has been deleted: donated"),
            ({**params, name: array[:3]}, CheckpointError, f"{name} is float32.* needs floats"),
            ({**params, name: jnp.zeros(array.shape, jnp.int32)}, CheckpointError, f"{name} is int32"),
            ({**params, name: array.at[0, 0].set(jnp.nan)}, CheckpointError, "1 of .* not finite"),
            (FIXTURES / "qwen3", ConfigError, "other shapes or types"),
            (tmp_path / "absent", CheckpointError, "absent"),
        ]
        for source, kind, match in cases:
            with pytest.raises(kind, match=match):
                engine.update_weights(source, version="bad")
        for version in ("", 7):
            with pytest.raises(InvalidRequest, match=f"version is {version!r}"):
                engine.update_weights(params, version=version)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="got list"):
            engine.update_weights([*params.values()], version="x")  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="there are finish, recompute, keep"):
            engine.update_weights(params, version="x", policy="replay")  # type: ignore[arg-type]
        assert [one[0] for one in answers(engine)] == [one[0] for one in before]
        # The tensors of `to_hf` are a checkpoint, and a directory is as good as a tree.
        new = other(2)
        (tmp_path / "config.json").write_bytes((FIXTURES / NAME / "config.json").read_bytes())
        save_file(decoder.to_hf(new), str(tmp_path / "model.safetensors"))
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
        with pytest.raises(ConfigError, match="by its config.json it has other norm than"):
            engine.update_weights(tmp_path, version="directory")
        (tmp_path / "config.json").write_text(json.dumps(config))
        engine.update_weights(tmp_path, version="directory")
        check(answers(engine), new, "directory")


def test_a_scheduler_that_cannot_forget_pages_keeps_the_weights() -> None:
    def make(limits: Limits, options: SchedulerOptions) -> Any:
        inner = create_scheduler("fcfs", limits, options=options)
        return SimpleNamespace(
            **{name: getattr(inner, name) for name in ("add", "abort", "schedule", "commit", "has_work")}
        )

    with LLM.from_config(None, SETTINGS, scheduler=make, progress=False) as engine:
        before = answers(engine)
        for change in (lambda: engine.update_weights(other(1), version="one"), engine.sleep):
            with pytest.raises(InvalidRequest, match="its scheduler is none of jaxserve's"):
                change()
        assert [one[0] for one in answers(engine)] == [one[0] for one in before]


def test_nothing_is_drawn_after_an_exchange_that_broke_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(weights: Any) -> None:
        raise RuntimeError("the device is lost")

    with llm() as engine:
        [replica] = engine._engine.replicas
        monkeypatch.setattr(replica._runner, "use_weights", breaks)
        with pytest.raises(RuntimeError, match="is lost"):
            engine.update_weights(trainable()[1], version="one")
        with pytest.raises(EngineStopped, match="is lost"):
            answers(engine)


@pytest.mark.slow
def test_rounded_weights_take_a_directory_alone() -> None:
    with llm(**{"model.quantization": "int8"}) as engine:
        before = answers(engine)
        with pytest.raises(ConfigError, match="kept as codes"):
            engine.update_weights(trainable()[1], version="one")
        engine.update_weights(FIXTURES / NAME, version="one")
        assert [one[0] for one in answers(engine)] == [one[0] for one in before]


def full() -> None:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.")


def test_a_device_that_is_given_back_and_taken_again() -> None:
    with llm() as engine:
        before = answers(engine)
        [stage] = engine._engine._runner._stages
        arrays = [*stage.weights, *jax.tree.leaves(stage.state)]
        updates: list[Update] = []
        engine._engine.submit(engine._engine.prepare(PROMPTS[0], SAMPLING), updates.append)
        engine.sleep()  # it has been taken, and ends before
        assert updates[-1].last and updates[-1].error is None
        assert all(array.is_deleted() for array in arrays)
        with pytest.raises(EngineStopped, match="sleeps"):
            engine.generate([{"prompt_token_ids": PROMPTS[0]}], SAMPLING, use_tqdm=False)
        with pytest.raises(InvalidRequest, match="sleeps already"):
            engine.sleep()
        with pytest.raises(InvalidRequest, match="give the weights to `wake_up`"):
            engine.update_weights(trainable()[1], version="one")
        with pytest.raises(InvalidRequest, match="no weights are given"):
            engine.wake_up(version="one")
        make_state, stage.make_state = stage.make_state, full
        with pytest.raises(CapacityError, match="no room for the weights and the pages .* and it sleeps on"):
            engine.wake_up()
        stage.make_state = make_state
        with pytest.raises(EngineStopped, match="sleeps"):
            engine.generate([{"prompt_token_ids": PROMPTS[0]}], SAMPLING, use_tqdm=False)
        engine.wake_up()
        assert [one[0] for one in answers(engine)] == [one[0] for one in before]
        engine.sleep(keep_weights=False)
        with pytest.raises(InvalidRequest, match="were dropped"):
            engine.wake_up()
        new = other(3)
        engine.wake_up(new, version="three")
        check(answers(engine), new, "three")
        with pytest.raises(InvalidRequest, match="does not sleep"):
            engine.wake_up()


@pytest.mark.slow
def test_a_store_has_the_pages_of_an_engine_that_slept_while_it_has_those_weights(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir(mode=0o700)
    store = {"store.kind": "file", "store.location": str(tmp_path / "pages"), "store.max_bytes": 1 << 28}
    with llm(**{"cache.host_bytes": 16 << 20, "store.wait_s": 60.0}, **store) as engine:
        loader = scheduler(engine._engine)._loader
        assert loader is not None
        always_loads(engine._engine)

        def ask() -> tuple[list[int], int]:
            """The answer, and how much of the prompt was found, once the store has all pages."""
            [output] = engine.generate([{"prompt_token_ids": PROMPTS[0] * 3}], SAMPLING, use_tqdm=False)
            while loader.writing or loader.unwritten:
                engine._engine.step()
            return output.outputs[0].token_ids, output.num_cached_tokens

        tokens, found = ask()
        assert found == 0
        engine.sleep()
        engine.wake_up()
        assert ask() == (tokens, 48)
        engine.sleep()
        engine.wake_up(other(1), version="one")
        again, found = ask()
        assert again != tokens and found == 0
        engine.update_weights(FIXTURES / NAME, version="as at the start")
        assert ask() == (tokens, 48)


@pytest.mark.slow
async def test_updates_under_streams_tear_nothing() -> None:
    """Each token has the log-probability of the version that its answer names for it, with the whole text before it.
    Under "finish" an answer has one version. Nothing is compiled after the first update."""
    versions = {f"v{number}": other(number) for number in range(5)}
    engine = AsyncLLM.from_config(None, {**SETTINGS, "cache.num_pages": 30}, progress=False)
    try:
        engine.wait_until_built()
        await engine.update_weights(versions["v0"], version="v0")  # compiles the copies of arrays
        compiles = engine._engine.stats[0].num_compiles
        found: list[tuple[list[int], list[Update]]] = []

        done = False

        async def stream(number: int) -> None:
            while not done:  # each update meets answers that it is in the middle of
                prompt = PROMPTS[number % len(PROMPTS)]
                sampling = SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True, logprobs=0, seed=number)
                found.append((prompt, [u async for u in engine.generate({"prompt_token_ids": prompt}, sampling)]))
                number += 6

        async def update() -> None:
            nonlocal done
            for number in range(1, 5):
                version, policy = f"v{number}", ("recompute", "finish")[number % 2]
                await asyncio.wait_for(
                    engine.update_weights(versions[version], version=version, policy=policy),  # type: ignore[arg-type]
                    300,
                )
            done = True

        await asyncio.gather(update(), *(stream(number) for number in range(6)))
        assert engine._engine.stats[0].num_compiles == compiles
    finally:
        await engine.shutdown(0.0)
    mixed = 0
    for prompt, updates in found:
        token_ids = [token for update in updates for token in update.token_ids]
        logprobs = [entry.logprob for update in updates for entry in update.logprobs or ()]
        assert len(token_ids) == 40 and updates[-1].last and updates[-1].error is None
        parts = updates[-1].weights
        assert parts[0].first_token == 0
        mixed += len(parts) > 1
        ends = [*(first for first, _ in parts[1:]), 40]
        for (first, version), end in zip(parts, ends, strict=True):
            right = wanted(versions[version], prompt, token_ids)[first:end]
            assert np.abs(right - logprobs[first:end]).max() < CLOSE
    assert mixed, "no answer met an update that it went on through"


async def test_requests_that_come_while_others_finish_wait_and_can_be_aborted() -> None:
    engine = AsyncLLM.from_config(None, SETTINGS, progress=False)
    long = SamplingParams(max_tokens=100, temperature=1.0, ignore_eos=True, seed=1)
    try:
        running = engine.generate({"prompt_token_ids": PROMPTS[0]}, long)
        first = await anext(running)
        change = asyncio.create_task(engine.update_weights(other(1), version="one", policy=Policy.FINISH.value))
        while not engine._engine._coming:
            await asyncio.sleep(0.001)
        waiting = engine.generate({"prompt_token_ids": PROMPTS[1]}, SAMPLING, request_id="waits")
        gone = engine.generate({"prompt_token_ids": PROMPTS[2]}, SAMPLING, request_id="goes")
        asked = [asyncio.create_task(anext(stream)) for stream in (waiting, gone)]
        await asyncio.sleep(0)
        engine.abort("goes")
        rest = [update async for update in running]
        assert not rest[-1].weights and len(first.token_ids) + sum(len(u.token_ids) for u in rest) == 100
        assert await asyncio.wait_for(change, 120) >= 0
        ended = [await asked[0], *[update async for update in waiting]]
        assert ended[-1].weights == ((0, "one"),)
        await asyncio.gather(asked[1], return_exceptions=True)
    finally:
        await engine.shutdown(0.0)


@pytest.mark.slow
async def test_a_replica_that_is_built_again_has_the_weights_of_the_update() -> None:
    loop = asyncio.get_running_loop()
    settings = {**SETTINGS, "parallel.data": 2, "watchdog.backoff_s": 0.01}
    engine = AsyncLLM.from_config(None, settings, progress=False)
    try:
        new = other(1)
        await engine.update_weights(new, version="one")
        dead = engine._engine.replicas[0]
        dead.interrupt(RuntimeError("the device has gone"))
        async with asyncio.timeout(120):
            while engine._engine.replicas[0] is dead or not engine._engine.replicas[0].accepting:
                await asyncio.sleep(0.01)
        for replica in engine._engine.replicas:  # each by itself
            request = replica.prepare({"prompt_token_ids": PROMPTS[0]}, SAMPLING)
            updates: list[Update] = []
            ended = asyncio.Event()

            def take(update: Update, updates: list[Update] = updates, ended: asyncio.Event = ended) -> None:
                updates.append(update)
                if update.last:
                    loop.call_soon_threadsafe(ended.set)

            replica.submit(request, take)
            await asyncio.wait_for(ended.wait(), 120)
            token_ids = [token for update in updates for token in update.token_ids]
            logprobs = [entry.logprob for update in updates for entry in update.logprobs or ()]
            check([(token_ids, np.asarray(logprobs), updates[-1].weights)], new, "one", PROMPTS[:1])
    finally:
        await engine.shutdown(0.0)
