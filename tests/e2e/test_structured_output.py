"""Constrained output on the demo model: every form, at a temperature at which the model itself writes nonsense."""

import dataclasses
import json
import re
from collections.abc import Sequence

import jax
import pytest
from structured_cases import check_text, schema
from test_no_compile import CompileCounter
from whole import Result, build, narrow, run, scheduler

from jaxserve.api import FinishReason, SamplingParams
from jaxserve.engine import Engine
from jaxserve.engine.structured import RowMasks
from jaxserve.errors import InvalidRequest
from jaxserve.runtime.runner import MASK_SLOTS

pytestmark = pytest.mark.slow  # quick, a form among other options: test_no_compile.py

PROMPT = "Once upon a time there was a little fox"
LARK = 'start: (verb " " noun) ~ 1..3\nverb: "sees" | "likes"\nnoun: "a " /[a-z]{3,5}/ ";"\n'


# More rows than one launch of masks holds.
SIZES = {
    "model__max_len": 512,
    "cache__num_pages": 400,
    "cache__page_size": 16,
    "sched__max_rows": MASK_SLOTS + 4,
    "runtime__row_buckets": [MASK_SLOTS + 4],
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build("demo", **SIZES)


def hot(seed: int, max_tokens: int = 300, **form: object) -> SamplingParams:
    return SamplingParams(temperature=1.5, seed=seed, max_tokens=max_tokens, structured=form)


def check_schemas(engine: Engine, numbers: Sequence[int]) -> int:
    """Asks for each schema; how many answers came to their end. Every one of those parses and validates."""
    asked = [(f"{PROMPT} {number}", hot(number, json_schema=json.dumps(schema(number)))) for number in numbers]
    num_ended = 0
    for number, [result] in zip(numbers, run(engine, asked), strict=True):
        assert result.error is None, (number, result.error)
        if result.finish_reason is FinishReason.STOP:
            num_ended += 1
            check_text(schema(number), result.text)
        else:
            assert result.finish_reason is FinishReason.LENGTH and len(result.token_ids) == 300, (number, result)
    return num_ended


def test_a_sample_of_schemas(engine: Engine) -> None:
    assert check_schemas(engine, range(3, 200, 14)) >= 10


def test_100_schemas(engine: Engine) -> None:
    assert check_schemas(engine, range(0, 200, 2)) >= 75


def test_without_masks_it_is_nonsense(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above see is the masks' doing: with masks that allow everything they fail."""

    def lenient(self: RowMasks, plan, live):
        masked = put(self, plan, live)
        if masked is None:
            return None
        everything = b"\xff" * 148
        return dataclasses.replace(masked, masks=tuple(type(m).of(m.row, everything) for m in masked.masks))

    put = RowMasks.put
    monkeypatch.setattr(RowMasks, "put", lenient)
    with pytest.raises(AssertionError, match="not in the grammar"):
        check_schemas(engine, [60, 110])


def test_every_other_form(engine: Engine) -> None:
    asked = [
        (PROMPT, hot(1, regex=r"(\+|-)[0-9]{2,5} (km|mi)")),
        (PROMPT, hot(2, choice=["yes", "no", "it depends ☃"])),
        (PROMPT, hot(3, grammar=LARK)),
        (PROMPT, hot(4, json_object=True)),
        (PROMPT, SamplingParams(temperature=0, max_tokens=300, structured={"regex": "The fox said: [a-z ]{5,30}\\."})),
        (PROMPT, dataclasses.replace(hot(5, regex="[a-z ]{12}"), n=3, presence_penalty=1.0, bad_words=("a",))),
        (PROMPT, dataclasses.replace(hot(6, choice=["123", "456"]), min_tokens=9)),
    ]
    regex, choice, grammar, value, greedy, many, short = run(engine, asked, stagger=1)
    assert re.fullmatch(r"(\+|-)[0-9]{2,5} (km|mi)", regex[0].text)
    assert choice[0].text in ("yes", "no", "it depends ☃")
    assert re.fullmatch("((sees|likes) a [a-z]{3,5};){1,3}", grammar[0].text), grammar[0].text
    if value[0].finish_reason is FinishReason.STOP:
        assert isinstance(json.loads(value[0].text), dict)
    assert re.fullmatch(r"The fox said: [a-z ]{5,30}\.", greedy[0].text)
    assert len({r.text for r in many}) == 3 and all(re.fullmatch("[a-z ]{12}", r.text) for r in many)
    assert (short[0].text in ("123", "456")) and short[0].finish_reason is FinishReason.STOP, "min_tokens gives way"
    assert all(r.finish_reason is FinishReason.STOP for results in (regex, choice, grammar, greedy) for r in results)


def _crowd() -> list[tuple[str, SamplingParams]]:
    """18 of the 20 have masks: more than one launch holds."""
    asked = []
    for i in range(MASK_SLOTS + 4):
        if i % 8 == 7:
            asked.append((f"{PROMPT} {i % 5}", SamplingParams(temperature=0.9, seed=i, max_tokens=16)))
        elif i % 4 == 2:
            allowed = list(range(20, 500))
            asked.append((PROMPT, dataclasses.replace(hot(i, 16, regex="[a-z ]+"), allowed_token_ids=allowed)))
        else:
            asked.append((PROMPT[: 5 + i], hot(i, 16, json_schema=json.dumps(schema(3 * i)))))
    return asked


def _tokens(results: list[list[Result]]) -> list[list[int]]:
    return [r.token_ids for [r] in results]


def test_tokens_do_not_depend_on_neighbours_and_nothing_compiles(engine: Engine) -> None:
    counter = CompileCounter()
    jax.jit(lambda x: x * 5 + 1)(2.0)
    assert counter.events, "the counter sees nothing, so it would prove nothing"
    counter.events.clear()
    alone = [_tokens(run(engine, [one]))[0] for one in _crowd()]
    assert _tokens(run(engine, _crowd())) == alone
    assert _tokens(run(engine, _crowd(), stagger=2)) == alone
    assert counter.events == []


def test_rows_with_masks_that_are_preempted_have_the_same_tokens(engine: Engine) -> None:
    """Over devices and stages: test_parallel.py."""
    other = narrow(build("demo", **SIZES, sched__watermark=0.0, sched__growth=0.0), 16)
    assert _tokens(run(other, _crowd())) == _tokens(run(engine, _crowd()))
    assert scheduler(other).num_preemptions > 0


def test_a_bad_schema_is_refused_and_costs_nothing_else(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="not"):
        engine.prepare(PROMPT, hot(1, json_schema='{"type": "array", "not": {}}'))
    [[result]] = run(engine, [(PROMPT, hot(1, regex="[0-9]{4}"))])
    assert re.fullmatch("[0-9]{4}", result.text)
