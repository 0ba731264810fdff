"""The pace of a load and the lateness of the generator, with clients that need no network."""

import asyncio
import time

import numpy as np
import pytest

from jaxserve.lab.bench.lag import judge
from jaxserve.lab.bench.load import LoadResult, run_load
from jaxserve.lab.bench.recording import Recording, RequestFailed
from jaxserve.lab.workloads.metrics import compute_metrics
from jaxserve.lab.workloads.samples import Sample


class FakeClient:
    """Answers with one piece, after `answer_s`, and not before `together` requests have been open at once.

    `block_s` passes without giving way. Mutated by the loop's thread.
    """

    def __init__(self, answer_s: float = 0.0, block_s: float = 0.0, together: int = 1) -> None:
        self.answer_s = answer_s
        self.block_s = block_s
        self.together = together
        self.met = asyncio.Event()
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
        if self.open == self.together:
            self.met.set()
        try:
            await self.met.wait()
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
    client: FakeClient, asked: list[Sample], due_s: object = None, *, limit: int | None = None, timeout_s: float = 120.0
) -> LoadResult:
    due = np.zeros(len(asked)) if due_s is None else np.asarray(due_s, dtype=float)
    return await run_load(client, asked, due, max_concurrency=limit, timeout_s=timeout_s)


@pytest.mark.parametrize(("limit", "most"), [(None, 12), (1, 1), (3, 3), (50, 12)])
async def test_never_more_at_once_than_allowed(limit: int | None, most: int) -> None:
    client = FakeClient(together=most)
    result = await load(client, samples(*map(str, range(12))), limit=limit)
    assert client.most_open == most
    assert client.order == [str(i) for i in range(12)]
    assert all(outcome.failure is None for outcome in result.outcomes)


async def test_waiting_for_a_place_is_not_time_of_the_request() -> None:
    result = await load(FakeClient(answer_s=0.1), samples(*"abcd"), limit=1)
    starts = [outcome.start_s - result.start_s for outcome in result.outcomes]
    assert starts[3] >= 0.3
    assert result.outcomes[3].start_s >= result.outcomes[2].output_times_s[0]
    assert result.duration_s >= 0.4
    assert result.num_waited == 3


async def test_nothing_is_sent_before_it_is_due() -> None:
    due_s = [0.0, 0.05, 0.05, 0.2]
    result = await load(FakeClient(), samples(*"abcd"), due_s)
    starts = np.array([outcome.start_s - result.start_s for outcome in result.outcomes])
    assert (starts >= np.array(due_s) - 1e-4).all()


async def test_slow_answers_hold_up_no_request() -> None:
    client = FakeClient(together=10)  # all are sent before the first is answered
    result = await load(client, samples(*"abcdefghij"), np.arange(10) * 0.03)
    assert client.most_open == 10
    assert all(outcome.failure is None for outcome in result.outcomes)
    assert result.num_waited == 0


async def test_every_end_has_a_name() -> None:
    result = await load(FakeClient(), samples("ok", "fail", "silent"))
    assert [outcome.failure for outcome in result.outcomes] == [None, "refused", "no output"]
    metrics = compute_metrics(result.outcomes, result.duration_s, goodput=None, percentiles=())
    assert (metrics.completed, metrics.failed) == (1, 2)
    late = await load(FakeClient(), samples("hang"), timeout_s=0.2)
    assert [outcome.failure for outcome in late.outcomes] == ["timeout"]
    assert result.outcomes[0].prompt_tokens == 3


async def test_a_generator_that_blocks_is_found_out() -> None:
    busy = await load(FakeClient(block_s=0.1), samples(*"abcdef"), np.arange(6) * 0.05)
    assert busy.lag.loop_max_ms >= 80
    assert busy.lag.send_p99_ms >= 80
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
