"""The fakes themselves: they must catch what they are there to catch."""

import dataclasses

import pytest

from jaxserve.errors import MissingBucket
from jaxserve.sched import Chunk, PageCopy, PageGrant, StepPlan, create_scheduler
from jaxserve.sched.draft import row_setup
from jaxserve.sched.plan import Drafted, RowSetup
from jaxserve.sched.state import Sequence
from jaxserve.testing import ByteTokenizer, FakeRunner, ManualClock, drive, make_limits, make_request


def good_setup(told: int = 0, row: int = 0) -> RowSetup:
    """Of five tokens, the first `told` of which come with it."""
    seq = Sequence(make_request("a", [1, 2, 3, 4, 5]), 0, 0, 20)
    seq.row = row
    return dataclasses.replace(row_setup(seq), token_ids=(1, 2, 3, 4, 5)[:told])


def good_plan(row: int = 0) -> StepPlan:
    return StepPlan(
        step_id=0,
        chunks=(Chunk(row, 0, (1, 2, 3, 4, 5), True),),
        setups=(good_setup(row=row),),
        grants=(PageGrant(row, 0, (3, 7)),),
    )


def runner_after(plan: StepPlan | None = None) -> FakeRunner:
    runner = FakeRunner(make_limits(max_rows=2, page_size=4, num_pages=8, max_model_len=16))
    if plan is not None:
        runner.dispatch(plan)
    return runner


def test_tokens_can_be_computed_by_hand():
    runner = runner_after()
    assert runner.dispatch(good_plan()).result().token_ids == [6]
    plan = StepPlan(step_id=1, decode_rows=(0,), decode_positions=(5,))
    assert runner.dispatch(plan).result().token_ids == [7]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"grants": ()}, "no page"),
        ({"grants": (PageGrant(0, 0, (3,)),)}, "no page for position 4"),
        ({"grants": (PageGrant(0, 1, (3, 7)),)}, "hole"),
        ({"grants": (PageGrant(0, 0, (0, 7)),)}, "PageGrant"),
        ({"grants": (PageGrant(0, 0, (3, 9)),)}, "PageGrant"),
        ({"grants": (PageGrant(0, 0, (3, 3)),)}, "twice"),
        ({"chunks": (Chunk(0, 1, (2, 3, 4, 5), True),)}, "neither a chunk nor the setup brings"),
        ({"chunks": (Chunk(0, 1, (2, 3, 4, 5), True),), "setups": (good_setup(1),)}, "reads"),
        ({"chunks": (Chunk(0, 0, (1, 2, 3, 4, 6), True),), "setups": (good_setup(5),)}, "differs"),
        ({"chunks": (Chunk(0, 0, (1, 2, 3, 4), True),)}, "of 5 tokens"),
        ({"chunks": (Chunk(0, 0, (1, 2, 3, 4, 5), False),)}, "of 5 tokens"),
        ({"chunks": ()}, "StepPlan"),
        ({"decode_rows": (0,), "decode_positions": (5,)}, "twice in one step"),
        ({"freed_rows": (1,)}, "no owner"),
        ({"copies": (PageCopy(1, 2),)}, "writes a page of 0 rows"),
        ({"copies": (PageCopy(1, 3), PageCopy(3, 7))}, "copies|PageCopy"),
    ],
)
def test_a_plan_that_breaks_a_rule_fails(change: dict, words: str):
    runner = runner_after()
    with pytest.raises(AssertionError, match=words):
        runner.dispatch(dataclasses.replace(good_plan(), **change))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (good_plan(), "(0, 0)"),
        (dataclasses.replace(good_plan(), step_id=1), "given away"),
        (dataclasses.replace(good_plan(1), step_id=1), "written while 2 rows"),
        (StepPlan(step_id=1, decode_rows=(0,), decode_positions=(6,)), "feeds position 6"),
        (StepPlan(step_id=1, decode_rows=(0,), decode_positions=(5,), freed_rows=(0, 0)), "0, 0"),
    ],
)
def test_a_second_plan_that_breaks_a_rule_fails(plan: StepPlan, words: str):
    runner = runner_after(good_plan())
    with pytest.raises(AssertionError, match=words.replace("(", r"\(").replace(")", r"\)")):
        runner.dispatch(plan)


def test_a_plan_without_a_bucket_fails():
    runner = FakeRunner(make_limits(max_rows=2, token_buckets=(4,)))
    with pytest.raises(MissingBucket, match="5 tokens of 1 rows"):
        runner.dispatch(good_plan())


@pytest.mark.parametrize("where", ["dispatch", "result"])
def test_failures_can_be_injected(where):
    limits = make_limits()
    runner = FakeRunner(limits, fail_at=(2, where))
    with pytest.raises(RuntimeError, match="injected failure of step 2"):
        drive(create_scheduler("fcfs", limits), runner, [make_request("a", [1], 8)])
    assert runner.num_steps == (2 if where == "dispatch" else 4)


