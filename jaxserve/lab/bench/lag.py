"""The lateness of the generator itself, and the judgement whether it could have distorted the results.

Nothing is corrected. Each reported time was taken when the event loop got to it, so it is late by the delay that is
measured here.
"""

import asyncio
import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from jaxserve.lab.workloads.metrics import Metrics

_PERIOD_S = 0.01
_MIN_LAG_MS = 2.0  # timers of event loops are no finer than one millisecond
_MAX_LAG_SHARE = 0.1  # of the median time per token
_MAX_CPU_SHARE = 0.8
_MAX_SEND_DELAY_MS = 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClientLag:
    """Delays, in milliseconds.

    Attributes:
      loop_p50_ms, loop_p99_ms, loop_max_ms: by how much a timer of the event loop was late, every 10 ms.
      send_p99_ms: by how much requests left later than planned; waiting for the limit of concurrency does not count.
      cpu_share: of one core, used by the generator's thread.
      loop: which event loop.
    """

    loop_p50_ms: float
    loop_p99_ms: float
    loop_max_ms: float
    send_p99_ms: float
    cpu_share: float
    loop: str


class LagProbe:
    """Measures while it is open; used on the event loop that it measures. Mutated by that loop's thread."""

    def __init__(self) -> None:
        self.send_delays_s: list[float] = []
        self._late_s: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._start_s = self._start_cpu_s = 0.0

    async def __aenter__(self) -> "LagProbe":
        self._start_s, self._start_cpu_s = time.perf_counter(), time.thread_time()
        self._task = asyncio.create_task(self._measure())
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._task is not None, "left without having been entered"
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _measure(self) -> None:
        while True:
            due_s = time.perf_counter() + _PERIOD_S
            await asyncio.sleep(_PERIOD_S)
            self._late_s.append(max(0.0, time.perf_counter() - due_s))

    def result(self) -> ClientLag:
        """The delays so far."""
        late_ms = np.asarray(self._late_s or [0.0]) * 1e3
        wall_s = max(time.perf_counter() - self._start_s, 1e-9)
        return ClientLag(
            loop_p50_ms=float(np.percentile(late_ms, 50)),
            loop_p99_ms=float(np.percentile(late_ms, 99)),
            loop_max_ms=float(late_ms.max()),
            send_p99_ms=float(np.percentile(np.asarray(self.send_delays_s or [0.0]) * 1e3, 99)),
            cpu_share=(time.thread_time() - self._start_cpu_s) / wall_s,
            loop=type(asyncio.get_running_loop()).__module__.partition(".")[0],
        )


def judge(lag: ClientLag, metrics: Metrics) -> list[str]:
    """Warnings for a reader of the figures; empty when the generator was quick enough."""
    warnings: Sequence[tuple[bool, str]] = (
        (
            lag.loop_p99_ms > max(_MIN_LAG_MS, _MAX_LAG_SHARE * (metrics.tpot_ms.median or 0.0)),
            f"the generator's event loop was {lag.loop_p99_ms:.1f} ms late at p99, much beside a median TPOT of "
            f"{metrics.tpot_ms.median or 0.0:.1f} ms: times are too long by up to that",
        ),
        (
            lag.cpu_share > _MAX_CPU_SHARE,
            f"the generator used {lag.cpu_share:.0%} of a core: it is the bottleneck; spread the load over several",
        ),
        (
            lag.send_p99_ms > _MAX_SEND_DELAY_MS,
            f"requests left {lag.send_p99_ms:.1f} ms late at p99: the load was less even than asked for",
        ),
    )
    return [text for holds, text in warnings if holds]
