"""Step records as lines: nothing changes on the way through a file, and a damaged file is named, not believed."""

import contextlib
import dataclasses
import json
import random
from pathlib import Path

import pytest

from jaxserve.api import SamplingParams
from jaxserve.errors import StepLogError
from jaxserve.sched import Bucket, Chunk, PageCopy, PageGrant, PoolSpan, RowMask, RowSetup, StepPlan
from jaxserve.sched.plan import Drafted
from jaxserve.sched.record import (
    LogEnd,
    LogHeader,
    StepLog,
    StepRecord,
    context_tokens,
    read_header,
    read_records,
    rounds_run,
)
from jaxserve.testing import make_limits

LIMITS = make_limits(max_rows=8, num_pages=20)
HEADER = LogHeader(
    limits=LIMITS, model="m", policy="fcfs", vocab_size=259, replica=2, started_at=12.5, settings={"kind": "fake"}
)


def _plan(step_id: int = 3) -> StepPlan:
    sampling = SamplingParams(temperature=0.5, logit_bias={7: 1.5}, structured={"regex": "a+"}, stop=["é\n"])
    setup = RowSetup(
        row=1, request_id="r'\"\u2028", index=1, seed=2**62, prompt_len=2, num_tokens=3, token_ids=(5, 6, 7),
        sampling=sampling, stop_token_ids=(1,), bad_word_ids=((1, 2),),
    )  # fmt: skip
    return StepPlan(
        step_id=step_id,
        decode_rows=(0, 4),
        decode_positions=(7, 2),
        chunks=(Chunk(1, 4, (5, 6, 7), True), Chunk(2, 0, (9,), False, True, PoolSpan(0, 1))),
        setups=(setup,),
        grants=(PageGrant(1, 0, (3, 4)),),
        copies=(PageCopy(1, 2),),
        freed_rows=(6,),
        masks=(RowMask.of(1, b"\x01\x02\x03\x04"),),
    )


def _record(step_id: int = 3, **changes) -> StepRecord:
    record = StepRecord(
        plan=_plan(step_id), bucket=Bucket(8, 8, False), token_ids=(3, 4, 5), start_s=1.5, schedule_ms=0.25,
        pack_ms=0.5, device_ms=12.5, wait_ms=10.0, commit_ms=0.125,
    )  # fmt: skip
    return dataclasses.replace(record, **changes)


def _write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_what_follows_from_the_plan() -> None:
    record = _record()
    assert (record.num_tokens, record.padded_tokens, record.host_ms) == (6, 2, 0.875)
    assert record.context_tokens == context_tokens(record.plan) == 8 + 3 + 7 + 1
    raw = json.loads(record.to_json())
    assert (raw["num_tokens"], raw["padded_tokens"], raw["context_tokens"]) == (6, 2, 19)


def test_a_line_is_one_line_and_loses_nothing() -> None:
    record = _record(missing=4)
    line = record.to_json()
    assert "\n" not in line
    assert StepRecord.from_json(line) == record


def test_a_step_says_how_many_tokens_its_rows_drew() -> None:
    plan = StepPlan(step_id=3, decode_rows=(0, 4), decode_positions=(7, 2), row_tokens=(3, 2))
    record = _record(plan=plan, bucket=Bucket(4, 4, True), token_ids=(3, 4, 5), counts=(1, 2))
    assert (record.num_tokens, record.padded_tokens) == (2, 2)
    assert record.context_tokens == 8 + 3
    assert StepRecord.from_json(record.to_json()) == record
    for wrong in (None, (1, 1), (3,)):
        with pytest.raises(ValueError, match="3 tokens|counts"):
            StepRecord.from_json(dataclasses.replace(record, counts=wrong).to_json())


def test_a_step_says_what_became_of_its_drafts() -> None:
    plan = StepPlan(step_id=3, decode_rows=(0, 4), decode_positions=(7, 2), row_tokens=(6, 4), width=3, rounds=4)
    drafts = ((Drafted(2, 2), Drafted(2, 0)), (Drafted(0, 0), Drafted(2, 1), Drafted(0, 0)))
    record = _record(
        plan=plan, bucket=Bucket(12, 4, True, 3, 8), token_ids=tuple(range(8)), counts=(4, 4), drafts=drafts
    )
    assert StepRecord.from_json(record.to_json()) == record
    assert (record.num_tokens, record.padded_tokens) == (6, 6)
    assert rounds_run(record) == 3, "of the four that it could have had"
    assert rounds_run(_record()) == 1
    assert rounds_run(_record(counts=(1, 4), token_ids=(1,) * 5)) == 4, "without drafts a round draws one token"
    for wrong in (drafts[:1], ((Drafted(2, 3),), drafts[1]), ((Drafted(3, 2), Drafted(0, 0)), ((1, 1),))):
        with pytest.raises(ValueError, match="drafts .* of rows that drew"):
            StepRecord.from_json(dataclasses.replace(record, drafts=wrong).to_json())


