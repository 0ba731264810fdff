"""What a burst left on the device, and how log-probabilities are read from there.

Owns the order of tokens in the result of a burst, which is that of `StepResult`. Refuses to launch.
"""

import jax
import numpy as np

from jaxserve.api import TokenLogprobs
from jaxserve.runtime.burst import BurstOutput
from jaxserve.runtime.sampling import Logprobs
from jaxserve.sched.plan import StepResult


class BurstInFlight:
    """A launched burst. `result` may be called once."""

    __slots__ = ("_num_rows", "_num_tops", "_output")

    def __init__(self, output: BurstOutput, num_rows: int, num_tops: tuple[int | None, ...]) -> None:
        """`num_rows`: without padding. `num_tops`: alternatives that each row asked for; empty when nobody did."""
        self._output = output
        self._num_rows = num_rows
        self._num_tops = num_tops
        output.drawn.copy_to_host_async()  # on its way while the host plans the next step

    def result(self) -> StepResult:
        """Waits for the burst and reads what was asked for."""
        drawn = np.asarray(self._output.drawn)[:, : self._num_rows]  # [K + 1, R]
        counts = drawn[-1]
        taken = np.arange(len(drawn) - 1)[:, None] < counts  # [K, R]
        logprobs = None
        if any(num_top is not None for num_top in self._num_tops):
            logprobs = self._read_logprobs(drawn, taken)
        return StepResult(token_ids=drawn[:-1][taken].tolist(), logprobs=logprobs, counts=counts.tolist())

    def _read_logprobs(self, drawn: np.ndarray, taken: np.ndarray) -> list[TokenLogprobs | None]:
        found = to_host(self._output.logprobs, slice(None))
        entries: list[TokenLogprobs | None] = []
        for step, row in zip(*np.nonzero(taken), strict=True):
            num_top = self._num_tops[row]
            of_step = jax.tree.map(lambda a, step=step: a[step], found)
            entries.append(None if num_top is None else read_entry(of_step, row, int(drawn[step, row]), num_top))
        return entries


def to_host(logprobs: Logprobs, where: slice) -> Logprobs:
    """The lines of `where`, as numpy."""
    return jax.tree.map(lambda a: np.asarray(a)[where], logprobs)


def read_entry(logprobs: Logprobs, i: int, token_id: int, num_top: int) -> TokenLogprobs:
    """Line `i` as clients see it."""
    return TokenLogprobs(
        token_id,
        float(logprobs.logprob[i]),
        int(logprobs.rank[i]),
        tuple(logprobs.top_ids[i, :num_top].tolist()),
        tuple(logprobs.top_logprobs[i, :num_top].tolist()),
    )
