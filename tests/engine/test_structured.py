"""Constrained output in the loop, on a fake device that draws the nearest allowed byte: masks, waiting, every end."""

import json
import random

import pytest

from jaxserve.api import FinishReason, RequestOptions, SamplingParams
from jaxserve.engine import Engine, ModelInfo, Update
from jaxserve.engine.structured import RowMasks
from jaxserve.errors import InvalidRequest, UnsupportedOption
from jaxserve.sched import ContinuousScheduler, SchedulerOptions, StepPlan, create_scheduler
from jaxserve.sched.state import Sequence
from jaxserve.testing import ByteTokenizer, FakeRunner, make_limits, with_shapes

FREE = SamplingParams(temperature=0.0, max_tokens=12)


def bound(max_tokens: int = 40, **form) -> SamplingParams:
    more = {name: form.pop(name) for name in list(form) if name in SamplingParams.__dataclass_fields__}
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, structured=form, **more)


class Parts:
    """An engine on a fake runner; `updates` by request id."""

    def __init__(
        self, *, mode="context", tokenizer: bool = True, eos: tuple[int, ...] = (257,), shapes=(), **limits
    ) -> None:
        limits = with_shapes(make_limits(**limits), *shapes)
        self.runner = FakeRunner(limits, vocab_size=ByteTokenizer.vocab_size, mode=mode)
        options = SchedulerOptions(watermark=0.0, growth=0.0)  # so that a small pool preempts
        scheduler = create_scheduler("fcfs", self.runner.limits, options=options)
        assert isinstance(scheduler, ContinuousScheduler)
        self.scheduler = scheduler
        self.engine = Engine(
            runner=self.runner,
            scheduler=scheduler,
            tokenizer=ByteTokenizer() if tokenizer else None,
            model=ModelInfo(name="fake", vocab_size=259, max_model_len=64, eos_token_ids=eos),
        )
        self.updates: dict[str, list[Update]] = {}

    def submit(self, prompt: str, sampling: SamplingParams, **options) -> str:
        request = self.engine.prepare(prompt, sampling, RequestOptions(**options))
        self.engine.submit(request, self.updates.setdefault(request.request_id, []).append)
        return request.request_id

    def run(self) -> None:
        self.engine.run_until_idle()
        self.scheduler.check()
        assert self.scheduler.num_held_pages == 0

    def text(self, request_id: str, index: int = 0) -> str:
        return "".join(u.text for u in self.updates[request_id] if u.index == index)

    def end(self, request_id: str, index: int = 0) -> Update:
        return next(u for u in self.updates[request_id] if u.index == index and u.finish_reason is not None)


@pytest.mark.parametrize(
    "again", [SamplingParams(max_tokens=12, seed=1), bound(regex="[ab]{2}c", seed=1)], ids=["free", "bound"]
)
def test_a_row_makes_no_drafts_for_another_request_of_its_id(again: SamplingParams) -> None:
    """A row is freed by the next plan, and drafts are made before it."""
    parts = Parts(mode="context", shapes=((4, 1),))
    parts.submit("p", bound(regex="[ab]{20}"), request_id="x")
    for _ in range(4):
        parts.engine.step()
    parts.engine.abort("x")
    parts.submit("p", again, request_id="x")
    parts.run()
    alone = Parts(mode="context", shapes=((4, 1),))
    alone.submit("p", again, request_id="x")
    alone.run()
    assert parts.text("x").endswith(alone.text("x")) and alone.text("x")


def test_every_form_holds() -> None:
    parts = Parts()
    number = parts.submit("n", bound(regex="[0-9]{3}-x"))
    choice = parts.submit("c", bound(choice=("red", "green")))
    value = parts.submit("j", bound(json_schema={"type": "object", "properties": {"a": {"type": "integer"}}, "required":
                                                 ["a"], "additionalProperties": False, "x-guidance":
                                                 {"whitespace_flexible": False}}))  # fmt: skip
    grammar = parts.submit("g", bound(grammar='start: "<" /[a-c]{2}/ ">"'))
    parts.run()
    assert parts.text(number)[3:] == "-x" and parts.text(number)[:3].isdigit()
    assert parts.text(choice) in ("red", "green")
    assert parts.text(grammar)[0] + parts.text(grammar)[-1] == "<>"
    for name in (number, choice, grammar):
        assert (parts.end(name).finish_reason, parts.end(name).stop_reason) == (FinishReason.STOP, None)
    if parts.end(value).finish_reason is FinishReason.STOP:
        assert isinstance(json.loads(parts.text(value))["a"], int)
    else:
        assert parts.end(value).finish_reason is FinishReason.LENGTH