def test_steps_take_time():
    clock, limits = ManualClock(3.0), make_limits()
    runner = FakeRunner(limits, clock=clock, step_s=0.5)
    drive(create_scheduler("fcfs", limits), runner, [make_request("a", [1], 4)])
    assert clock() == 5.0


def test_byte_tokenizer():
    tokenizer = ByteTokenizer()
    text = "<|chat|>user: gr\u00fc\u00dfe \U0001f600</s>"
    ids = tokenizer.encode(text)
    assert ids[:2] == [256, 258]
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids) == "user: gr\u00fc\u00dfe \U0001f600"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>" + text
    assert tokenizer.encode("hi", add_special_tokens=False) == [104, 105]
    assert tokenizer.decode("\u00fc".encode()[:1]) == "\ufffd"
    assert max(ids) < tokenizer.vocab_size


def runner_with_wrong_drafts() -> FakeRunner:
    """Row 0 has five tokens in the pages 3 and 7 and has drawn 6; no draft is ever right."""
    limits = make_limits(max_rows=2, page_size=4, num_pages=8, max_model_len=16, shapes=((4, 1),))
    runner = FakeRunner(limits, accept=lambda request_id, index, position, count: 0)
    runner.dispatch(good_plan())
    return runner


def wide_plan(most: int, **changes: object) -> StepPlan:
    plan = StepPlan(step_id=1, decode_rows=(0,), decode_positions=(5,), row_tokens=(most,), width=4)
    return dataclasses.replace(plan, **changes)


def test_wrong_drafts_leave_what_nobody_may_read() -> None:
    runner = runner_with_wrong_drafts()
    result = runner.dispatch(wide_plan(3)).result()
    assert (result.token_ids, result.counts, result.drafts) == ([7], [1], [[Drafted(2, 0)]])
    assert runner._pages[7][:2] == [5, 6] and all(left is not None and left < 0 for left in runner._pages[7][2:])
    # The next token of the row overwrites the first of them; then a row claims that the page holds eight tokens.
    runner.dispatch(wide_plan(1, step_id=2, decode_positions=(6,)))
    assert runner._pages[7][:3] == [5, 6, 7]
    setup = dataclasses.replace(good_setup(row=1), num_tokens=9, prompt_len=9, token_ids=(1, 2, 3, 4, 5, 6, 7, 8))
    claim = StepPlan(
        step_id=3,
        chunks=(Chunk(1, 8, (9,), True),),
        setups=(setup,),
        grants=(PageGrant(1, 0, (3, 7, 5)),),
    )
    with pytest.raises(AssertionError, match=r"reads \[1, 2, 3, 4, 5, 6, 7, -\d+\]"):
        runner.dispatch(claim)


def test_wrong_drafts_write_into_pages_of_their_row_alone() -> None:
    with pytest.raises(AssertionError, match="no page for position 8"):
        runner_with_wrong_drafts().dispatch(wide_plan(4))
    runner = runner_with_wrong_drafts()
    other = StepPlan(
        step_id=1, chunks=(Chunk(1, 4, (5,), True),), setups=(good_setup(4, row=1),), grants=(PageGrant(1, 0, (3, 7)),)
    )
    runner._num_users[7] += 1  # another row was given the page in which this one goes on
    with pytest.raises(AssertionError, match="page 7 is written while 3 rows use it"):
        runner.dispatch(other)
    runner = runner_with_wrong_drafts()
    runner._num_users[7] += 1
    with pytest.raises(AssertionError, match="page 7 is written while 2 rows use it"):
        runner.dispatch(wide_plan(3))


def test_rounds_end_with_a_token_that_ends_the_row() -> None:
    limits = make_limits(max_rows=1, num_pages=20, max_model_len=40, shapes=((4, 3),))
    runner = FakeRunner(limits, accept=lambda request_id, index, position, count: count)
    seq = Sequence(make_request("a", [1, 2], 30, stop=[9]), 0, 0, 40)
    seq.row = 0
    pages = PageGrant(0, 0, (1, 2, 3, 4))
    runner.dispatch(StepPlan(step_id=0, chunks=(Chunk(0, 0, (1, 2), True),), setups=(row_setup(seq),), grants=(pages,)))
    plan = StepPlan(step_id=1, decode_rows=(0,), decode_positions=(2,), row_tokens=(12,), width=4, rounds=3)
    result = runner.dispatch(plan).result()
    assert (result.token_ids, result.counts) == ([4, 5, 6, 7, 8, 9], [6])
    assert result.drafts == [[Drafted(3, 3), Drafted(3, 1)]], "of the second round `8` was accepted, and `9` ends it"
