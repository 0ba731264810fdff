"""`LLM`, `AsyncLLM` and the config with several replicas in one process, on the fake device."""

import asyncio

import pytest
from fake_parts import Fakes

from jaxserve import LLM, AsyncLLM, SamplingParams
from jaxserve.assemble import assemble
from jaxserve.config import load_config
from jaxserve.engine import Engine, EngineGroup
from jaxserve.errors import ConfigError, EngineStopped
from jaxserve.sched import ContinuousScheduler, SchedulerOptions
from jaxserve.sched.policies import FcfsPolicy
from jaxserve.testing import make_limits

FOUR = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(mode="context").install(monkeypatch.setattr)


def group_of(llm: LLM | AsyncLLM) -> EngineGroup:
    assert isinstance(llm._engine, EngineGroup)
    return llm._engine


def test_names_of_vllm_set_the_config(fakes: Fakes) -> None:
    LLM(data_parallel_size=2, tensor_parallel_size=3, pipeline_parallel_size=4)
    assert fakes.config is not None
    parallel = fakes.config.parallel
    assert (parallel.data, parallel.tensor, parallel.pipeline) == (2, 3, 4)


def test_one_replica_is_a_plain_engine(fakes: Fakes) -> None:
    assert type(LLM()._engine) is Engine


def test_answers_are_those_of_one_replica(fakes: Fakes) -> None:
    prompts = [f"prompt {i}" for i in range(30)]
    sampling = [SamplingParams(temperature=1.0, max_tokens=1 + i % 9) for i in range(30)]
    one = LLM().generate(prompts, sampling, use_tqdm=False)
    three = LLM(data_parallel_size=3)
    assert [o.outputs for o in three.generate(prompts, sampling, use_tqdm=False)] == [o.outputs for o in one]
    for replica in group_of(three).replicas:
        assert isinstance(replica._scheduler, ContinuousScheduler)
        assert replica._runner.num_steps > 1  # type: ignore[attr-defined]
        replica._scheduler.check()
        assert replica._scheduler.num_held_pages == 0


def test_a_batch_outlives_a_replica(fakes: Fakes) -> None:
    fakes.fail_at, fakes.fail_replica = (0, "dispatch"), 1
    prompts = [f"prompt {i}" for i in range(30)]
    llm = LLM(data_parallel_size=2)
    outputs = llm.generate(prompts, FOUR, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [4] * 30
    assert [replica.failure is None for replica in group_of(llm).replicas] == [True, False]
    assert len(llm.generate("again", FOUR, use_tqdm=False)) == 1


def test_a_batch_ends_with_the_last_replica(fakes: Fakes) -> None:
    fakes.fail_at = (1, "result")
    llm = LLM(data_parallel_size=2)
    with pytest.raises(EngineStopped, match="replica 0 has died: .*; replica 1 has died"):
        llm.generate(["a", "b", "c"], FOUR, use_tqdm=False)
    with pytest.raises(EngineStopped, match="takes no more requests"):
        llm.generate("a", FOUR, use_tqdm=False)


def test_streams(fakes: Fakes) -> None:
    async def main() -> list[int]:
        llm = AsyncLLM(data_parallel_size=2)

        async def one(number: int) -> int:
            return sum([len(u.token_ids) async for u in llm.generate(f"prompt {number}", FOUR)])

        try:
            return await asyncio.gather(*(one(i) for i in range(20)))
        finally:
            await llm.shutdown()
            assert group_of(llm).num_live == 0

    assert asyncio.run(asyncio.wait_for(main(), 120)) == [4] * 20


def test_a_scheduler_that_cannot_be_shared_is_refused_before_anything_is_loaded(fakes: Fakes) -> None:
    options = SchedulerOptions()
    policy = FcfsPolicy(options)
    for scheduler in (policy, ContinuousScheduler(make_limits(), policy, options)):
        with pytest.raises(ConfigError, match=r"is an object, a \w+, but parallel.data asks for 2 replicas"):
            LLM(data_parallel_size=2, scheduler=scheduler)
    assert fakes.config is None


def test_every_replica_gets_a_scheduler_of_its_own(fakes: Fakes) -> None:
    made = []

    def make(limits, options) -> ContinuousScheduler:
        made.append(ContinuousScheduler(limits, FcfsPolicy(options), options))
        return made[-1]

    for scheduler in ("priority", FcfsPolicy, make):
        llm = LLM(data_parallel_size=2, scheduler=scheduler)
        assert len({id(replica._scheduler) for replica in group_of(llm).replicas}) == 2
    assert len(made) == 2


def test_a_wrong_router_is_told_before_anything_is_loaded(fakes: Fakes) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'least_load'"):
        assemble(load_config(None, {"parallel.data": 2, "route.policy": "least_lod"}))
    assert fakes.config is None
