"""A stream that is cut after any token and goes on elsewhere is the stream that was never cut.

That holds token for token and text for text, for log-probabilities and ends too.

The demo model with drafts and bursts; each request whole first, then all of its cuts at once, with a salt of their own
so that no page of the first run is there.
"""

import dataclasses
import json
from collections.abc import Sequence

import pytest
from whole import build, scheduler

from jaxserve.api import FinishReason, Known, Request, RequestOptions, Resume, SamplingParams
from jaxserve.engine import Engine, Update
from jaxserve.errors import InvalidRequest

PROMPT = "Once upon a time there was a little fox"
SCHEMA = json.dumps({
    "type": "object",
    "properties": {
        "name": {"enum": ["fox", "owl"]},
        "legs": {"type": "integer"},
        "friends": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
    },
    "required": ["name", "legs", "friends"],
    "additionalProperties": False,
})  # fmt: skip
JSON = {"temperature": 1.2, "seed": 4, "max_tokens": 60, "structured": {"json_schema": SCHEMA}}
SEEDED = {"temperature": 0.9, "seed": 11, "max_tokens": 24}


@dataclasses.dataclass
class Answer:
    """One sequence as its client has it."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple = ()
    end: tuple | None = None

    def take(self, update: Update) -> None:
        assert self.end is None, f"told more after the end: {update}"
        self.token_ids += update.token_ids
        self.text += update.text
        self.logprobs += update.logprobs or ()
        if update.finish_reason is not None:
            assert update.error is None, update.error
            self.end = (update.finish_reason, update.stop_reason)

    @property
    def known(self) -> Known:
        return Known(self.token_ids, len(self.text), self.end is not None)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build(
        "demo",
        model__max_len=256,
        cache__page_size=16,
        cache__num_pages=400,
        runtime__batch_invariant=True,
        speculation__method="ngram",
        speculation__adaptive=False,  # else the times of steps say whether it drafts
        runtime__background_buckets=False,  # and until the shapes for drafts are compiled, it would not
        sched__max_waiting=4096,
    )


def submit(engine: Engine, sampling: SamplingParams, updates: list[Update], **options) -> Request:
    request = engine.prepare(PROMPT, sampling, RequestOptions(**options))
    engine.submit(request, updates.append)
    return request


def answers(sampling: SamplingParams, updates: Sequence[Update]) -> list[Answer]:
    found = [Answer() for _ in range(sampling.n)]
    for update in updates:
        found[update.index].take(update)
    return found


CASES: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0, "max_tokens": 24},
    "seeded": {**SEEDED, "logprobs": 2},
    "filters": {
        **SEEDED,
        "top_p": 0.9,
        "top_k": 30,
        "min_p": 0.02,
        "logit_bias": {300: 4.0},
        "presence_penalty": 1.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.3,
        "bad_words": ["fox", "the little"],
        "min_tokens": 20,
    },
    "several_ends": {**SEEDED, "n": 3, "temperature": 1.3, "stop": ["an", "ee"], "min_tokens": 3, "logprobs": 0},
    "stop_string": {"temperature": 0.0, "max_tokens": 40, "stop": ["lived in a", "named Lily"]},
    "stop_shown": {"temperature": 0.0, "max_tokens": 40, "stop": ["forest"], "include_stop_str_in_output": True},
    "ids_alone": {**SEEDED, "detokenize": False},
    "json": {**JSON, "max_tokens": 40, "presence_penalty": 0.8},
    "half_characters": {**SEEDED, "max_tokens": 30, "structured": {"regex": "([a-z]{2,4}é☕ ){2,4}"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_cut_goes_on_as_if_there_were_none(engine: Engine, name: str) -> None:
    sampling = SamplingParams(**CASES[name])
    whole: list[Update] = []
    request = submit(engine, sampling, whole, echo=name == "filters")
    engine.run_until_idle()
    expected = answers(sampling, whole)
    resumed: list[tuple[Resume, list[Update], Request]] = []
    for cut in range(len(whole)):
        before = answers(sampling, whole[:cut])
        if all(answer.end for answer in before):
            continue
        resume = Resume(sequences=tuple(answer.known for answer in before))
        updates: list[Update] = []
        own = submit(engine, sampling, updates, cache_salt=f"{cut}", resume=resume, echo=name == "filters")
        resumed.append((resume, updates, own))
    engine.run_until_idle()
    scheduler(engine).check()
    assert engine.num_unstarted == 0 and engine.load.num_waiting == 0
    assert len(resumed) > 5
    for resume, updates, own in resumed:
        assert [update.last for update in updates] == [False] * (len(updates) - 1) + [True]
        assert own.prompt_token_ids == request.prompt_token_ids
        for index, (known, after) in enumerate(zip(resume.sequences, answers(sampling, updates), strict=True)):
            answer = expected[index]
            assert known.token_ids + after.token_ids == answer.token_ids, (name, known)
            assert answer.text[: known.text_len] + after.text == answer.text, (name, known)
            assert after.logprobs == answer.logprobs[len(known.token_ids) :], (name, known)
            assert after.end == (None if known.finished else answer.end), (name, known)


def test_the_cuts_are_where_it_is_hard(engine: Engine) -> None:
    """Half a character, text that is held back, drafts that are drawn: the cases above have them."""
    updates: list[Update] = []
    submit(engine, SamplingParams(**CASES["half_characters"]), updates)
    submit(engine, SamplingParams(**CASES["stop_string"]), updates)
    engine.run_until_idle()
    assert any(update.token_ids and not update.text and update.finish_reason is None for update in updates)
    drafts = [update.drafts for update in updates if update.drafts is not None]
    assert sum(found.accepted for found in drafts) > 0


def known(*token_ids: int, text_len: int = 0, finished: bool = False) -> Resume:
    return Resume(sequences=(Known(token_ids, text_len, finished),))


def told(engine: Engine, resume: Resume, **options) -> list[Update]:
    updates: list[Update] = []
    submit(engine, SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **options}), updates, resume=resume)
    engine.run_until_idle()
    assert [update.last for update in updates] == [False] * (len(updates) - 1) + [True]
    return updates


def test_known_tokens_that_end_the_sequence_are_not_computed_again(engine: Engine) -> None:
    steps = len(engine.stats[0].steps())
    eos = engine.model.eos_token_ids[0]
    [end] = told(engine, known(300, 301, 302, 303, text_len=0), detokenize=False)
    assert (end.token_ids, end.finish_reason) == ((), FinishReason.LENGTH)
    [end] = told(engine, known(300, eos, text_len=0), detokenize=False)
    assert (end.finish_reason, end.stop_reason) == (FinishReason.STOP, None)
    [end] = told(engine, known(300, text_len=0), stop_token_ids=[300], detokenize=False)
    assert (end.finish_reason, end.stop_reason) == (FinishReason.STOP, 300)
    word = engine.tokenizer.decode([300])
    [end] = told(engine, known(300, text_len=0), stop=[word[-1:]])
    assert (end.text + word[-1:], end.finish_reason, end.stop_reason) == (word, FinishReason.STOP, word[-1:])
    assert len(engine.stats[0].steps()) == steps
    assert engine.load.num_waiting == 0


@pytest.mark.parametrize(
    ("resume", "options", "message"),
    [
        (known(), {"n": 2}, "resume has 1 sequences, but n is 2"),
        (known(finished=True), {}, "nothing is left to do"),
        (known(300), {"temperature": 1.0}, "needs the seed"),
        (known(10**6), {}, "outside the vocabulary"),
        (known(300, 300, 300, 300, 300), {}, "more than max_tokens 4"),
        (known(300, text_len=-1), {}, "0 or more"),
    ],
)
def test_a_bad_resume_is_refused(engine: Engine, resume: Resume, options: dict, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        told(engine, resume, **options)


@pytest.mark.parametrize(
    ("resume", "options", "message"),
    [
        (known(300, text_len=500), {}, "has 500 characters of sequence 0, but its tokens have"),
        (known(text_len=1), {}, "has 1 characters of sequence 0, but its tokens have 0"),
        (known(300, 301), {"stop_token_ids": [300]}, "behind its end, which was token 300 after 1 tokens"),
        (known(300, 301), {"structured": {"choice": ["yes", "no"]}}, "does not allow"),
    ],
)
def test_tokens_that_the_request_cannot_have_had_end_it(
    engine: Engine, resume: Resume, options: dict, message: str
) -> None:
    [end] = told(engine, resume, **options)
    assert isinstance(end.error, InvalidRequest)
    assert message in str(end.error)
    assert engine.load.num_waiting == 0


def test_a_resumed_request_takes_the_place_of_itself(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=20)
    first: list[Update] = []
    submit(engine, sampling, first, request_id="mine")
    while len(first) < 5:
        engine.step()
    again: list[Update] = []
    [answer] = answers(sampling, first)
    submit(engine, sampling, again, request_id="mine", resume=Resume(sequences=(answer.known,)))
    engine.run_until_idle()
    scheduler(engine).check()
    assert first[-1].finish_reason is FinishReason.ABORT
    assert len([i for u in again for i in u.token_ids]) + len(answer.token_ids) == 20
