"""The loop takes step shapes that arrive late: scheduler, statistics and step log change at the same step."""

from pathlib import Path

import pytest

from jaxserve.api import SamplingParams
from jaxserve.engine import Engine, ModelInfo
from jaxserve.engine.step_log import StepLogWriter
from jaxserve.sched import BucketCounts, Limits, StepPlan, create_scheduler
from jaxserve.sched.plan import Bucket
from jaxserve.sched.record import LogHeader, read_records
from jaxserve.testing import ByteTokenizer, FakeRunner, make_limits

ALL = make_limits(max_rows=4, token_buckets=(8, 16, 32))
FIRST = ALL.with_buckets((Bucket(4, 4, True), Bucket(32, 4, False)))
PROMPT = [65 + i for i in range(9)]


class Growing(FakeRunner):
    """A runner with the largest shapes, and a `LaterBuckets` that brings the others before the steps in `arrivals`."""

    def __init__(self, arrivals: dict[int, Limits]) -> None:
        super().__init__(FIRST, vocab_size=259)
        self.all_limits = ALL
        self.counts = BucketCounts(2, len(ALL.buckets) - 2, 0)
        self.closed = False
        self.worked: list[bool] = []
        self._arrivals = arrivals

    def take(self) -> Limits | None:
        found = self._arrivals.pop(self.num_steps, None)
        if found is not None:
            self._limits = found
        return found

    def start(self) -> None: ...

    def wait(self, timeout_s: float | None = None) -> bool:
        return True

    def note_work(self, working: bool) -> None:
        self.worked.append(working)

    def close(self) -> None:
        self.closed = True


class Plain:
    """A scheduler that knows nothing of shapes that come later."""

    def __init__(self, limits: Limits) -> None:
        inner = create_scheduler("fcfs", limits)
        self.add, self.abort, self.schedule, self.commit = inner.add, inner.abort, inner.schedule, inner.commit
        self.has_work = inner.has_work


def _run(runner: Growing, log: Path | None = None, scheduler=None) -> tuple[Engine, list[int]]:
    header = LogHeader(limits=ALL, model="fake", policy="fcfs", vocab_size=259)
    engine = Engine(
        runner=runner,
        scheduler=scheduler or create_scheduler("fcfs", runner.limits),
        tokenizer=ByteTokenizer(),
        model=ModelInfo(name="fake", vocab_size=259, max_model_len=64, eos_token_ids=(257,)),
        observers=[] if log is None else [StepLogWriter(log, header, start_s=0.0)],
        later=runner,
    )
    tokens: list[int] = []
    for prompt in (PROMPT, PROMPT[:5]):
        request = engine.prepare(prompt, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
        engine.submit(request, lambda update: tokens.extend(update.token_ids))
        engine.run_until_idle()
    engine.stop()
    assert runner.closed
    return engine, tokens


def _planned(runner: FakeRunner) -> list[int]:
    return [plan.num_tokens for plan in runner.plans]


@pytest.mark.parametrize("arrivals", [{}, {0: ALL}, {3: ALL}, {6: ALL.with_buckets(ALL.buckets[1:])}])
def test_tokens_do_not_depend_on_when_shapes_arrive(arrivals: dict[int, Limits]) -> None:
    _, expected = _run(Growing({}))
    engine, tokens = _run(Growing(dict(arrivals)))
    assert tokens == expected and len(tokens) == 12
    assert engine.stats[0].bucket_counts == BucketCounts(2, len(ALL.buckets) - 2, 0)


def test_builders_hear_when_there_is_work_and_when_not() -> None:
    runner = Growing({})
    _run(runner)
    assert runner.worked == [True, False] * (len(runner.worked) // 2) and len(runner.worked) >= 4, (
        "once for each change"
    )


def test_a_runner_that_sleeps_is_given_no_shape() -> None:
    runner = Growing({0: ALL})
    engine = Engine(
        runner=runner,
        scheduler=create_scheduler("fcfs", runner.limits),
        tokenizer=ByteTokenizer(),
        model=ModelInfo(name="fake", vocab_size=259, max_model_len=64, eos_token_ids=(257,)),
        later=runner,
    )
    engine.set_asleep(True)
    engine.step()
    assert runner.limits == FIRST
    engine.set_asleep(False)
    engine.step()
    assert runner.limits == ALL


def test_the_scheduler_fills_smaller_shapes_as_soon_as_they_are_there() -> None:
    late, soon = Growing({7: ALL}), Growing({0: ALL})
    _run(late)
    _run(soon)
    assert _planned(late)[0] == len(PROMPT), "the only shape holds the prompt whole"
    assert _planned(soon)[:2] == [8, 1], "cut at the edge of the shape of 8"


def test_a_step_is_logged_with_the_shape_it_ran_in(tmp_path: Path) -> None:
    """Shapes arrive while a step is in flight: that one ran without them, although it is recorded after."""
    path = tmp_path / "log.jsonl"
    runner = Growing({2: ALL})
    _run(runner, path)
    records = list(read_records(path))
    expected = [(FIRST if step < 2 else ALL).find_bucket(p.num_tokens, p.num_rows, p.decode_only)
                for step, p in enumerate(runner.plans)]  # fmt: skip
    assert [record.bucket for record in records] == expected
    assert {Bucket(4, 4, True), Bucket(1, 1, True)} <= {record.bucket for record in records}
    assert [record.plan for record in records] == runner.plans
    again = FakeRunner(ALL, vocab_size=259)
    replayed = [tuple(again.dispatch(StepPlan.from_json(r.plan.to_json())).result().token_ids) for r in records]
    assert replayed == [record.token_ids for record in records]


def test_a_scheduler_that_takes_no_limits_goes_on_with_its_own() -> None:
    runner = Growing({0: ALL})
    _, tokens = _run(runner, scheduler=Plain(FIRST))
    assert tokens == _run(Growing({}))[1]
    assert _planned(runner)[0] == len(PROMPT)


def test_padding_is_counted_by_the_shapes_that_are_there() -> None:
    engine, _ = _run(Growing({0: ALL}))
    assert [s.slots for s in engine.stats[0].steps()][:3] == [8, 8, 1]
