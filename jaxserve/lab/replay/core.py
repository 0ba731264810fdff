"""Plans in, tokens out, compared with those of the log.

Any runner can be replayed on. Steps overlap as they did in the engine: one is launched while the one before it is still
running.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

from jaxserve.errors import StepLogError
from jaxserve.lab.replay.check import check_plan
from jaxserve.sched import InFlight, RowSetup, Runner
from jaxserve.sched.record import StepRecord


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first token that differs.

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
    """The extent of a comparison: `steps` with `tokens` drawn in them, all equal unless there is a `difference`."""

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

    `runner` must be fresh: a log begins with its engine. `on_step` is called with each step that was equal. Raises
    StepLogError for a damaged line or plan, and at a gap, since what follows reads pages that were never written; the
    message has the number of equal steps before it.
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
    """The steps in flight, the owners of rows, and counts of equal steps. Mutated by `replay` alone."""

    def __init__(self, runner: Runner, vocab_size: int, on_step: Callable[[StepRecord], None]) -> None:
        self.steps = self.tokens = 0
        self.difference: Difference | None = None
        self._runner = runner
        self._vocab_size = vocab_size
        self._on_step = on_step
        self._launched: _Launched | None = None
        self._setups: dict[int, RowSetup] = {}
        self._saved: set[int] = set()  # host slots that the log has filled

    def step(self, record: StepRecord) -> None:
        """Launches a step, then compares the one before it."""
        if record.missing:
            raise StepLogError(
                f"{record.missing} steps before step {record.plan.step_id} are missing from the log, and nothing after"
                " them can be replayed"
            )
        check_plan(record.plan, self._runner.limits, self._vocab_size)
        self._saved.update(save.slot for save in record.plan.saves)
        if foreign := {load.slot for load in record.plan.loads} - self._saved:
            raise StepLogError(
                f"step {record.plan.step_id} loads host slot {min(foreign)}, which no step of the log has filled: its "
                "page came from a store (store.kind), and a log does not have its bytes; record without a store"
            )
        if record.plan.adapters:
            raise StepLogError(
                f"step {record.plan.step_id} loads the adapter {record.plan.adapters[0].name!r}, and a log does not "
                "hold its weights; replay a log of requests without adapters"
            )
        if record.plan.encodes:
            raise StepLogError(
                f"step {record.plan.step_id} encodes the picture {record.plan.encodes[0].digest}, and a log does not "
                "have its pixels; nothing from there on can be replayed"
            )
        launched = _Launched(record, self._runner.dispatch(record.plan))
        previous, self._launched = self._launched, launched
        self._compare(previous)

    def finish(self) -> None:
        """Compares the step in flight; after a difference it only waits, so that the device is idle."""
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
        if result.counts is not None and tuple(result.counts) != step.record.counts:
            raise StepLogError(
                f"step {plan.step_id} draws {result.counts} tokens of its rows here and {step.record.counts} in the "
                "log; steps that draw other numbers of tokens cannot be compared"
            )
        for at, (one, other) in enumerate(zip(logged, result.token_ids, strict=True)):
            if one != other:
                self.difference = self._describe(step.record, at, other)
                return
        self.tokens += len(logged)
        self.steps += 1
        self._on_step(step.record)

    def _describe(self, record: StepRecord, at: int, replayed: int) -> Difference:
        plan = record.plan
        place, number = _place(at, record.counts)
        row = plan.sampled_rows[place]
        if place < len(plan.decode_rows):
            position = plan.decode_positions[place] + 1 + number
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
    """Of the token that stands at `at` in a result: the place of its row, and its number among those of the row."""
    if counts is None:
        return at, 0
    return [(place, number) for place, count in enumerate(counts) for number in range(count)][at]