def test_alone_it_runs_in_every_step_and_beside_others_in_every_other() -> None:
    parts = Parts(mode="count")
    parts.submit("a", bound(regex="[a-z]{6}"))
    parts.run()
    assert [plan.num_rows for plan in parts.runner.plans] == [1] * 7, "six letters and the end, no step wasted"
    assert all(len(plan.masks) == 1 for plan in parts.runner.plans)

    parts = Parts(mode="count")
    parts.submit("b", FREE)
    held = parts.submit("a", bound(regex="[a-z]{4}"))
    parts.run()
    rows = [plan.num_rows for plan in parts.runner.plans]
    assert rows[:8] == [2, 1, 2, 1, 2, 1, 2, 1], rows
    assert len(parts.text(held)) == 4


def test_n_sequences_have_a_matcher_each() -> None:
    parts = Parts(max_rows=4)
    name = parts.submit("x", bound(n=6, regex="[ -z]{5}[0-9]"))
    parts.run()
    texts = {parts.text(name, i) for i in range(6)}
    assert len(texts) > 1 and all(t[5].isdigit() and len(t) == 6 for t in texts), texts


def test_preempted_rows_go_on_where_they_were() -> None:
    asked = [(f"p{i}", bound(20, regex="([a-z]{2}[0-9]){6}")) for i in range(4)]
    alone = []
    for prompt, sampling in asked:
        parts = Parts()
        name = parts.submit(prompt, sampling, request_id="r")
        parts.run()
        alone.append(parts.text(name))
    tight = Parts(num_pages=18, page_size=2)
    names = [tight.submit(prompt, sampling, request_id=f"r{i}") for i, (prompt, sampling) in enumerate(asked)]
    tight.run()
    assert tight.scheduler.num_preemptions > 0
    for name in names:
        text = tight.text(name)
        assert len(text) == 18 and all(text[i].isdigit() == (i % 3 == 2) for i in range(18)), text


def test_max_tokens_and_stop_strings_cut_and_say_so() -> None:
    parts = Parts(mode="count")
    cut = parts.submit("x", bound(3, regex="[a-z]{9}"))
    stopped = parts.submit("x", bound(regex="abc[d-z]{9}", stop=["bc"]))
    other = parts.submit("x", bound(regex="abc[d-z]{9}", stop_token_ids=[ord("b")]))
    parts.run()
    assert (parts.end(cut).finish_reason, len(parts.text(cut))) == (FinishReason.LENGTH, 3)
    assert (parts.end(stopped).stop_reason, parts.text(stopped)) == ("bc", "a")
    assert (parts.end(other).stop_reason, parts.text(other)) == (ord("b"), "a")


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_a_complete_text_ends_though_min_tokens_asks_for_more(skip_special_tokens: bool) -> None:
    parts = Parts()
    more = {"min_tokens": 9, "skip_special_tokens": skip_special_tokens}
    name, both = parts.submit("x", bound(regex="abc", **more)), parts.submit("y", bound(regex="abc", n=2, **more))
    parts.run()
    for ended in (parts.end(name), parts.end(both, 0), parts.end(both, 1)):
        assert (ended.finish_reason, ended.stop_reason, ended.error) == (FinishReason.STOP, None, None)
    assert [parts.text(name), parts.text(both, 0), parts.text(both, 1)] == ["abc"] * 3
    assert [i for u in parts.updates[name] for i in u.token_ids] == [*b"abc", 257]


def test_nothing_is_kept_of_what_has_ended() -> None:
    parts = Parts()
    done, gone = parts.submit("x", bound(regex="[a-z]{3}")), parts.submit("y", bound(regex="[a-z]{30}"))
    for _ in range(12):
        parts.engine.step()
    assert parts.updates[done][-1].last
    parts.engine.abort(gone)
    parts.run()
    assert not parts.engine._masks._places


