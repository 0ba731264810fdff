"""Plans are values: they survive JSON, what a log holds can be replayed, and a field is declared in one place."""

import dataclasses
import json
from typing import NamedTuple

import pytest

from jaxserve.api import SamplingParams, StructuredOutput
from jaxserve.hosts import frames
from jaxserve.runtime.pipeline import split_plan
from jaxserve.sched import StepPlan, create_scheduler
from jaxserve.sched.plan import (
    AdapterLoad,
    Bucket,
    Chunk,
    Encode,
    PageCopy,
    PageGrant,
    PageLoad,
    PageSave,
    Parts,
    PicturePlace,
    RowDraft,
    RowMask,
    RowPicture,
    RowSetup,
)
from jaxserve.sched.record import StepRecord
from jaxserve.testing import FakeRunner, drive, make_limits, make_request
from jaxserve.values.content import Adapter


def test_a_log_of_plans_replays_to_the_same_tokens():
    limits = make_limits(max_rows=3, num_pages=24, page_size=2, max_model_len=30)
    runner = FakeRunner(limits, mode="context")
    sampling = SamplingParams(n=2, max_tokens=10, logit_bias={3: 1.5}, logprobs=1, prompt_logprobs=1, stop=["x"])
    requests = [make_request(f"r{i}", [i, 1, 2, 3, 4, 5], 10, sampling=sampling, stop=[7]) for i in range(4)]
    first = drive(create_scheduler("fcfs", limits), runner, requests)
    log = [plan.to_json() for plan in runner.plans]
    assert all("\n" not in line for line in log)
    assert any(p.copies for p in runner.plans)
    again = FakeRunner(limits, mode="context")
    results = [again.dispatch(StepPlan.from_json(line)).result() for line in log]
    assert again.plans == runner.plans
    seen = {token for result in results for token in result.token_ids}
    assert {token for o in first.values() for token in o.token_ids} <= seen


def test_a_prompt_travels_once() -> None:
    """In its chunks; the setup has what no chunk brings, and all where sampling looks back."""
    limits = make_limits(max_rows=3, num_pages=64, page_size=4, max_model_len=64)
    scheduler, runner = create_scheduler("fcfs", limits), FakeRunner(limits, mode="context")
    prompt = [*range(1, 30)]
    plain, looking_back = SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, presence_penalty=1.0)
    drive(scheduler, runner, [make_request("first", prompt, 2, sampling=plain)])
    [setup] = [setup for plan in runner.plans for setup in plan.setups]
    assert (setup.num_tokens, setup.token_ids) == (29, ())
    numbers = json.dumps([json.loads(plan.to_json()) for plan in runner.plans]).count("17")
    assert numbers == 1, "each token of the prompt stands in one place"
    runner.plans.clear()
    requests = [
        make_request("cached", prompt, 2, sampling=plain),
        make_request("all", prompt, 2, sampling=looking_back),
    ]
    drive(scheduler, runner, requests)
    cached, whole = sorted((s for plan in runner.plans for s in plan.setups), key=lambda s: len(s.token_ids))
    chunks = [chunk for plan in runner.plans for chunk in plan.chunks if chunk.row == cached.row]
    brought = [token_id for chunk in chunks for token_id in chunk.token_ids]
    assert len(cached.token_ids) == 28 and [*cached.token_ids, *brought] == prompt
    assert list(whole.token_ids) == prompt


class Visit(NamedTuple):
    row: int
    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WiderPlan(StepPlan):
    """What a later version would declare, and nothing else."""

    visits: tuple[Visit, ...] = ()
    weights: tuple[float, ...] = dataclasses.field(default=(), metadata=Parts.DEALT.field)
    mood: str | None = dataclasses.field(default=None, metadata=Parts.EACH.field)


SETUP = RowSetup(
    row=1,
    request_id="é",
    index=1,
    seed=2**62,
    prompt_len=2,
    num_tokens=3,
    token_ids=(5, 6, 7),
    sampling=SamplingParams(
        temperature=0.5, logit_bias={7: 1.5}, structured=StructuredOutput(regex="a+"), frequency_penalty=1.0
    ),
    stop_token_ids=(1,),
    bad_word_ids=((1, 2),),
    pictures=(RowPicture(7, 90, (1, 2, 3), "c0ffee"),),
)
WIDE = WiderPlan(
    step_id=3,
    decode_rows=(0, 4),
    decode_positions=(7, 2),
    chunks=(Chunk(1, 0, tuple(range(100)), True),),
    setups=(SETUP,),
    grants=(PageGrant(1, 0, (3, 4)),),
    saves=(PageSave(5, 0), PageSave(6, 1)),
    loads=(PageLoad(2, 5),),
    copies=(PageCopy(1, 2),),
    freed_rows=(6,),
    masks=(RowMask.of(1, b"\x01\x02"), RowMask.of(1, b"\x04", 1)),
    drafts=(RowDraft(1, (7,)),),
    row_tokens=(3, 1),
    width=2,
    rounds=2,
    encodes=(Encode(digest="c0ffee", grid=(1, 2, 3), num_tokens=90, page_ids=(4, 5), pixels=b"not written"),),
    pictures=(PicturePlace(1, 7, 90, (4, 5)),),
    adapters=(AdapterLoad.of(2, Adapter(digest=b"d" * 32, name="tuned", num_bytes=9, weights="not written")),),
    visits=(Visit(1, ("a", "b")), Visit(2, ())),
    weights=(0.5, 0.25),
    mood="calm",
)


def test_a_field_that_is_declared_arrives_everywhere() -> None:
    """JSON, the frames to other processes, step records and the parts of a pipeline follow from the class."""
    assert all(getattr(WIDE, f.name) != f.default for f in dataclasses.fields(WIDE))
    assert WiderPlan.from_json(WIDE.to_json()) == WIDE
    frame = frames.decode(frames.encode(frames.Frame(frames.Kind.PLAN, 3, WIDE.to_json().encode())))
    assert WiderPlan.from_json(frame.payload.decode()) == WIDE
    record = StepRecord(
        plan=WIDE, bucket=Bucket(128, 8, False), token_ids=(1, 2, 3, 4), counts=(2, 1, 1), start_s=0.0,
        schedule_ms=0.0, pack_ms=0.0, device_ms=0.0, wait_ms=0.0, commit_ms=0.0,
    )  # fmt: skip
    assert WiderPlan.from_fields(json.loads(record.to_json())["plan"]) == WIDE
    first, second = split_plan(WIDE, 2)
    assert isinstance(first, WiderPlan) and isinstance(second, WiderPlan)
    assert (first.visits, second.visits) == (WIDE.visits, ())
    assert (first.masks, second.masks) == (WIDE.masks, ())
    assert (first.weights, second.weights) == ((0.5,), (0.25,))
    assert first.pictures == second.pictures == WIDE.pictures
    assert (first.encodes, second.encodes) == (WIDE.encodes, ())
    assert first.encodes[0].pixels and "not written" not in WIDE.to_json()
    assert first.mood == second.mood == "calm"


def test_json_that_is_no_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="StepPlan has no mood, visits, weights"):
        StepPlan.from_json(WIDE.to_json())
    with pytest.raises(TypeError, match="step_id"):
        StepPlan.from_json("{}")
