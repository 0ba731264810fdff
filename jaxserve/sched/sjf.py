"""Shortest job first: the least work first, with ageing so that the long ones run too.

Owns the exchange rate between work and waiting. Refuses to guess lengths itself: `lengths` does, by what was asked for
or by what it has learned.

Work is counted in tokens: the prompt, and the output that is expected. `ageing_s` seconds of waiting are worth
`TOKENS_PER_LEVEL` tokens. As in `priority`, the part of the key that grows with time is the same for all, so the key is
computed once: a job of w tokens is overtaken only by those of w' < w tokens that arrive within (w - w') * ageing_s /
TOKENS_PER_LEVEL after it. That bound is the proof that it runs.
"""

from jaxserve.sched.policy import Policy
from jaxserve.sched.state import Sequence

TOKENS_PER_LEVEL = 256  # about the output of one turn of a chat


class SjfPolicy(Policy):
    """By expected work less age."""

    def key(self, seq: Sequence, now_s: float) -> float:
        """Seconds: the arrival, moved by what the work is worth. Counts what is left of one that was preempted."""
        work = seq.prompt_len + self.lengths.expected_len(seq) - seq.num_outputs
        return seq.request.arrival_s + work * self.options.ageing_s / TOKENS_PER_LEVEL
