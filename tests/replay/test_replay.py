"""Replays: a log runs to the same tokens, the first other token is named exactly, and what does not fit is refused."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from logged import VOCAB, fresh_runner, small_limits, write_log

from jaxserve.assemble.step_log import check_fits, differing_settings, sizes_from
from jaxserve.config import load_config
from jaxserve.errors import StepLogError
from jaxserve.lab.replay.core import replay
from jaxserve.sched import Bucket, Chunk, InFlight, Limits, PageCopy, PageGrant, RowMask, StepPlan
from jaxserve.sched.record import LogHeader, StepRecord, read_records
from jaxserve.testing import make_limits


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logs") / "steps.jsonl"
    write_log(path, 1)
    return path


@pytest.fixture(scope="module")
def records(log: Path) -> list[StepRecord]:
    return list(read_records(log))


def _change(records: list[StepRecord], at: int, place: int) -> list[StepRecord]:
    tokens = list(records[at].token_ids)
    tokens[place] = (tokens[place] + 1) % VOCAB
    changed = dataclasses.replace(records[at], token_ids=tuple(tokens))
    return [*records[:at], changed, *records[at + 1 :]]


@pytest.mark.parametrize("seed", range(8))
def test_equal_token_for_token(tmp_path: Path, seed: int) -> None:
    engine = write_log(tmp_path / "log", seed)
    records = list(read_records(tmp_path / "log"))
    plans = [record.plan for record in records]
    counts = engine.stats[0].counts
    assert counts is not None and counts.preemptions > 0 and counts.hit_tokens > 0
    assert any(plan.copies for plan in plans) and any(plan.masks for plan in plans)
    assert any(chunk.pool for plan in plans for chunk in plan.chunks)
    runner = fresh_runner()
    result = replay(runner, records, VOCAB)
    assert result.difference is None
    assert (result.steps, result.tokens) == (len(records), sum(len(r.token_ids) for r in records))
    assert runner.plans == plans and result.tokens > 100


@pytest.mark.parametrize("seed", [1, 2])
def test_several_tokens_a_step_are_replayed_and_a_changed_one_is_named(tmp_path: Path, seed: int) -> None:
    write_log(tmp_path / "log", seed, shapes=((2, 2),))
    records = list(read_records(tmp_path / "log"))
    at = next(i for i, r in enumerate(records) if r.counts is not None and len(r.counts) > 1 and min(r.counts) > 1)
    result = replay(fresh_runner(small_limits(((2, 2),))), records, VOCAB)
    assert (result.steps, result.difference) == (len(records), None)
    record = records[at]
    assert record.counts is not None
    difference = replay(
        fresh_runner(small_limits(((2, 2),))), _change(records, at, record.counts[0] + 1), VOCAB
    ).difference
    assert difference is not None
    assert (difference.step_id, difference.row) == (record.plan.step_id, record.plan.decode_rows[1])
    assert difference.position == record.plan.decode_positions[1] + 2, "the second of the row"
    with pytest.raises(StepLogError, match="no step holds that"):
        replay(fresh_runner(), records, VOCAB)


def test_one_step_is_launched_ahead(records: list[StepRecord]) -> None:
    """As in the engine: the next step is launched, then the one before it is read."""
    order: list[tuple[str, int]] = []

    class Watched:
        limits = small_limits()

        def dispatch(self, plan: StepPlan) -> InFlight:
            order.append(("launch", plan.step_id))
            return Handle(plan.step_id)

    class Handle:
        def __init__(self, step_id: int) -> None:
            self.step_id = step_id

        def result(self):
            order.append(("read", self.step_id))
            return inner[self.step_id].result()

    runner = fresh_runner()
    inner = {record.plan.step_id: runner.dispatch(record.plan) for record in records}
    seen: list[int] = []
    replay(Watched(), records, VOCAB, on_step=lambda record: seen.append(record.plan.step_id))
    ids = [record.plan.step_id for record in records]
    launched = [("launch", step_id) for step_id in ids]
    read = [("read", step_id) for step_id in ids]
    pairs = zip(launched[1:], read, strict=False)
    assert order == [launched[0], *itertools.chain.from_iterable(pairs), read[-1]]
    assert seen == ids


def test_every_changed_token_is_named(records: list[StepRecord]) -> None:
    outputs: dict[tuple[str, int], dict[int, int]] = {}
    owners: dict[int, tuple[str, int, int]] = {}
    rng = random.Random(3)
    for at, record in enumerate(records):
        for setup in record.plan.setups:
            owners[setup.row] = (setup.request_id, setup.index, setup.prompt_len)
        for place, row in enumerate(record.plan.sampled_rows):
            request_id, index, prompt_len = owners[row]
            drawn = outputs.setdefault((request_id, index), {})
            number = len(drawn)  # a sequence that was taken away goes on where it was
            drawn[number] = record.token_ids[place]
            if rng.random() > 0.15:
                continue
            result = replay(fresh_runner(), _change(records, at, place), VOCAB)
            found = result.difference
            assert found is not None
            assert (found.step_id, found.row, found.request_id, found.index) == (
                record.plan.step_id, row, request_id, index,
            )  # fmt: skip
            assert (found.output, found.position) == (number, prompt_len + number)
            assert found.replayed == record.token_ids[place] and found.logged == (found.replayed + 1) % VOCAB
            assert result.steps == at
            assert f"step {found.step_id}, row {row}: request '{request_id}'" in str(found)


def test_a_device_that_computes_differently(records: list[StepRecord]) -> None:
    """Another device's first wrong token, not a token of a row that was only computed beside it."""
    row = records[4].plan.sampled_rows[0]
    setup = next(s for r in reversed(records[:5]) for s in r.plan.setups if s.row == row)
    at = next(i for i, r in enumerate(records) if any(s.request_id == setup.request_id for s in r.plan.setups))
    first = next(i for i in range(at, len(records)) if row in records[i].plan.sampled_rows)
    runner = fresh_runner()
    runner._forced = {(setup.request_id, setup.index): {0: 258}}
    found = replay(runner, records, VOCAB).difference
    assert found is not None and found.step_id == records[first].plan.step_id
    assert (found.request_id, found.output, found.replayed) == (setup.request_id, 0, 258)


