"""The run of a load: each sample is sent when it is due, within a limit of concurrency, and all are waited for.

A failed request does not end a run: it becomes an outcome.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from jaxserve.lab.bench.lag import ClientLag, LagProbe
from jaxserve.lab.bench.recording import Recording, RequestFailed
from jaxserve.lab.workloads.outcome import Outcome
from jaxserve.lab.workloads.samples import Sample


class LoadClient(Protocol):
    """A client of one endpoint. Used on one event loop, by many tasks at once."""

    async def describe(self, timeout_s: float) -> dict[str, str]:
        """Model and version of the server, where it reports them. Raises ConfigError when it does not answer."""
        ...

    async def count_tokens(self, text: str, *, with_added: bool, timeout_s: float) -> int | None:
        """Tokens of a text as the server counts, with those it adds to a prompt of text; None when it cannot say."""
        ...

    async def send(self, sample: Sample, recording: Recording) -> None:
        """Sends a request and reads the whole answer. Raises RequestFailed."""
        ...

    async def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """Outcomes in the order of the samples.

    Attributes:
      start_s: of the run, on the clock of the outcomes.
      num_waited: requests that were due while `max_concurrency` were open, and left later.
    """

    outcomes: tuple[Outcome, ...]
    start_s: float
    duration_s: float
    num_waited: int
    lag: ClientLag


async def run_load(
    client: LoadClient,
    samples: Sequence[Sample],
    due_s: np.ndarray,
    *,
    max_concurrency: int | None,
    timeout_s: float,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> LoadResult:
    """Sends sample k `due_s[k]` seconds after the start, later where `max_concurrency` are open already.

    A request's own time begins when it is sent, not when it is due. `timeout_s` is for one request.
    """
    assert len(samples) == len(due_s), (len(samples), len(due_s))
    places = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else None
    num_waited = 0

    async def ask(sample: Sample) -> Outcome:
        nonlocal num_waited
        num_waited += places is not None and places.locked()
        async with places or contextlib.nullcontext():
            outcome = await _ask(client, sample, timeout_s)
        on_done(outcome)
        return outcome

    async with LagProbe() as probe, asyncio.TaskGroup() as group:
        start_s = time.perf_counter()
        tasks: list[asyncio.Task[Outcome]] = []
        for sample, due in zip(samples, due_s.tolist(), strict=True):
            wait_s = start_s + due - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            probe.send_delays_s.append(max(0.0, time.perf_counter() - start_s - due))
            tasks.append(group.create_task(ask(sample)))
        outcomes = tuple([await task for task in tasks])
        end_s = time.perf_counter()
        lag = probe.result()
    return LoadResult(outcomes=outcomes, start_s=start_s, duration_s=end_s - start_s, num_waited=num_waited, lag=lag)


async def _ask(client: LoadClient, sample: Sample, timeout_s: float) -> Outcome:
    recording = Recording()
    failed: RequestFailed | None = None
    try:
        async with asyncio.timeout(timeout_s):
            await client.send(sample, recording)
    except RequestFailed as error:
        failed = error
    except TimeoutError:
        failed = RequestFailed("timeout", f"no end after {timeout_s:g} s")
    return recording.finish(sample.prompt_len, sample.output_len, failed)
