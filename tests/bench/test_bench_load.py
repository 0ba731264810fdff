"""The pace of a load and the lateness of the generator, with clients that need no network."""

import asyncio
import time

import numpy as np
import pytest

from jaxserve.bench.lag import judge
from jaxserve.bench.load import LoadResult, run_load
from jaxserve.bench.recording import Recording, RequestFailed
from jaxserve.workloads.metrics import compute_metrics
from jaxserve.workloads.samples import Sample


class FakeClient:
    """Answers after `answer_s`, with one piece; `block_s` of it without giving way. Mutated by the loop's thread."""

    def __init__(self, answer_s: float = 0.0, block_s: float = 0.0) -> None:
        self.answer_s = answer_s
        self.block_s = block_s
        self.open = 0
        self.most_open = 0
        self.order: list[str] = []

    async def describe(self, timeout_s: float) -> dict[str, str]:
        return {"model": "fake"}

    async def count_tokens(self, text: str, *, with_added: bool, timeout_s: float) -> int | None:
        return None

    async def send(self, sample: Sample, recording: Recording) -> None:
        recording.start()
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        self.order.append(str(sample.prompt))
        try:
            if sample.prompt == "fail":
                raise RequestFailed("refused", "by the test")
            await asyncio.sleep(3600 if sample.prompt == "hang" else self.answer_s)
            time.sleep(self.block_s)
            if sample.prompt != "silent":
                recording.output_times_s.append(time.perf_counter())
                recording.output_tokens = 1
        finally:
            self.open -= 1

    async def close(self) -> None:
        return


def samples(*prompts: str) -> list[Sample]:
    return [Sample(prompt=prompt, prompt_len=3, output_len=1) for prompt in prompts]


async def load(
    client: FakeClient, asked: list[Sample], due_s: object = None, *, limit: int | None = None, timeout_s: float = 30.0
) -> LoadResult:
    due = np.zeros(len(asked)) if due_s is None else np.asarray(due_s, dtype=float)
    return await run_load(client, asked, due, max_concurrency=limit, timeout_s=timeout_s)


@pytest.mark.parametrize(("limit", "most"), [(None, 12), (1, 1), (3, 3), (50, 12)])
async def test_never_more_at_once_than_allowed(limit: int | None, most: int) -> None:
    client = FakeClient(answer_s=0.02)
    result = await load(client, samples(*map(str, range(12))), limit=limit)
    assert client.most_open == most
    assert client.order == [str(i) for i in range(12)]
    assert all(outcome.failure is None for outcome in result.outcomes)


async def test_waiting_for_a_place_is_not_time_of_the_request() -> None:
    result = await load(FakeClient(answer_s=0.1), samples(*"abcd"), limit=1)
    starts = [outcome.start_s - result.start_s for outcome in result.outcomes]
    assert starts[3] >= 0.3
    assert result.outcomes[3].output_times_s[0] - result.outcomes[3].start_s < 0.25
    assert result.duration_s >= 0.4
    assert result.num_waited == 3


async def test_nothing_is_sent_before_it_is_due() -> None:
    due_s = [0.0, 0.05, 0.05, 0.2]
    result = await load(FakeClient(), samples(*"abcd"), due_s)
    starts = np.array([outcome.start_s - result.start_s for outcome in result.outcomes])
    assert (starts >= np.array(due_s) - 1e-4).all()
    assert (starts - due_s).max() * 1e3 < result.lag.send_p99_ms + result.lag.loop_max_ms + 50


async def test_slow_answers_hold_up_no_request() -> None:
    due_s = np.arange(10) * 0.03
    client = FakeClient(answer_s=0.5)
    result = await load(client, samples(*"abcdefghij"), due_s)
    late_s = np.array([outcome.start_s - result.start_s for outcome in result.outcomes]) - due_s
    assert late_s.max() * 1e3 < result.lag.send_p99_ms + result.lag.loop_max_ms + 50
    assert client.most_open == 10  # all were sent before the first was answered
    assert result.num_waited == 0


async def test_every_end_has_a_name() -> None:
    result = await load(FakeClient(), samples("ok", "fail", "hang", "silent"), timeout_s=0.2)
    assert [outcome.failure for outcome in result.outcomes] == [None, "refused", "timeout", "no output"]
    metrics = compute_metrics(result.outcomes, result.duration_s, goodput=None, percentiles=())
    assert (metrics.completed, metrics.failed) == (1, 3)
    assert result.outcomes[0].prompt_tokens == 3


async def test_a_generator_that_blocks_is_found_out() -> None:
    calm = await load(FakeClient(answer_s=0.05), samples(*"abcdef"), np.arange(6) * 0.05)
    busy = await load(FakeClient(block_s=0.1), samples(*"abcdef"), np.arange(6) * 0.05)
    assert busy.lag.loop_max_ms >= 80
    assert busy.lag.send_p99_ms >= 80
    assert calm.lag.cpu_share < 0.8
    metrics = compute_metrics(busy.outcomes, busy.duration_s, goodput=None, percentiles=())
    assert any("less even" in warning for warning in judge(busy.lag, metrics))
    assert any("event loop" in warning for warning in judge(busy.lag, metrics))


async def test_a_defect_of_a_client_ends_the_run() -> None:
    class Broken(FakeClient):
        async def send(self, sample: Sample, recording: Recording) -> None:
            raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        await load(Broken(), samples("a"))
    assert isinstance(caught.value.exceptions[0], ZeroDivisionError)