def test_nothing_after_a_gap(records: list[StepRecord]) -> None:
    broken = [*records[:5], dataclasses.replace(records[7], missing=2), *records[8:]]
    drawn = sum(len(r.token_ids) for r in records[:5])
    with pytest.raises(StepLogError, match=rf"2 steps before step 7 are missing.*: 5 steps, {drawn} tokens"):
        replay(fresh_runner(), broken, VOCAB)
    found = replay(fresh_runner(), _change(broken, 4, 0), VOCAB).difference
    assert found is not None and found.step_id == 4, "what came before the gap was not compared"


def test_a_damaged_line_after_a_difference_does_not_hide_it(log: Path, tmp_path: Path) -> None:
    lines = log.read_text().splitlines(keepends=True)
    cut = tmp_path / "cut"
    cut.write_text("".join(lines[:9]) + lines[9][:50])
    with pytest.raises(StepLogError, match=r"line 10: it is cut short.*equal until there: 8 steps"):
        replay(fresh_runner(), read_records(cut), VOCAB)


def _damage(**changes) -> Callable[[StepPlan], StepPlan]:
    return lambda plan: dataclasses.replace(plan, **changes)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_damage(decode_rows=(4,), decode_positions=(1,)), "names row 4, but there are 0..3"),
        (_damage(freed_rows=(-1,)), "names row -1"),
        (_damage(masks=(RowMask.of(9, b"abcd"),)), "names row 9"),
        (_damage(grants=(PageGrant(0, 0, (15,)),)), r"names page 15, but there are 1..14"),
        (_damage(grants=(PageGrant(0, 0, (0,)),)), "names page 0"),
        (_damage(copies=(PageCopy(1, 99),)), "names page 99"),
        (_damage(grants=(PageGrant(0, 11, (1, 2)),)), "names column of the block table 12, but there are 0..11"),
        (_damage(grants=(PageGrant(0, 0, (1,), 1),)), "names group of layers 1, but there are 0..0"),
        (_damage(chunks=(Chunk(0, 47, (1, 2), True),)), "names position 48, but there are 0..47"),
        (_damage(chunks=(Chunk(0, 0, (VOCAB,), True),)), f"names token {VOCAB}"),
        (_damage(decode_rows=(1, 1), decode_positions=(1, 1)), "computes a row twice"),
        (_damage(decode_rows=(1, 2), decode_positions=(1,)), "1 positions of its decode rows"),
        (_damage(chunks=(Chunk(0, 0, (1,) * 40, True),)), "40 tokens of 1 rows: no step holds that"),
    ],
)
def test_a_damaged_plan_never_reaches_the_device(records: list[StepRecord], damage, message: str) -> None:
    runner = fresh_runner()
    empty = StepPlan(step_id=records[3].plan.step_id)
    broken = dataclasses.replace(records[3], plan=damage(empty))
    with pytest.raises(StepLogError, match=message):
        replay(runner, [*records[:3], broken], VOCAB)
    assert runner.plans == [r.plan for r in records[:3]]


