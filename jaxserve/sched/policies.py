"""The built-in policies: the order of sequences, the choice of victims, the share of a step that prompts may have.

    fcfs        by arrival, and by nothing else: free of starvation, and the default
    priority    the smaller `Request.priority`, with ageing
    preemptive  the same, but a newcomer of a better class takes the row and the pages of a worse one
    sjf         the least work first, with ageing
    fair        shares of the tokens between owners by their weights, then between the tenants of each
    slo         deadlines of the first token and of those after it

Each is a `Policy`: its order is the key, and the docstring says why no sequence waits for ever. The mechanism that asks
them is `core`.
"""

import collections
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from jaxserve.sched.accounts import Accounts
from jaxserve.sched.lengths import LengthPredictor
from jaxserve.sched.memory import SequenceMemory
from jaxserve.sched.plan import StepPlan
from jaxserve.sched.policy import Policy
from jaxserve.sched.state import Sequence, SequenceState


class FcfsPolicy(Policy):
    """By arrival time; see `Request.order_s`, as in all policies."""

    def key(self, seq: Sequence, now_s: float) -> float:
        """Monotonic seconds of arrival."""
        return seq.request.order_s


class PriorityPolicy(Policy):
    """By priority less age.

    It needs no clock: at time t a sequence stands at level `priority - (t - arrival) / ageing_s`. The part with t is
    the same for all, so the order between two of them never changes, and comparing `priority * ageing_s + arrival`
    gives it: a key that is computed once.

    A request of level p is overtaken only by those of better levels that arrive within (p - their level) * ageing_s
    after it. That bound is the proof that it runs.
    """

    uses_priority = True

    def key(self, seq: Sequence, now_s: float) -> float:
        """Seconds: the arrival, moved by the worth of the priority."""
        return seq.request.priority * self.options.ageing_s + seq.request.order_s


