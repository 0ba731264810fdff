"""The sums of a summary by hand."""

import io

from rich.console import Console

from jaxserve.lab.replay.summary import show_summary, summarize
from jaxserve.sched import Bucket, Chunk, StepPlan
from jaxserve.sched.draft_counts import DraftTotals, sum_drafts
from jaxserve.sched.plan import Drafted
from jaxserve.sched.record import LogEnd, LogHeader, StepRecord
from jaxserve.testing import make_limits

HEADER = LogHeader(limits=make_limits(), model="m", policy="sjf", vocab_size=9)


def _record(step_id: int, start_s: float, *, device_ms: float, chunk: int = 0, decoding: int = 0, **more) -> StepRecord:
    plan = StepPlan(
        step_id=step_id,
        decode_rows=tuple(range(decoding)),
        decode_positions=(9,) * decoding,
        chunks=(Chunk(3, 0, (1,) * chunk, True),) if chunk else (),
    )
    times = {"schedule_ms": 1.0, "pack_ms": 2.0, "device_ms": device_ms, "wait_ms": 5.0, "commit_ms": 3.0}
    bucket = Bucket(8, 4, False) if chunk else Bucket(4, 4, True)
    drawn = tuple(range(len(plan.sampled_rows)))
    return StepRecord(plan=plan, bucket=bucket, token_ids=drawn, start_s=start_s, **{**times, **more})


def _shown(*records: StepRecord, end: LogEnd | None) -> str:
    console = Console(file=io.StringIO(), width=160)
    show_summary(HEADER, summarize(records), end, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_sums_and_the_wall() -> None:
    # Planned and launched at 0.003, ready at 0.013; the second was launched at 0.006 and waits for the first.
    first = _record(0, 0.0, device_ms=10.0, chunk=5)
    second = _record(1, 0.003, device_ms=20.0, decoding=3)
    third = _record(2, 0.016, device_ms=30.0, chunk=2, decoding=2)
    summary = summarize([first, second, third])
    assert list(summary.kinds) == ["prefill", "decode", "mixed"]
    assert (summary.kinds["prefill"].tokens, summary.kinds["prefill"].slots, summary.kinds["prefill"].context) == (
        5,
        8,
        5,
    )
    assert (summary.kinds["mixed"].rows, summary.kinds["mixed"].tokens, summary.kinds["mixed"].context) == (3, 4, 22)
    assert (summary.total.steps, summary.total.drawn, summary.total.ms["device_ms"]) == (3, 7, 60.0)
    assert abs(summary.wall_s - (0.013 + 0.020 + 0.030 + 0.003)) < 1e-9
    text = _shown(first, second, third, end=LogEnd(records=3, dropped=0))
    assert "0.066 s from first to last. Device at work: 91%, host waiting for it: 23%. 7 tokens drawn." in text
    assert "missing" not in text and "no end" not in text


def test_what_is_missing_is_said() -> None:
    record = _record(4, 0.0, device_ms=1.0, decoding=1, missing=3)
    assert "3 steps are missing" in _shown(record, end=None)
    assert "5 steps are missing" in _shown(record, end=LogEnd(records=1, dropped=5))
    assert "the log has no end" in _shown(record, end=None)


def test_a_log_of_nothing() -> None:
    assert "no steps" in _shown(end=LogEnd(records=0, dropped=0))


def test_drafts_are_summed_by_place() -> None:
    plan = StepPlan(step_id=1, decode_rows=(0, 1), decode_positions=(9, 9), row_tokens=(6, 6), width=3, rounds=2)
    drafts = ((Drafted(2, 2), Drafted(2, 1)), (Drafted(2, 0), Drafted(1, 1)))
    times = {"schedule_ms": 1.0, "pack_ms": 2.0, "device_ms": 9.0, "wait_ms": 5.0, "commit_ms": 3.0}
    wide = StepRecord(
        plan=plan,
        bucket=Bucket(12, 4, True, 3, 8),
        token_ids=(1,) * 8,
        start_s=0.0,
        counts=(5, 3),
        drafts=drafts,
        **times,
    )
    record = _record(0, 0.0, device_ms=1.0, decoding=2)
    totals = summarize([record, wide]).total.drafts.totals()
    assert totals == (4, 7, 4, (4, 2), (3, 1))
    text = _shown(record, wide, end=None)
    assert "A row drew 2.50 tokens in a decode step, and 2.00 in a round of a step of several." in text
    assert "7 drafts, 57% accepted. By place, of drafts whose predecessors were accepted: 75%, 50%." in text
    assert "drafts" not in _shown(record, end=None)
    assert sum_drafts([totals, DraftTotals(), DraftTotals(1, 3, 2, (1, 1, 1), (1, 1, 0))]) == (
        5, 10, 6, (5, 3, 1), (4, 2, 0),
    )  # fmt: skip