def test_an_abort_leaves_others_alone() -> None:
    parts = Parts()
    gone, kept = parts.submit("x", bound(regex="[a-z]{30}")), parts.submit("y", bound(regex="[a-z]{5}"))
    for _ in range(4):
        parts.engine.step()
    parts.engine.abort(gone)
    new = parts.submit("z", bound(regex="[0-9]{5}"))
    plain = parts.submit("w", FREE)
    parts.run()
    assert parts.end(gone).finish_reason is FinishReason.ABORT
    assert parts.text(kept).isalpha() and parts.text(new).isdigit() and parts.updates[plain][-1].last


def test_both_masks_hold_and_an_empty_one_ends_its_request_alone() -> None:
    parts = Parts()
    both = parts.submit("x", bound(regex="[a-z]{4}", allowed_token_ids=[ord("c"), ord("q"), ord("7")]))
    stuck = parts.submit("y", bound(regex="[a-z]7[a-z]8", allowed_token_ids=[ord("c"), ord("7")]))
    free = parts.submit("z", FREE)
    with pytest.raises(InvalidRequest, match="allowed_token_ids has no token"):
        parts.submit("x", bound(regex="[a-z]", allowed_token_ids=[ord("7")]))
    with pytest.raises(InvalidRequest, match="259"):
        parts.submit("x", bound(regex="[a-z]", allowed_token_ids=[259]))
    parts.run()
    assert set(parts.text(both)) <= {"c", "q"} and len(parts.text(both)) == 4
    assert isinstance(parts.end(stuck).error, InvalidRequest) and "after 3 tokens" in str(parts.end(stuck).error)
    assert parts.end(free).error is None
    assert parts.engine.failure is None


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="look-ahead"):
        Parts().submit("x", bound(regex="(?=a)"))
    with pytest.raises(UnsupportedOption, match="tokenizer"):
        Parts(tokenizer=False).engine.prepare({"prompt_token_ids": [1]}, bound(regex="a"))
    with pytest.raises(UnsupportedOption, match="end-of-sequence"):
        Parts(eos=()).submit("x", bound(regex="a"))


def test_masks_travel_with_the_plan() -> None:
    parts = Parts()
    parts.submit("x", bound(regex="[ab]c"))
    parts.run()
    plans = parts.runner.plans
    assert [[i for i in range(259) if plan.masks[0].allows(i)] for plan in plans] == [[97, 98], [99], [257]]
    for plan in plans:
        assert StepPlan.from_json(plan.to_json()) == plan


def test_tokens_without_a_choice_come_together() -> None:
    parts = Parts(shapes=[(4, 1)])
    name = parts.submit("x", bound(regex="[ab]cdefgh[0-9]"))
    parts.run()
    plans = parts.runner.plans
    assert parts.text(name)[1:7] == "cdefgh" and parts.end(name).finish_reason is FinishReason.STOP
    # A letter of two, then four tokens at once, then two and the digit, then the end.
    assert [plan.width for plan in plans] == [1, 4, 4, 1]
    assert [draft.token_ids for plan in plans for draft in plan.drafts] == [(*b"cde",), (*b"gh",)]
    allowed = [[i for i in range(259) if mask.allows(i)] for mask in plans[1].masks]
    assert allowed == [[ord(c)] for c in "cdef"] and [mask.place for mask in plans[1].masks] == [0, 1, 2, 3]
    assert len(plans[2].masks) == 3 and sum(map(plans[2].masks[2].allows, range(259))) == 10
    assert parts.end(name).drafts == (5, 5)
    [stats] = parts.engine.stats
    assert stats.totals().grammar_drafts.accepted == 5 and stats.totals().drafts.drafted == 0


def test_what_the_sequence_said_before_is_tried_where_there_is_a_choice() -> None:
    parts = Parts(mode="count", shapes=[(4, 1)])
    name = parts.submit("abcdefgh", bound(regex="[a-z]{8}"))  # counts on from the h: ijklmnop
    again = parts.submit("ijklmnop ijkl", bound(9, regex="[a-z]{8}"))
    parts.run()
    assert parts.text(name) == "ijklmnop" and parts.text(again) == "mnopqrst"
    drafts = [draft.token_ids for plan in parts.runner.plans for draft in plan.drafts if draft.token_ids]
    assert (*b"nop",) in drafts, drafts
    assert parts.end(again).drafts.accepted >= 3, "nop, and a space that the grammar does not let the host draft"
    assert not any(ord(" ") in draft for draft in drafts)