def test_times_are_kept_to_a_tenth_of_a_microsecond() -> None:
    rng = random.Random(1)
    times = {name: rng.uniform(0, 100) for name in ("start_s", "schedule_ms", "device_ms", "commit_ms")}
    found = StepRecord.from_json(_record(**times).to_json())
    assert all(abs(getattr(found, name) - value) < 1e-3 for name, value in times.items())
    assert abs(found.device_ms - times["device_ms"]) <= 5.1e-5


def test_a_file_is_read_as_a_stream(tmp_path: Path) -> None:
    records = [_record(step_id) for step_id in range(5)]
    end = LogEnd(records=5, dropped=0)
    path = _write(tmp_path / "log", HEADER.to_json(), *(r.to_json() for r in records), end.to_json())
    assert read_header(path) == HEADER
    assert list(read_records(path)) == records
    with StepLog(path) as log:
        steps = iter(log)
        assert next(steps) == records[0]
        assert log.end is None and log.line == 2
        assert list(steps) == records[1:]
        assert log.end == end


def test_a_log_without_an_end_is_whole(tmp_path: Path) -> None:
    path = _write(tmp_path / "log", HEADER.to_json(), _record().to_json())
    with StepLog(path) as log:
        assert list(log) == [_record()]
        assert log.end is None


@pytest.mark.parametrize(
    "first",
    ["", "{}", "[]", "null", "3", "not json", '{"format":"other","version":1}', '{"prompt":"text"}', "\udcff"],
)
def test_a_foreign_file_is_refused(tmp_path: Path, first: str) -> None:
    path = tmp_path / "log"
    path.write_bytes((first + "\n").encode("utf-8", "surrogateescape"))
    with pytest.raises(StepLogError, match=r"log, line 1: .*(no header|UTF-8)"):
        read_header(path)


def test_an_empty_file_and_an_absent_one(tmp_path: Path) -> None:
    with pytest.raises(StepLogError, match="line 1: this is no header"):
        list(read_records(_write(tmp_path / "log")))
    with pytest.raises(StepLogError, match="No such file"):
        list(read_records(tmp_path / "absent"))


def test_another_version_is_named(tmp_path: Path) -> None:
    header = {**json.loads(HEADER.to_json()), "version": 7}
    with pytest.raises(StepLogError, match="line 1: version 7 of the format; this jaxserve reads 4"):
        read_header(_write(tmp_path / "log", json.dumps(header)))


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw.pop("plan"),
        lambda raw: raw.pop("pack_ms"),
        lambda raw: raw.update(device_ms="long"),
        lambda raw: raw.update(num_tokens=7),
        lambda raw: raw.update(step_id=4),
        lambda raw: raw["token_ids"].pop(),
        lambda raw: raw["plan"].pop("decode_positions"),
        lambda raw: raw["plan"].update(grant=[]),
        lambda raw: raw["plan"]["setups"][0]["sampling"].update(temperature=-1),
        lambda raw: raw["plan"]["setups"][0]["sampling"].update(unknown=1),
        lambda raw: raw.update(bucket=[8, 8]),
    ],
)
def test_a_damaged_record_is_named_with_its_line(tmp_path: Path, damage) -> None:
    raw = json.loads(_record().to_json())
    damage(raw)
    path = _write(tmp_path / "log", HEADER.to_json(), _record(2).to_json(), json.dumps(raw))
    records = read_records(path)
    assert next(records) == _record(2)
    with pytest.raises(StepLogError, match="line 3: it is no record of a step"):
        next(records)


def test_a_line_cut_short(tmp_path: Path) -> None:
    path = _write(tmp_path / "log", HEADER.to_json(), _record(2).to_json())
    with path.open("a") as file:
        file.write(_record(3).to_json()[:100])
    records = read_records(path)
    next(records)
    with pytest.raises(StepLogError, match="line 3: it is cut short"):
        next(records)


def test_nothing_follows_the_end(tmp_path: Path) -> None:
    end = LogEnd(records=0, dropped=0).to_json()
    path = _write(tmp_path / "log", HEADER.to_json(), end, _record().to_json())
    with pytest.raises(StepLogError, match="line 3: something follows"):
        list(read_records(path))


def test_every_cut_of_a_file_is_an_error_or_fewer_records(tmp_path: Path) -> None:
    """No cut makes another record out of one."""
    path = _write(tmp_path / "log", HEADER.to_json(), _record(1).to_json(), _record(2).to_json())
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        found = []
        with contextlib.suppress(StepLogError):
            found += read_records(path)
        assert found == [_record(1), _record(2)][: len(found)]
