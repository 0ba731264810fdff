"""Nothing that a client can send is answered with a defect, and the service is as it was afterwards."""

import asyncio
import collections
import logging

import grpc
import pytest
from google.protobuf.unknown_fields import UnknownFieldSet
from proto_fuzz import METHODS, Fuzzed, fuzzed_messages, parsing_messages
from serve_parts import WAIT_S, connect, serve_bytes, served, wait_until

from jaxserve.api import SamplingParams

ANSWERS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,  # of messages that name a model
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,  # of messages that set timeout_s to next to nothing
}
AT_ONCE = 64


@pytest.mark.parametrize("count", [300, pytest.param(3_000, marks=pytest.mark.slow)])
def test_fuzzed_messages_get_typed_answers(count: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "jaxserve")
    _check_answers(fuzzed_messages(count, seed=count), caplog, least_good=0.05, least_bad=0.25)


@pytest.mark.parametrize("count", [300, pytest.param(2_000, marks=pytest.mark.slow)])
def test_messages_that_parse_get_through(count: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "jaxserve")
    messages = parsing_messages(count, seed=count)
    for message in messages:
        read = METHODS[message.method].FromString(message.body)
        assert len(UnknownFieldSet(read)) == 0
    _check_answers(messages, caplog, least_good=0.5, least_bad=0.1)


def _check_answers(
    messages: list[Fuzzed], caplog: pytest.LogCaptureFixture, least_good: float, least_bad: float
) -> None:
    """Sends them. `least_good` and `least_bad`: shares of them that must at least be answered and refused."""
    with served(serve_bytes(mode="context", vocab_size=259, max_model_len=64)) as server:
        codes = asyncio.run(asyncio.wait_for(_send(server.address, messages), 10 * WAIT_S))
        wrong = {m: c for m, c in zip(messages, codes, strict=True) if c not in ANSWERS}
        assert not wrong
        counts = collections.Counter(codes)
        assert counts[grpc.StatusCode.OK] > least_good * len(messages), f"more must get through the checks: {counts}"
        assert counts[grpc.StatusCode.INVALID_ARGUMENT] > least_bad * len(messages), counts
        assert not [r.getMessage() for r in caplog.records if r.name.startswith("jaxserve")]
        wait_until(lambda: not server.scheduler.has_work(), "all have ended")
        server.scheduler.check()
        assert server.scheduler.num_held_pages == server.engine.num_live == server.engine.num_unstarted == 0
        assert server.engine.failure is None
        with connect(server) as client:
            assert client.is_serving(timeout_s=WAIT_S)
            sampling = SamplingParams(temperature=0.0, max_tokens=5, seed=1)
            first = client.complete([1, 2], sampling, timeout_s=WAIT_S)
            assert (
                first.outputs[0].token_ids == client.complete([1, 2], sampling, timeout_s=WAIT_S).outputs[0].token_ids
            )


async def _send(address: str, messages: list[Fuzzed]) -> list[grpc.StatusCode]:
    gate = asyncio.Semaphore(AT_ONCE)
    async with grpc.aio.insecure_channel(address) as channel:

        async def send(message: Fuzzed) -> grpc.StatusCode:
            async with gate:
                path = f"/jaxserve.v1.Inference/{message.method}"
                try:
                    if message.method == "Generate":
                        async for _ in channel.unary_stream(path)(message.body, timeout=WAIT_S):
                            pass
                    else:
                        await channel.unary_unary(path)(message.body, timeout=WAIT_S)
                except grpc.aio.AioRpcError as error:
                    return error.code()
                return grpc.StatusCode.OK

        return await asyncio.gather(*map(send, messages))