@pytest.mark.slow
def test_drafts_change_no_text() -> None:
    """Of crowds that are cut, stopped, preempted, forked and held back in every way."""
    num_drafted = num_preempted = 0
    for seed in range(30):
        rng = random.Random(seed)
        asked = []
        for _ in range(rng.randint(2, 7)):
            form = rng.choice(
                [
                    {"regex": f"[a-c]{{{rng.randint(1, 4)}}}-more-[xyz]{{{rng.randint(1, 9)}}}"},
                    {"choice": ("red and green", "red and blue", "grey")},
                    {"regex": "(abc|abd){1,9}", "stop": ["dab"]},
                    {"regex": "(hello ){1,4}", "min_tokens": 3},
                    {"regex": "[a-c]+", "allowed_token_ids": [*b"abz"], "n": 3},
                    {"json_schema": {"enum": [{"name": "fox"}, {"name": "fix", "age": 3}]}},
                ]
            )
            sampling = bound(rng.randint(3, 24), **form) if rng.random() < 0.8 else FREE
            prompt = "".join(rng.choices("abc", k=rng.randint(1, 12)))
            asked.append((prompt, sampling, rng.randint(0, 3)))
        found = []
        pages = {"num_pages": rng.choice([14, 40]), "page_size": rng.choice([2, 4]), "max_rows": rng.randint(1, 5)}
        for shapes in ((), [(2, 1), (4, 1)], [(4, 3), (1, 3)]):
            parts = Parts(shapes=shapes, **pages)
            for i, (prompt, sampling, wait) in enumerate(asked):
                parts.submit(prompt, sampling, request_id=f"r{i}")
                for _ in range(wait):
                    parts.engine.step()
            parts.run()
            num_drafted += sum(len(draft.token_ids) for plan in parts.runner.plans for draft in plan.drafts)
            num_preempted += parts.scheduler.num_preemptions
            found.append(
                [
                    (parts.text(name, index), parts.end(name, index).finish_reason, parts.end(name, index).stop_reason)
                    for name, (_, sampling, _) in zip(parts.updates, asked, strict=True)
                    for index in range(sampling.n)
                ]
            )
        assert found[0] == found[1] == found[2], seed
    assert num_drafted > 500 and num_preempted > 20, (num_drafted, num_preempted)


def test_without_masks_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowMasks, "put", lambda self, plan, live: plan)
    parts = Parts()
    parts.submit("x", bound(regex="[a-z]{5}"))
    with pytest.raises(AssertionError, match="wrong mask"):
        parts.run()


def test_a_scheduler_that_does_not_wait_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def eager(self, *args) -> None:
        original(self, *args)
        self.stepwise = False

    original = Sequence.__init__
    monkeypatch.setattr(Sequence, "__init__", eager)
    parts = Parts()
    parts.submit("x", bound(regex="[a-z]{5}"))
    with pytest.raises(AssertionError, match="must wait for the commit"):
        parts.run()


def test_random_crowds() -> None:
    """Every request is what it was asked to be, whatever runs beside it."""
    for seed in range(12):
        rng = random.Random(seed)
        pages = {"num_pages": rng.choice([12, 30]), "page_size": rng.choice([2, 4]), "max_rows": rng.randint(1, 5)}
        crowd, asked = Parts(**pages), []
        for i in range(rng.randint(2, 9)):
            length = rng.randint(1, 8)
            sampling = bound(10, regex=f"[a-z]{{{length}}}", n=rng.randint(1, 3)) if rng.random() < 0.6 else FREE
            prompt = "".join(rng.choices("abcdef", k=rng.randint(1, 12)))
            asked.append((crowd.submit(prompt, sampling, request_id=f"r{i}"), prompt, sampling, length))
            for _ in range(rng.randint(0, 3)):
                crowd.engine.step()
            if rng.random() < 0.15:
                crowd.engine.abort(f"r{rng.randrange(i + 1)}")
        crowd.run()
        for name, _, sampling, length in asked:
            for index in range(sampling.n):
                end = crowd.end(name, index)
                if sampling.structured is not None and end.finish_reason is not FinishReason.ABORT:
                    text = crowd.text(name, index)
                    assert len(text) == length and text.isalpha() and end.finish_reason is FinishReason.STOP, text
