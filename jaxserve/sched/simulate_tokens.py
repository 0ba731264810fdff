"""The device of a simulation: it knows how long each answer will be, and draws tokens accordingly.

Owns which token a row yields at a step. Refuses time, and refuses to check plans (`jaxserve.testing` does).

Why rows are not visited one by one: a step of hundreds of rows would cost more here than in the scheduler. The tokens
of a set of rows stay the same list for as long as the set does, and a row is looked at again at the earliest step in
which it can draw its last token: it draws one in each step or fewer, so that step is known when it begins.
"""

import collections

from jaxserve.sched.plan import RowSetup, StepPlan, StepResult
from jaxserve.sched.simulate_values import SimRequest

_FIRST_OWN_ID = 2**40  # beyond any vocabulary
_IDS_PER_REQUEST = 2048  # more than the sequences that one may have


class _Row:
    """The owner of a row. `last_position`: the one whose token is the last; -1 where only a limit ends it."""

    __slots__ = ("last_position", "row", "stop_id", "token_id")

    def __init__(self, row: int, token_id: int, stop_id: int, last_position: int) -> None:
        self.row = row
        self.token_id = token_id
        self.stop_id = stop_id
        self.last_position = last_position


class TokenSource:
    """Executes plans in order. Mutated only by the simulated engine that made it."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[SimRequest, int]] = {}
        self._num_requests = 0
        self._rows: dict[int, _Row] = {}
        self._token_of_row: dict[int, int] = {}
        self._tick = 0
        self._due: collections.defaultdict[int, list[_Row]] = collections.defaultdict(list)
        self._decode_rows: tuple[int, ...] = ()
        self._decode_tokens: list[int] = []

    def add(self, request: SimRequest) -> None:
        """From now on its id may stand in a plan."""
        own_id = _FIRST_OWN_ID + self._num_requests * _IDS_PER_REQUEST
        self._num_requests += 1
        self._requests[request.request.request_id] = (request, own_id)

    def remove(self, request_id: str) -> None:
        """It has ended; a row that it still has is freed by a later plan."""
        del self._requests[request_id]

    def execute(self, plan: StepPlan) -> StepResult:
        """What the device yields."""
        if plan.freed_rows or plan.setups:
            self._change_rows(plan)
        if plan.num_steps > 1:
            return self._execute_burst(plan)
        self._tick += 1
        if plan.decode_rows is not self._decode_rows:
            self._decode_rows = plan.decode_rows
            self._decode_tokens = list(map(self._token_of_row.__getitem__, plan.decode_rows))
        tokens = self._decode_tokens
        due = self._due.pop(self._tick, None)
        if due is not None:
            tokens = self._draw_last(due, plan, tokens)
        if not plan.chunks:
            return StepResult(token_ids=tokens)
        drawn = [
            self._draw_first(chunk.row, chunk.start + len(chunk.token_ids) - 1) for chunk in plan.chunks if chunk.sample
        ]
        pooled = {chunk.row: [0.0] for chunk in plan.chunks if chunk.pool}
        return StepResult(token_ids=tokens + drawn, hidden_sums=pooled or None)

    def _execute_burst(self, plan: StepPlan) -> StepResult:
        """All rows are visited: once in so many steps that costs no more than the steps would."""
        first = self._tick + 1
        self._tick += plan.num_steps
        for tick in range(first, self._tick + 1):
            for owner in self._due.pop(tick, ()):
                if self._rows.get(owner.row) is owner and owner.row not in plan.decode_rows:
                    self._due[self._tick + 1].append(owner)  # it waits for a page
        counts: list[int] = []
        steps: list[list[int]] = [[] for _ in range(plan.num_steps)]
        for row, position, planned in zip(plan.decode_rows, plan.decode_positions, plan.steps_of_rows, strict=True):
            owner = self._rows[row]
            left = owner.last_position - position  # steps before the one that draws the stop id; below 0: it has none
            ends = 0 <= left < planned
            ended = owner.last_position >= 0 and left < 0  # by an earlier plan
            counts.append(0 if ended else left + 1 if ends else planned)
            for step in steps[: counts[-1]]:
                step.append(owner.token_id)
            if ends:
                steps[left][-1] = owner.stop_id
            elif left >= planned:
                self._due[self._tick + 1 + left - planned].append(owner)
        return StepResult(token_ids=[token_id for step in steps for token_id in step], counts=counts)

    def _change_rows(self, plan: StepPlan) -> None:
        for row in plan.freed_rows:
            del self._rows[row]
        for setup in plan.setups:
            owner = self._rows[setup.row] = self._owner(setup)
            self._token_of_row[setup.row] = owner.token_id
        self._decode_rows, self._decode_tokens = (), []  # the same rows may have other owners

    def _owner(self, setup: RowSetup) -> _Row:
        request, own_id = self._requests[setup.request_id]
        token_id = own_id + setup.index if request.output_token_id is None else request.output_token_id
        if request.output_len >= request.request.max_tokens:
            return _Row(setup.row, token_id, -1, -1)
        # The token fed at position p yields the one at p + 1.
        return _Row(setup.row, token_id, setup.stop_token_ids[0], setup.prompt_len + request.output_len - 2)

    def _draw_first(self, row: int, position: int) -> int:
        owner = self._rows[row]
        left = owner.last_position - position
        if left == 0:
            return owner.stop_id
        if left > 0:
            self._due[self._tick + left].append(owner)
        return owner.token_id

    def _draw_last(self, due: list[_Row], plan: StepPlan, tokens: list[int]) -> list[int]:
        """The tokens of the decode rows with the stop ids of those that end in this step."""
        tokens = tokens.copy()
        for owner in due:
            if self._rows.get(owner.row) is not owner:
                continue  # preempted since
            if owner.row not in plan.decode_rows:
                self._due[self._tick + 1].append(owner)  # it waits for a page, or for a prompt that runs alone
                continue
            place = plan.decode_rows.index(owner.row)
            left = owner.last_position - plan.decode_positions[place]
            if left == 0:
                tokens[place] = owner.stop_id
            elif left > 0:
                self._due[self._tick + left].append(owner)
        return tokens