class PreemptivePolicy(PriorityPolicy):
    """`priority`, with preemption at admission.

    No work is lost: the victim's tokens stay, and are computed again when it gets a row, so its output is what it would
    have been.

    The order is that of `priority`, ageing included, and it never changes between two sequences. A victim must be of a
    worse class and stand behind in that order too. So no preemption goes in a circle, and a sequence that has waited or
    run
    long enough is safe: after (p - q) * ageing_s, a sequence of class p no longer gives way to a newcomer of class q.

    Of the possible victims the one that is cheapest to compute again is taken: its tokens, less those that the prefix
    cache keeps. Pages that it shares with others cost nothing, and free nothing.
    """

    preemptive = True

    def victim_for_page(self, seq: Sequence, behind: Seq[Sequence]) -> Sequence | None:
        """The cheapest sequence that has a page to give."""
        giving = [other for other in behind if self.memory.num_own(other) > 0]
        return self._cheapest(giving, 1) if giving else behind[-1]

    def victim_for_admission(self, seq: Sequence, running: Seq[Sequence]) -> Sequence | None:
        """The cheapest sequence of a worse class that stands behind; None when all of them together are not enough."""
        key = self.key(seq, 0.0)
        worse = [
            other for other in running if other.request.priority > seq.request.priority and self.key(other, 0.0) > key
        ]
        num_missing = self.memory.num_missing(seq)
        if num_missing == 0:
            return self._cheapest(worse, len(seq.tokens) // self.memory.page_size) if worse else None
        if sum(self.memory.num_own(other) for other in worse) < num_missing:
            return None
        return self._cheapest([other for other in worse if self.memory.num_own(other) > 0], num_missing)

    def _cheapest(self, among: Seq[Sequence], num_wanted: int) -> Sequence:
        """Of the sequences with the fewest tokens to compute again, the last in order."""
        return min(reversed(among), key=lambda other: self.memory.refill_cost(other, num_wanted))


TOKENS_PER_LEVEL = 256  # about the output of one turn of a chat


class SjfPolicy(Policy):
    """By expected work less age.

    Work is counted in tokens: the prompt, and the output that is expected (`lengths` predicts it, from the limit of
    the request or from past outputs). `ageing_s` seconds of waiting are worth `TOKENS_PER_LEVEL` tokens. As in
    `priority`, the
    part of the key that grows with time is the same for all, so the key is computed once: a job of w tokens is
    overtaken only by those of w' < w tokens that arrive within (w - w') * ageing_s / TOKENS_PER_LEVEL after it. That
    bound is the proof that it runs.
    """

    def key(self, seq: Sequence, now_s: float) -> float:
        """Seconds: the arrival, moved by the worth of the work: of a preempted sequence, of the work that is left."""
        work = seq.prompt_len + self.lengths.expected_len(seq) - seq.num_outputs
        return seq.request.order_s + work * self.options.ageing_s / TOKENS_PER_LEVEL


_MAX_IDLE = 4096  # tenants without a request whose counters are remembered

_LOOKS = 16  # times that owners are compared, at most, while they are charged `preempt_lag`

Line = tuple[str, str]  # owner and tenant


class FairPolicy(PriorityPolicy):
    """By the counter of the owner (`Request.owner`), of the tenant within it, then by priority less age.

    The Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), twice: tokens
    are shared between owners, in proportion to their weights, and what an owner gets between its tenants. Fairness is
    about the tokens that a name gets over time, of long or short requests, and not about rows or pages. A name
    is charged `input_weight` for a token of a prompt, when the prompt gets its row, and `output_weight` for a token of
    output, when it is served; an owner, that divided by its weight. The next row goes to the owner of the smallest
    counter among those that wait, and there to the tenant of the smallest one. A name
    that comes back after a pause is lifted to the smallest counter of those that wait, so that no name saves up
    credit by staying away. The service of two tenants of an owner that both wait all the time then differs by at most
    2 * max(input_weight * L, output_weight * M): L is the longest prompt, M how many tokens the sequences that run
    together have at their ends, and output_weight is not the smaller one. The same holds for two owners of weight 1.

    Two cases the paper leaves open. Prompt tokens that the prefix cache has are free, since they cost the device
    nothing. Computing a preempted sequence again is not charged, since its tenant did not ask for it.

    Rows are given back early, too, so that nobody waits for the end of another owner's long answers. Where the first
    in the queue finds no row or no pages, a sequence of the owner that is furthest ahead gives way, if this owner

      * would still be ahead by more than `preempt_lag` once the newcomer's prompt is charged, and
      * has more rows for its weight than the owner of the newcomer.

    Rows come back only to an owner that has fallen behind, so between two owners a preemption is followed by the next
    one only after their counters have moved by `preempt_lag` against each other. A sequence that gave way has generated
    `preempt_after` tokens since it got its row, so each of them comes to its end. Tenants of an owner never preempt.

    The tokens of a step for prompts are shared between owners, too (`prefill_parts`).
    """

    def bind(self, memory: SequenceMemory, lengths: LengthPredictor, clock: Callable[[], float]) -> None:
        """Begins without a known owner."""
        super().bind(memory, lengths, clock)
        self.owners = Accounts()
        self.tenants: dict[str, Accounts] = {}  # of each owner that has a counter
        self._num_idle = 0  # tenants that are remembered without a request, of all owners
        self._charged: set[Sequence] = set()  # live ones whose prompt has been paid
        self._bill = _NO_BILL
        self._num_rows: dict[str, int] = {}  # by owner; an owner without any is not there
        self._weights: dict[str, float] = {}  # of the owners of live requests, as their latest said
        self._entered: dict[Sequence, int] = {}  # running sequences, and their outputs when they got their rows
        self._charges = 0.0  # of all owners, ever
        self._next_look = 0.0  # while the charges are less, nobody can have fallen too far behind

    def line(self, seq: Sequence) -> Line:
        """A line for each tenant of each owner."""
        return (seq.request.owner, seq.request.tenant)

    def line_key(self, line: Line) -> tuple[float, int, float]:
        """The counters of the owner and of the tenant. Between equal owners no key of a sequence decides."""
        owner, tenant = line
        owners = self.owners
        return (owners.counters[owner], owners.places[owner], self.tenants[owner].counters[tenant])

    def may_preempt(self) -> bool:
        """Whether an owner that waits has fallen behind another by more than `preempt_lag`.

        The owners are looked at only when enough has been charged since the last look that it may have come to that.
        """
        if self._charges < self._next_look:
            return False
        counters = self.owners.counters
        behind = min(self.owners.num_waiting, key=counters.__getitem__, default=None)
        return behind is not None and bool(self._leading(behind, counters[behind]))

    def victim_for_admission(self, seq: Sequence, running: Seq[Sequence]) -> Sequence | None:
        """The last sequence of the owner that is furthest ahead; None where those that may give way are not enough."""
        owner = seq.request.owner
        unpaid = 0 if seq in self._charged else seq.prompt_len
        paid = self.owners.counters[owner] + self.options.input_weight * unpaid / seq.request.owner_weight
        leading = self._leading(owner, paid)
        if not leading:
            return None
        num_missing = self.memory.num_missing(seq)
        giving: list[Sequence] = []
        for other in reversed(running):
            name = other.request.owner
            if leading.get(name, 0) > 0 and other.num_outputs - self._entered[other] >= self.options.preempt_after:
                if num_missing == 0:
                    return other
                if self.memory.num_own(other) > 0:
                    leading[name] -= 1
                    giving.append(other)
        if giving and sum(map(self.memory.num_own, giving)) >= num_missing:
            return giving[0]
        self._next_look = self._charges + self.options.preempt_lag / _LOOKS
        return None

    def prefill_parts(self, begun: Seq[Sequence], room: int, may_enter: bool) -> Seq[int] | None:
        """Shares the prompt tokens of a step by weight between the owners that have a prompt there, or have one that
        waits and is not ahead of them all. Else a long prompt of one owner keeps others out until it ends.
        """
        counters, weights = self.owners.counters, self._weights
        owners = {seq.request.owner for seq in begun}
        if may_enter:
            most = max(map(counters.__getitem__, owners))
            owners.update([name for name in self.owners.num_waiting if counters[name] <= most])
        if len(owners) < 2:
            return None
        whole = sum(map(weights.__getitem__, owners))
        left = {name: max(1, int(room * weights[name] / whole)) for name in owners}
        parts: list[int] = []
        for seq in begun:
            owner = seq.request.owner
            parts.append(min(left[owner], len(seq.tokens) - seq.num_fed))
            left[owner] -= parts[-1]
        return parts

    def _leading(self, owner: str, charged: float) -> dict[str, int]:
        """The owners that are too far ahead of `owner`, which has been `charged`; how many rows each may give to it.

        Where there are none, it says when to look again: until then the counters cannot have moved far enough.
        """
        counters, lag = self.owners.counters, self.options.preempt_lag
        rows = self._num_rows.get(owner, 0) / self._weights[owner]
        most = {
            other: math.ceil(num_rows - rows * self._weights[other])
            for other, num_rows in self._num_rows.items()
            if other != owner
        }
        leading = {other: count for other, count in most.items() if count > 0 and counters[other] > charged + lag}
        if not leading:
            missing = min((charged + lag - counters[other] for other, count in most.items() if count > 0), default=lag)
            self._next_look = self._charges + min(max(missing, lag / _LOOKS), lag)
        return leading

    def on_wait(self, seq: Sequence) -> None:
        """Lifts the counters of an owner, and of a tenant, that had no sequence waiting."""
        owner, tenant = seq.request.owner, seq.request.tenant
        is_new = seq.state is SequenceState.WAITING
        self._next_look = 0.0
        if is_new:
            self._weights[owner] = seq.request.owner_weight
        else:
            self._leave_row(seq)
        self.owners.wait(owner, is_new=is_new)
        tenants = self.tenants.get(owner)
        if tenants is None:
            tenants = self.tenants[owner] = Accounts()
        num_idle = tenants.num_idle
        tenants.wait(tenant, is_new=is_new)
        self._num_idle += tenants.num_idle - num_idle

    def on_run(self, seq: Sequence) -> None:
        """Charges the prompt, once."""
        owner, tenant = seq.request.owner, seq.request.tenant
        self.owners.run(owner)
        self.tenants[owner].run(tenant)
        self._num_rows[owner] = self._num_rows.get(owner, 0) + 1
        self._entered[seq] = seq.num_outputs
        self._next_look = 0.0
        if seq not in self._charged:
            self._charged.add(seq)
            charge = self.options.input_weight * (seq.prompt_len - seq.num_cached)
            self.tenants[owner].counters[tenant] += charge
            self.owners.counters[owner] += charge / seq.request.owner_weight
            self._charges += charge / seq.request.owner_weight

    def on_served(self, plan: StepPlan, served: Seq[Sequence]) -> None:
        """Charges a token for each that goes on. In steady decode that is one addition for each owner and tenant."""
        if self._bill.served is not served:
            self._bill = self._bill_of(served)
        for counters, name, charge in self._bill.charges:
            counters[name] += charge
        self._charges += self._bill.of_owners

    def _bill_of(self, served: Seq[Sequence]) -> "_Bill":
        weight = self.options.output_weight
        owners: dict[str, float] = {}
        lines: dict[Line, float] = {}
        for seq in served:
            if seq.state is not SequenceState.FINISHED:
                line = self.line(seq)
                lines[line] = lines.get(line, 0.0) + weight
                owners[line[0]] = owners.get(line[0], 0.0) + weight / seq.request.owner_weight
        charges = [(self.owners.counters, owner, charge) for owner, charge in owners.items()]
        charges += [(self.tenants[owner].counters, tenant, charge) for (owner, tenant), charge in lines.items()]
        return _Bill(served, charges, sum(owners.values()))

    def on_end(self, seq: Sequence) -> None:
        """Forgets the sequence, and names that have been away for long."""
        owner, tenant = seq.request.owner, seq.request.tenant
        self._bill = _NO_BILL
        self._charged.discard(seq)
        self._next_look = 0.0
        waited = seq.state is not SequenceState.RUNNING
        if not waited:
            self._leave_row(seq)
        self.owners.end(owner, waited=waited)
        if owner not in self.owners.num_live:
            del self._weights[owner]
        tenants = self.tenants[owner]
        num_idle = tenants.num_idle
        tenants.end(tenant, waited=waited)
        self._num_idle += tenants.num_idle - num_idle
        if self._num_idle > len(self.owners.num_live) + _MAX_IDLE:
            self._forget()

    def _leave_row(self, seq: Sequence) -> None:
        owner = seq.request.owner
        del self._entered[seq]
        self._num_rows[owner] -= 1
        if not self._num_rows[owner]:
            del self._num_rows[owner]

    def _forget(self) -> None:
        """Drops owners and tenants without a request, but the last of each that ran: a newcomer is lifted to it."""
        self.owners.forget_idle()
        self.tenants = {owner: tenants for owner, tenants in self.tenants.items() if owner in self.owners.counters}
        for tenants in self.tenants.values():
            tenants.forget_idle()
        self._num_idle = sum(tenants.num_idle for tenants in self.tenants.values())


class _Bill(NamedTuple):
    """What a step of the sequences `served` costs: counters, a name among them, and the charge; and all of owners."""

    served: Seq[Sequence]
    charges: list[tuple[dict[str, float], str, float]]
    of_owners: float


_NO_BILL = _Bill((), [], 0.0)


_DECAY = 0.99  # of the weight of a measurement with each one after it
_MIN_WEIGHT = 8.0


class StepTimes:
    """The time of a step by its tokens, learned while the engine runs: seconds = base + per_token * tokens.

    A policy needs to know how long a chunk delays the rows beside it, not why: buckets, rows and context are left
    out. Least squares with fading weights. Mutated only by the policy that made it.

    Attributes:
      base_s: seconds of a step of no tokens; 0 until something is known.
      per_token_s: seconds for each token; 0 until steps of different sizes have been seen.
    """

    def __init__(self) -> None:
        self.base_s = 0.0
        self.per_token_s = 0.0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def known(self) -> bool:
        """Whether enough has been measured."""
        return self._weight >= _MIN_WEIGHT and self.per_token_s > 0

    def add(self, num_tokens: int, seconds: float) -> None:
        """One step."""
        self._weight = self._weight * _DECAY + 1
        self._x = self._x * _DECAY + num_tokens
        self._y = self._y * _DECAY + seconds
        self._xx = self._xx * _DECAY + num_tokens * num_tokens
        self._xy = self._xy * _DECAY + num_tokens * seconds
        spread = self._xx - self._x * self._x / self._weight
        if spread > 1e-9 * self._xx:
            slope = (self._xy - self._x * self._y / self._weight) / spread
            self.per_token_s = max(0.0, slope)
            self.base_s = max(0.0, (self._y - self.per_token_s * self._x) / self._weight)


TURNS = 8  # of this many rows, one goes to the sequence that has waited longest
_MIN_CHUNK = 16  # tokens of prompts in a step at least: less is mostly overhead
_LONGEST, _STREAMING, _IN_TIME, _HOPELESS = range(4)


class SloPolicy(Policy):
    """By slack to the first token.

    The target of a request is its own (`Request.ttft_target_s`, `tpot_target_s`) or that of the options. It must begin
    by its arrival plus the target, less the time that its prompt takes to compute: least slack first is earliest of
    these first. A request that is past it is hopeless and waits behind the others, in order of arrival. So that
    it does not wait for ever, every eighth row goes to the sequence that has waited longest: with k before it, a
    sequence runs after 8 * (k + 1) others.

    Sequences that stream are protected twice: they come before all others when a page is needed, and a step holds only
    as many prompt tokens as the tightest target beside them allows, by the measured time of steps.
    """

    dynamic_order = True

    def bind(self, memory: SequenceMemory, lengths: LengthPredictor, clock: Callable[[], float]) -> None:
        """Begins with an empty queue and no step measured."""
        super().bind(memory, lengths, clock)
        self.step_times = StepTimes()
        self._arrivals: collections.deque[Sequence] = collections.deque()  # in order; some no longer wait
        self._longest: Sequence | None = None
        self._num_rows = 0
        self._planned: collections.deque[tuple[float, int]] = collections.deque()
        self._served_s = 0.0

    def key(self, seq: Sequence, now_s: float) -> tuple[float, ...]:
        """The kind, and within it seconds: the latest moment to begin, or the arrival."""
        arrival_s = seq.request.order_s
        if seq is self._longest:
            return (_LONGEST, arrival_s)
        if seq.num_outputs > 0:
            return (_STREAMING, arrival_s)
        begin_s = arrival_s + self.ttft_target_s(seq) - seq.prompt_len * self.step_times.per_token_s
        return (_IN_TIME, begin_s) if begin_s >= now_s else (_HOPELESS, arrival_s)

    def ttft_target_s(self, seq: Sequence) -> float:
        """Seconds from the arrival to the first token."""
        own = seq.request.ttft_target_s
        return self.options.ttft_target_s if own is None else own

    def tpot_target_s(self, seq: Sequence) -> float:
        """Seconds for each token after the first."""
        own = seq.request.tpot_target_s
        return self.options.tpot_target_s if own is None else own

    def prefill_budget(self, decoding: Seq[Sequence]) -> int | None:
        """What the tightest target of `decoding` allows. None where even a step without prompts takes too long."""
        times = self.step_times
        if not decoding or not times.known:
            return None
        target_s = min(map(self.tpot_target_s, decoding))
        num_tokens = int((target_s - times.base_s) / times.per_token_s) - len(decoding)
        return max(_MIN_CHUNK, num_tokens) if num_tokens >= 1 else None

    def on_wait(self, seq: Sequence) -> None:
        """Appends the sequence to the order of arrival."""
        self._arrivals.append(seq)

    def on_run(self, seq: Sequence) -> None:
        """Counts the rows that were given, and chooses the sequence that gets the next one."""
        self._num_rows += 1
        if seq is self._longest:
            self._longest = None
        if self._num_rows % TURNS == 0:
            waits = (SequenceState.WAITING, SequenceState.PREEMPTED)
            while self._arrivals and self._arrivals[0].state not in waits:
                self._arrivals.popleft()
            self._longest = self._arrivals[0] if self._arrivals else None
            if self._longest is not None:
                self.changed.append(self._longest)

    def on_end(self, seq: Sequence) -> None:
        """The sequence holds no turn after its end."""
        if seq is self._longest:
            self._longest = None

    def observe(self, decoding: Seq[Sequence], prefills: Seq[tuple[Sequence, int]]) -> None:
        """Notes when a step was planned, and its size."""
        self._planned.append((self.clock(), len(decoding) + sum(length for _, length in prefills)))

    def on_served(self, plan: StepPlan, served: Seq[Sequence]) -> None:
        """Measures the step: from its plan, or from the end of the one before, to now."""
        now_s = self.clock()
        planned_s, num_tokens = self._planned.popleft()
        self.step_times.add(num_tokens, now_s - max(planned_s, self._served_s))
        self._served_s = now_s
