"""Fair shares between tenants: the Virtual Token Counter.

Owns one counter for each tenant. Refuses shares of rows or pages: what is fair is what a tenant gets over time, however
long its prompts and outputs are.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). A tenant is charged `input_weight` for a
token of a prompt, when the prompt gets its row, and `output_weight` for a token of output, when it is served. The next
row goes to the tenant of the smallest counter among those that wait. A tenant that comes back after a pause is lifted
to the smallest counter of those that wait, so that nobody saves up credit by staying away. The service of two tenants
that both wait all the time then differs by at most 2 * max(input_weight * L, output_weight * M): L is the longest
prompt, M how many tokens the sequences that run together have at their ends, and output_weight is not the smaller one.

Two cases the paper leaves open. Prompt tokens that the prefix cache has are free, since they cost the device nothing.
Computing a preempted sequence again is not charged, since its tenant did not ask for it.
"""

import collections
from collections.abc import Callable
from collections.abc import Sequence as Seq

from jaxserve.sched.lengths import LengthPredictor
from jaxserve.sched.memory import SequenceMemory
from jaxserve.sched.plan import StepPlan
from jaxserve.sched.policy import Policy
from jaxserve.sched.state import Sequence, SequenceState

_MAX_IDLE = 4096  # tenants without a request whose counters are remembered


class FairPolicy(Policy):
    """By the counter of the tenant (`Request.tenant`), then by arrival."""

    def bind(self, memory: SequenceMemory, lengths: LengthPredictor, clock: Callable[[], float]) -> None:
        """Begins with nobody known."""
        super().bind(memory, lengths, clock)
        self.counters: dict[str, float] = {}
        self._num_waiting: collections.Counter[str] = collections.Counter()
        self._num_live: collections.Counter[str] = collections.Counter()
        self._charged: set[Sequence] = set()  # live ones whose prompt has been paid
        self._last_run = ""
        self._tally: tuple[Seq[Sequence], dict[str, int]] = ((), {})

    def key(self, seq: Sequence, now_s: float) -> float:
        """Within a tenant: seconds of arrival."""
        return seq.request.arrival_s

    def line(self, seq: Sequence) -> str:
        """A line for each tenant."""
        return seq.request.tenant

    def line_key(self, line: str) -> float:
        """The counter."""
        return self.counters[line]

    def on_wait(self, seq: Sequence) -> None:
        """Lifts the counter of a tenant that had nobody waiting."""
        tenant = seq.request.tenant
        if seq.state is SequenceState.WAITING:
            self._num_live[tenant] += 1
        if not self._num_waiting[tenant]:
            waiting = [self.counters[name] for name in +self._num_waiting]
            floor = min(waiting) if waiting else self.counters.get(self._last_run, 0.0)
            self.counters[tenant] = max(self.counters.get(tenant, 0.0), floor)
        self._num_waiting[tenant] += 1

    def on_run(self, seq: Sequence) -> None:
        """Charges the prompt, once."""
        tenant = seq.request.tenant
        self._num_waiting[tenant] -= 1
        self._last_run = tenant
        if seq not in self._charged:
            self._charged.add(seq)
            self.counters[tenant] += self.options.input_weight * (seq.prompt_len - seq.num_cached)

    def on_served(self, plan: StepPlan, served: Seq[Sequence]) -> None:
        """Charges a token for each that goes on. In steady decode that is one addition for each tenant."""
        if self._tally[0] is not served:
            live = (seq.request.tenant for seq in served if seq.state is not SequenceState.FINISHED)
            self._tally = (served, collections.Counter(live))
        for tenant, num_tokens in self._tally[1].items():
            self.counters[tenant] += self.options.output_weight * num_tokens

    def on_end(self, seq: Sequence) -> None:
        """Forgets the sequence, and a tenant that has been away for long."""
        tenant = seq.request.tenant
        self._tally = ((), {})
        self._charged.discard(seq)
        if seq.state is not SequenceState.RUNNING:
            self._num_waiting[tenant] -= 1
        self._num_live[tenant] -= 1
        if not self._num_live[tenant]:
            del self._num_live[tenant], self._num_waiting[tenant]
            if len(self.counters) > len(self._num_live) + _MAX_IDLE:
                self._forget()

    def _forget(self) -> None:
        """Drops those without a request, but the last who ran: a newcomer is lifted to it."""
        kept = {*self._num_live, self._last_run}
        self.counters = {name: value for name, value in self.counters.items() if name in kept}
