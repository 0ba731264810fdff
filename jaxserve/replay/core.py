"""Plans in, tokens out, compared with those of the log.

Owns the order of a replay and the first difference. Refuses to build a runner: any will do. Steps overlap as they did
in the engine: one is launched while the one before it is still running, and nothing but a runner is driven.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

from jaxserve.errors import StepLogError
from jaxserve.replay.check import check_plan
from jaxserve.sched import InFlight, RowSetup, Runner
from jaxserve.sched.record import StepRecord


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first token that is another.

    Attributes:
      index: of the sequence among those of its request.
      position: in the sequence, its prompt included, from 0; `output` counts from the first generated token.
      logged, replayed: token ids.
    """

    step_id: int
    row: int
    request_id: str
    index: int
    position: int
    output: int
    logged: int
    replayed: int

    def __str__(self) -> str:
        return (
            f"step {self.step_id}, row {self.row}: request {self.request_id!r} (sequence {self.index}), output token"
            f" {self.output} at position {self.position} is {self.logged} in the log and {self.replayed} in the replay"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """What was compared: `steps` with `tokens` drawn in them, all equal unless there is a `difference`."""

    steps: int
    tokens: int
    difference: Difference | None


def replay(
    runner: Runner,
    records: Iterable[StepRecord],
    vocab_size: int,
    on_step: Callable[[StepRecord], None] = lambda record: None,
) -> ReplayResult:
    """Runs the plans in order, one step ahead of the comparison, and ends at the first token that differs.

    `runner` must be fresh: a log begins with its engine. `on_step` is told of each step that was equal. Raises
    StepLogError for a damaged line or plan, and at a gap, since what follows reads pages that were never written; the
    message says how many steps were equal until there.
    """
    run = _Replay(runner, vocab_size, on_step)
    try:
        for record in records:
            run.step(record)
            if run.difference is not None:
                break
        run.finish()
    except StepLogError as error:
        run.finish()
        if run.difference is None:
            raise StepLogError(f"{error} (equal until there: {run.steps} steps, {run.tokens} tokens)") from error
    return ReplayResult(steps=run.steps, tokens=run.tokens, difference=run.difference)


class _Launched(NamedTuple):
    record: StepRecord
    handle: InFlight


class _Replay:
    """What is in flight, whose rows they are, and how much was equal. Mutated by `replay` alone."""

    def __init__(self, runner: Runner, vocab_size: int, on_step: Callable[[StepRecord], None]) -> None:
        self.steps = self.tokens = 0
        self.difference: Difference | None = None
        self._runner = runner
        self._vocab_size = vocab_size
        self._on_step = on_step
        self._launched: _Launched | None = None
        self._setups: dict[int, RowSetup] = {}

    def step(self, record: StepRecord) -> None:
        """Launches a step, then compares the one before it."""
        if record.missing:
            raise StepLogError(
                f"{record.missing} steps before step {record.plan.step_id} are missing from the log, and nothing after"
                " them can be replayed"
            )
        check_plan(record.plan, self._runner.limits, self._vocab_size)
        launched = _Launched(record, self._runner.dispatch(record.plan))
        previous, self._launched = self._launched, launched
        self._compare(previous)

    def finish(self) -> None:
        """Compares what is still in flight; after a difference it only waits, which leaves the device idle."""
        previous, self._launched = self._launched, None
        self._compare(previous)

    def _compare(self, step: _Launched | None) -> None:
        if step is None:
            return
        result = step.handle.result()
        if self.difference is not None:
            return
        plan, logged = step.record.plan, step.record.token_ids
        self._setups.update((setup.row, setup) for setup in plan.setups)
        # A row ends a burst with a stop id, so counts can differ only after a token that does.
        for at, (one, other) in enumerate(zip(logged, result.token_ids, strict=result.counts is None)):
            if one != other:
                self.difference = self._describe(step.record, at, other)
                return
        if result.counts is not None and tuple(result.counts) != step.record.counts:
            raise StepLogError(
                f"step {plan.step_id} took {result.counts} steps of its rows, and {step.record.counts} in the log, with"
                " equal tokens: the stop ids of the log are not those of its plans; it is damaged"
            )
        self.tokens += len(logged)
        self.steps += 1
        self._on_step(step.record)

    def _describe(self, record: StepRecord, at: int, replayed: int) -> Difference:
        plan = record.plan
        step, place = _place(at, record.counts)
        row = plan.sampled_rows[place]
        if place < len(plan.decode_rows):
            position = plan.decode_positions[place] + 1 + step
        else:
            position = next(c.start + len(c.token_ids) for c in plan.chunks if c.row == row)
        setup = self._setups.get(row)
        if setup is None:
            raise StepLogError(f"step {plan.step_id} draws for row {row}, which no step set up; the log is damaged")
        return Difference(
            step_id=plan.step_id,
            row=row,
            request_id=setup.request_id,
            index=setup.index,
            position=position,
            output=position - setup.prompt_len,
            logged=record.token_ids[at],
            replayed=replayed,
        )


def _place(at: int, counts: tuple[int, ...] | None) -> tuple[int, int]:
    """The step, and the place among the rows, of a token that stands at `at` in a result."""
    if counts is None:
        return 0, at
    order = [(step, place) for step in range(max(counts)) for place, count in enumerate(counts) if count > step]
    return order[at]
