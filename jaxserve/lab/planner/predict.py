"""The predicted time of a step: the roofline of `jaxserve.lab.roofline`, with the bytes of the compiled programs.

A compiled step stands for its neighbours that were not compiled, with the bytes that its program moves beyond the
least. The host adds nothing: a step is launched while the one before it runs.
"""

import dataclasses
import math
from collections.abc import Sequence

from jaxserve.lab.planner.report import Prediction, StepFacts
from jaxserve.lab.roofline import Assumptions, Work, roofline_seconds
from jaxserve.sched.plan import Limits
from jaxserve.values.chips import Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Everything a prediction needs beside the size of a step. `limits` are of each of `replicas`, side by side."""

    topology: Topology
    work: Work
    steps: Sequence[StepFacts]
    assumed: Assumptions
    dtype: str
    limits: Limits
    replicas: int

    def decode(self, rows: int, context: int, width: int = 1) -> Prediction:
        """A round in which each of `rows` rows feeds `width` tokens: its last one, and drafts."""
        tokens = rows * width
        return self._predict(tokens=tokens, rows=rows, context=context, pairs=tokens * context, width=width)

    def prefill(self, tokens: int) -> Prediction:
        """A prompt of `tokens` tokens, alone, in one step."""
        return self._predict(tokens=tokens, rows=1, context=tokens, pairs=tokens * (tokens + 1) / 2, width=0)

    def _predict(self, *, tokens: int, rows: int, context: int, pairs: float, width: int) -> Prediction:
        """`width`: tokens of each row of a decode step; 0: of a prompt."""
        decode, lines = width > 0, rows * max(1, width)  # of logits
        near = self._nearest(tokens, width)
        flops = self.work.flops(tokens, lines, pairs)
        moved = self.work.cache_bytes(tokens, rows, context) + (
            self._other_bytes(tokens, lines, near if decode else None)
        )
        # Exchanges per layer are alike in all buckets; their bytes grow with the tokens.
        growth = tokens / near.tokens if near is not None else 1.0
        sent = sum(c.sent_bytes for c in near.collectives) * growth if near is not None else 0.0
        number = sum(c.count for c in near.collectives) if near is not None else 0
        seconds = roofline_seconds(
            self.topology,
            self.assumed,
            self.dtype,
            flops=flops,
            moved_bytes=moved,
            collectives=number,
            sent_bytes=sent,
            group=max((c.group for c in near.collectives), default=1) if near is not None else 1,
        )
        return Prediction(
            decode=decode,
            tokens=tokens,
            rows=rows,
            context=context,
            flops=flops,
            moved_bytes=moved,
            sent_bytes=sent,
            memory_seconds=seconds.memory,
            compute_seconds=seconds.compute,
            collective_seconds=seconds.collective,
            seconds=seconds.total,
            tokens_per_second=self.replicas * tokens / seconds.total,
            fits_pages=rows * self.limits.pages_of(context) <= self.limits.num_pages,
            compiled=near is not None
            and (near.tokens, near.decode_only, near.width) == (tokens, decode, max(1, width)),
            width=max(1, width),
        )

    def _nearest(self, tokens: int, width: int) -> StepFacts | None:
        kind = [step for step in self.steps if step.decode_only == (width > 0)]
        same = [step for step in kind if step.width == max(1, width)] or kind
        # Either kind of step exchanges the same arrays in every layer.
        return min(same or self.steps, key=lambda step: abs(math.log(step.tokens / tokens)), default=None)

    def _other_bytes(self, tokens: int, lines: int, near: StepFacts | None) -> float:
        """Bytes outside of kernels: the least, times the factor of the compiled program, and sampling by the line.

        Without kernels the bytes of attention cannot be told apart in a program: then the least is used.
        """
        least = self.work.other_bytes(tokens, lines)
        if near is None or not near.kernels or not near.decode_only:
            return least
        near_lines = near.rows * near.width
        added = (near.moved_bytes - near.sampling_bytes) / self.work.other_bytes(near.tokens, near_lines)
        # Weights small enough to stay in a TPU's fast memory are counted as never read; no step is planned with that.
        return least * max(1.0, added) + near.sampling_bytes * lines / near_lines