def _header(limits: Limits, **changes) -> LogHeader:
    return LogHeader(limits=limits, model="fake", policy="fcfs", vocab_size=VOCAB, **changes)


def test_a_device_with_more_room_fits() -> None:
    check_fits(_header(small_limits()), make_limits(max_rows=8, num_pages=99, max_model_len=64), VOCAB)


@pytest.mark.parametrize(
    ("changes", "vocab", "message"),
    [
        ({"max_rows": 3}, VOCAB, r"it needs max_rows 4, here 3 \(sched.max_rows\)"),
        ({"num_pages": 13}, VOCAB, r"it needs num_pages 14, here 13 \(cache.num_pages\)"),
        ({"max_model_len": 47}, VOCAB, r"it needs max_model_len 48, here 47 \(model.max_len\)"),
        ({"page_size": 8}, VOCAB, r"its pages hold 4 tokens, here 8 \(cache.page_size\)"),
        ({"token_buckets": (8, 16)}, VOCAB, r"no step here has room for 32 tokens of 4 rows \(sched.max_step_tokens"),
        ({}, 300, r"its model 'fake' has 259 tokens, here 300 \(model.path\)"),
        ({"windows": (None, 8)}, VOCAB, "its rows have block tables for windows of none, here .* of none, 8 "),
        ({"max_rows": 3, "num_pages": 13}, VOCAB, "max_rows 4.*; it needs num_pages 14"),
    ],
)
def test_a_device_that_does_not_fit_is_told_why(changes, vocab: int, message: str) -> None:
    limits = make_limits(**{"max_rows": 4, "num_pages": 14, "max_model_len": 48, **changes})
    with pytest.raises(StepLogError, match=message):
        check_fits(_header(small_limits()), limits, vocab)


def test_sizes_that_the_config_leaves_open_are_the_logs() -> None:
    limits = Limits(
        max_rows=3, num_pages=77, page_size=16, max_model_len=128,
        buckets=(Bucket(1, 1, True), Bucket(3, 3, True), Bucket(40, 3, False)),
    )  # fmt: skip
    header = _header(limits)
    config = sizes_from(header, load_config(None, {"runtime.step_log": "/tmp/never"}).config)
    assert (config.cache.page_size, config.cache.num_pages, config.model.max_len) == (16, 77, 128)
    assert (config.sched.max_rows, config.sched.max_step_tokens) == (3, 40)
    assert (config.runtime.row_buckets, config.runtime.token_buckets) == ([1, 3], [40])
    assert config.runtime.step_log is None, "a replay would log itself"
    given = {"cache.memory_bytes": 1000, "sched.max_rows": 5, "sched.max_step_tokens": 64, "model.max_len": 99}
    with pytest.raises(StepLogError, match="no step here has room for 8 tokens of 4 rows \\(speculation"):
        check_fits(_header(small_limits(((2, 2),))), small_limits(), VOCAB)
    config = sizes_from(header, load_config(None, given).config)
    assert (config.cache.page_size, config.cache.num_pages, config.model.max_len) == (16, None, 99)
    assert (config.sched.max_rows, config.sched.max_step_tokens) == (5, 64)
    assert (config.runtime.row_buckets, config.runtime.token_buckets) == (None, None)


def test_settings_that_differ_are_named() -> None:
    header = _header(small_limits(), settings={"a": "1", "b": "2", "gone": "x"})
    found = differing_settings(header, {"a": "1", "b": "3", "new": "y"})
    assert found == [
        "b is 2 in the log, 3 here",
        "gone is x in the log, absent here",
        "new is absent in the log, y here",
    ]


def test_a_replay_reads_the_log_as_it_goes(records: list[StepRecord]) -> None:
    """A log of a day does not fit into memory: no more is read than one step ahead of what was compared."""
    taken = 0

    def counted() -> Iterator[StepRecord]:
        nonlocal taken
        for record in records:
            taken += 1
            yield record

    ahead = []
    replay(fresh_runner(), counted(), VOCAB, on_step=lambda record: ahead.append(taken))
    assert ahead[:-1] == list(range(2, len(records) + 1)) and ahead[-1] == len(records)
