"""The engine's deployment without a cluster: the class that Ray makes, on the real engine with a fake runner."""

import asyncio
import contextlib
import types
from collections.abc import Iterator

import pytest

pytest.importorskip("ray.serve", reason="the extra `ray` is not installed")

from jaxserve.api import SamplingParams
from jaxserve.config import load_config
from jaxserve.engine import Engine, ModelInfo
from jaxserve.errors import EngineStopped, Status
from jaxserve.fleet import ray_engine
from jaxserve.fleet.messages import Accepted, Refusal
from jaxserve.fleet.ray_engine import EngineReplica
from jaxserve.sched import create_scheduler
from jaxserve.serve.convert import request_to_proto
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.testing import ByteTokenizer, FakeRunner, make_limits

GREEDY = SamplingParams(temperature=0.0, max_tokens=5)


class Breakable(FakeRunner):
    """Loses its device when told to."""

    broken = False

    def dispatch(self, plan):  # type: ignore[no-untyped-def]
        if self.broken:
            raise RuntimeError("the device is lost")
        return super().dispatch(plan)


@pytest.fixture
def runner() -> Breakable:
    limits = make_limits(max_rows=4, num_pages=64, page_size=8, max_model_len=256, token_buckets=(16, 64))
    return Breakable(limits, vocab_size=128, mode="count", keep_plans=False)


@pytest.fixture
def settings() -> dict[str, object]:
    return {}


@pytest.fixture
def replica(runner: Breakable, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineReplica]:
    def assemble(_: object) -> types.SimpleNamespace:
        model = ModelInfo(name="fake", vocab_size=259, max_model_len=256, eos_token_ids=(257,))
        scheduler = create_scheduler("fcfs", runner.limits)
        engine = Engine(runner=runner, scheduler=scheduler, tokenizer=ByteTokenizer(), model=model)
        return types.SimpleNamespace(engine=engine, pages=None)

    context = types.SimpleNamespace(replica_id=types.SimpleNamespace(unique_id="r1"))
    monkeypatch.setattr(ray_engine.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(ray_engine, "assemble", assemble)
    monkeypatch.setattr(ray_engine, "set_up_logging", lambda level: None)
    made = EngineReplica(load_config(None, settings))
    try:
        yield made
    finally:
        made.__del__()


async def _items(replica: EngineReplica, prompt: str, sampling: SamplingParams = GREEDY) -> list[object]:
    message = request_to_proto(prompt, sampling).SerializeToString()
    return [item async for item in replica.generate(message, prompt_key=(), avoid=())]


async def test_the_stream_is_the_messages_of_a_single_server(replica: EngineReplica) -> None:
    first, *rest = await _items(replica, "a")
    assert first == Accepted(replica="r1")
    replies = [pb.GenerateResponse.FromString(item) for item in rest if isinstance(item, bytes)]
    assert len(replies) == len(rest)
    assert "".join(reply.text for reply in replies) == "bcdef"
    assert replies[-1].usage.num_generated_tokens == 5


async def test_a_request_that_cannot_be_is_refused_as_a_value(replica: EngineReplica) -> None:
    refusal = (await _items(replica, "a" * 300))[-1]
    assert isinstance(refusal, Refusal)
    assert refusal.status is Status.INVALID
    assert "raise model.max_len" in refusal.text


@pytest.mark.parametrize("settings", [{"serve.tenants": {"default": {"concurrent_tokens": 20}}}])
async def test_a_tenant_beyond_its_limits_is_refused_as_a_value(replica: EngineReplica) -> None:
    assert not [item for item in await _items(replica, "a") if isinstance(item, Refusal)]
    refusal = (await _items(replica, "a", SamplingParams(temperature=0.0, max_tokens=50)))[-1]
    assert isinstance(refusal, Refusal) and "concurrent_tokens" in refusal.text


async def test_a_client_that_leaves_frees_the_engine(replica: EngineReplica) -> None:
    message = request_to_proto("a", SamplingParams(temperature=0.0, max_tokens=200)).SerializeToString()
    async with contextlib.aclosing(replica.generate(message, prompt_key=(), avoid=())) as items:
        await anext(items)
        await anext(items)
    for _ in range(12_000):
        if not replica._engine.num_live:
            break
        await asyncio.sleep(0.01)
    assert not replica._engine.num_live


async def test_a_dead_engine_is_unavailable_and_unhealthy(replica: EngineReplica, runner: Breakable) -> None:
    await replica.check_health()
    assert await replica.is_alive()
    runner.broken = True
    refusal = (await _items(replica, "a"))[-1]
    assert isinstance(refusal, Refusal)
    assert refusal.status is Status.UNAVAILABLE
    assert not await replica.is_alive()
    with pytest.raises(EngineStopped, match="device is lost"):
        await replica.check_health()


async def test_questions_are_answered_as_by_a_single_server(replica: EngineReplica) -> None:
    asked = pb.TokenizeRequest(text="ab").SerializeToString()
    answer = await replica.answer("Tokenize", asked)
    assert isinstance(answer, bytes)
    assert list(pb.TokenizeResponse.FromString(answer).token_ids) == [256, 97, 98]
    refusal = await replica.answer("Detokenize", pb.DetokenizeRequest(token_ids=[-1]).SerializeToString())
    assert isinstance(refusal, Refusal)
    assert (refusal.status, "outside the vocabulary" in refusal.text) == (Status.INVALID, True)


async def test_ray_may_end_it_twice(replica: EngineReplica) -> None:
    replica.__del__()
    replica.__del__()
    assert not await replica.is_alive()
