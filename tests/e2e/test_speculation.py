"""Drafts change no token: with any drafter, width and number of rounds, outputs are those of one token a step.

On the demo model with Numba's kernels, where a row has the same bits in steps of all shapes: log-probabilities are
compared to the last bit.
"""

import dataclasses
import json
from collections import Counter
from typing import Any

import pytest
from bad_drafters import OUTSIDE
from whole import Result, build, run, scheduler

from jaxserve.api import SamplingParams
from jaxserve.sched import InFlight, Limits, Runner, StepPlan, StepResult

pytestmark = pytest.mark.slow

POOL = {"model__dtype": "float32", "model__max_len": 160, "cache__page_size": 16, "sched__growth": 0.0}
NUM_PAGES = 14  # so few that rows are taken away in the middle of an answer
# One that repeats itself, so that what followed before follows again; and one that does not.
STORY = "Once upon a time there was a fox. Once upon a time there was a fox. Once upon"
PROMPTS = [STORY, "Here is a list: flag:93, doll:95. What is doll?"]
SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["fox", "fish"]}, "number": {"type": "integer"}},
    "required": ["animal", "number"],
    "additionalProperties": False,
}


def bound(*, temperature: float = 0.0, seed: int | None = None, n: int = 1, logprobs: int | None = None, **form: Any):
    """Options of an answer that is held to a form, and so ends by itself."""
    return {
        "structured": form, "ignore_eos": False, "temperature": temperature, "seed": seed, "n": n, "logprobs": logprobs,
    }  # fmt: skip


PLAIN = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.7, "seed": 5},
    "cut": {"temperature": 1.0, "seed": 6, "top_k": 12, "top_p": 0.8, "min_p": 0.01},
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "penalties seeded": {"temperature": 0.5, "seed": 9, "frequency_penalty": -0.7, "repetition_penalty": 0.9},
    "bias": {"logit_bias": {300: 4.0, 21: -3.0}},
    "allowed": {"allowed_token_ids": [*range(250, 420)]},
    "bad words": {"bad_words": [" a", " there was", " fox", "on"]},
    "stops": {"stop_token_ids": [*range(260, 292)], "min_tokens": 9},
    "stop string": {"stop": ["fox", "time"], "include_stop_str_in_output": True},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
    "log-probabilities": {"logprobs": 20, "temperature": 0.4, "seed": 2},
    "three of each": {"n": 3, "temperature": 0.6, "seed": 4},
    "schema": bound(json_schema=json.dumps(SCHEMA), logprobs=3),
    "choice": bound(choice=["the fox and the wagon", "the fox and the doll"]),
    "regex": bound(regex="(spell wagon, ){1,2}[a-z]{2,5}", temperature=1.2, seed=7, n=2),
}
WITH_GRAMMAR = ("schema", "choice", "regex")
ASKED = [(prompt, dataclasses.replace(PLAIN, **more)) for more in OPTIONS.values() for prompt in PROMPTS]


class Counting:
    """A runner that counts what became of drafts."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self.shapes: Counter[tuple[int, int]] = Counter()
        self.drafted = self.accepted = self.forced = 0
        self.drafted_by_row: Counter[int] = Counter()

    @property
    def limits(self) -> Limits:
        return self._inner.limits

    def dispatch(self, plan: StepPlan) -> InFlight:
        self.shapes[plan.width, plan.rounds] += 1
        return _Counted(self, self._inner.dispatch(plan), plan)


class _Counted:
    def __init__(self, to: Counting, inner: InFlight, plan: StepPlan) -> None:
        self._to, self._inner, self._plan = to, inner, plan

    def result(self) -> StepResult:
        result = self._inner.result()
        by_host = {draft.row for draft in self._plan.drafts}
        for row, rounds in zip(self._plan.sampled_rows, result.drafts or (), strict=False):
            accepted = sum(one.accepted for one in rounds)
            if row in by_host:
                self._to.forced += accepted
            else:
                self._to.drafted += sum(one.drafted for one in rounds)
                self._to.drafted_by_row[row] += sum(one.drafted for one in rounds)
                self._to.accepted += accepted
        return result


def answers(found: list[list[Result]]) -> list[list[tuple]]:
    return [[(r.token_ids, r.text, r.finish_reason, r.logprobs) for r in results] for results in found]


@pytest.fixture(scope="module")
def expected() -> list[list[tuple]]:
    return answers(run(build("demo", **POOL, cache__num_pages=200), ASKED, stagger=1))


def drafting(**settings: Any):
    """An engine that drafts, and its runner, which counts."""
    named = {f"speculation__{name}": value for name, value in settings.items()}
    few = {**POOL, "cache__num_pages": NUM_PAGES, "sched__watermark": 0.0}
    engine = build("demo", **few, speculation__adaptive=False, runtime__background_buckets=False, **named)
    counting = engine._runner = Counting(engine._runner)
    return engine, counting


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"method": "suffix", "width": 4, "rounds": 3, "ngram_min": 1, "num_answers": 8}, id="suffix"),
        pytest.param({"method": "none", "rounds": 5}, id="bursts"),
        pytest.param({"method": "bad_drafters:make_bad", "width": 5, "rounds": 2}, id="bad drafts"),
    ],
)
def test_tokens_are_those_of_one_token_a_step(settings: dict[str, Any], expected: list[list[tuple]]) -> None:
    engine, counting = drafting(**settings)
    found = answers(run(engine, ASKED, stagger=1))
    for name, got, wanted in zip([n for n in OPTIONS for _ in PROMPTS], found, expected, strict=True):
        assert got == wanted, name
    assert scheduler(engine).num_preemptions > 0, "the pool is too large to test rows that are computed again"
    widest = settings.get("width", 1), settings.get("rounds", 1)
    assert counting.shapes[widest] > 20 and max(counting.shapes) == widest, counting.shapes
    assert widest[0] == 1 or counting.forced > 60, counting.forced
    if settings["method"] == "suffix":
        assert counting.accepted > 50, counting.accepted
    if "bad_drafters" in settings["method"]:
        assert [bool(counting.drafted_by_row[row]) for row in range(3)] == [row != OUTSIDE for row in range(3)]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"method": "suffix", "width": 4, "rounds": 3, "ngram_min": 1, "num_answers": 8}, id="suffix"),
        pytest.param({"method": "grammar", "width": 8}, id="no drafter of the device"),
    ],
)
def test_alone_a_grammar_saves_steps(settings: dict[str, Any], expected: list[list[tuple]]) -> None:
    """Each request by itself, on the steps of the test above."""
    engine, counting = drafting(**settings)
    at = [number for number, name in enumerate(n for n in OPTIONS for _ in PROMPTS) if name in WITH_GRAMMAR]
    for number in at:
        assert answers(run(engine, [ASKED[number]])) == [expected[number]]
    assert counting.drafted == 0 and counting.forced > 60, (counting.drafted, counting.forced)
    num_tokens = sum(len(tokens) for number in at for tokens, *_ in expected[number])
    assert sum(counting.shapes.values()) < 0.6 * num_tokens, (counting.shapes, num_tokens)
