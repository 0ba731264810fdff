"""Sparse attention through the whole engine: with all pages nothing changes, and with few of them the bits of a request
follow from it alone, however it is cut, moved, shared or computed again."""

from typing import Any

import pytest
from whole import FIXTURES, POOL, always_loads, build, narrow, run, scheduler

from jaxserve.api import SamplingParams
from jaxserve.config import load_config
from jaxserve.errors import ConfigError
from jaxserve.lab.compiled.ahead import place_ahead
from jaxserve.models.checkpoint import configured_checkpoint
from jaxserve.models.loading import decoder_config
from jaxserve.runtime.build import plan_stage_memory

PAGE = 16
MODEL = FIXTURES / "llama_llama3"
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
DRAWN = SamplingParams(temperature=0.9, seed=5, n=2, max_tokens=24, ignore_eos=True, logprobs=2)
ALL = {"attention__select": "quest", "attention__pages": 14}
THREE = {"attention__select": "quest", "attention__pages": 3}
# A pool of one sequence of full length and little more, steps that cut prompts, and pages that come back from the host.
FEW = 214 // PAGE + 5
NARROW = POOL | {
    "cache__host_bytes": 8 << 20,
    "cache__host_admission": "always",
    "sched__watermark": 0.0,
    "sched__growth": 0.0,
    "sched__max_step_tokens": 11,
    "runtime__token_buckets": [11],
}
CANONICAL: dict[str, Any] = {
    "cache__host_bytes": 8 << 20,
    "store__kind": "memory",
    "store__max_bytes": 8 << 20,
    "store__pages": "canonical",
}
OPENING = [3 + i * 37 % 90 for i in range(70)]
ASKED: list[tuple[Any, SamplingParams]] = [
    ([*OPENING, *range(3, 12)], GREEDY),
    ([5, 9, 7], GREEDY),
    ([*OPENING, *reversed(OPENING)], GREEDY),
    ([*OPENING, 11], DRAWN),
]


def bits(engine: Any, asked: Any) -> list[tuple]:
    results = [result for request in run(engine, asked) for result in request]
    assert [result.error for result in results] == [None] * len(results)
    return [(result.token_ids, result.logprobs) for result in results]


def one_by_one(engine: Any, asked: Any) -> list[tuple]:
    return [each for one in asked for each in bits(engine, [one])]


@pytest.fixture(scope="module")
def dense() -> list[tuple]:
    return one_by_one(build(MODEL, **POOL), ASKED)


@pytest.mark.slow
def test_all_pages_are_dense_attention(dense: list[tuple]) -> None:
    engine = build(MODEL, **POOL, **ALL)
    assert one_by_one(engine, ASKED) == dense
    assert bits(engine, ASKED) == dense
    assert scheduler(engine).memory.num_hit_tokens > 0


@pytest.mark.slow
def test_with_few_pages_a_request_has_the_same_bits_however_it_is_run(dense: list[tuple]) -> None:
    engine = build(MODEL, **POOL, **THREE)
    whole = one_by_one(engine, ASKED)
    assert whole[0] != dense[0] and whole[2] != dense[2] and whole[1] == dense[1], "the short one has three pages"
    # A second turn: pages of the answer before it are no pages of a prompt, and are computed.
    first, answer = ASKED[0][0], whole[0][0]
    second = ([*first, *answer, 5, 6], GREEDY)
    [[result]] = run(engine, [second])
    assert result.prompt is not None and result.prompt.num_cached_tokens == len(first) // PAGE * PAGE
    whole.append((result.token_ids, result.logprobs))
    assert bits(engine, [*ASKED, second]) == whole

    engine = narrow(build(MODEL, **NARROW, **THREE), FEW)
    always_loads(engine)
    assert bits(engine, [second, *ASKED]) == [whole[-1], *whole[:-1]]
    assert bits(engine, [*ASKED, second]) == whole
    assert scheduler(engine).num_preemptions > 0 and scheduler(engine).memory.tier.num_loaded > 0


@pytest.mark.slow
def test_heads_on_two_devices_choose_what_they_choose_on_one() -> None:
    """The order of sums differs, so tokens are compared, not bits."""
    one, two = (one_by_one(build(MODEL, **POOL, **THREE, parallel__tensor=count), ASKED) for count in (1, 2))
    assert [ids for ids, _ in one] == [ids for ids, _ in two]


@pytest.mark.slow
def test_rounds_without_drafts() -> None:
    one, four = (one_by_one(build(MODEL, **POOL, **THREE, speculation__rounds=rounds), ASKED) for rounds in (1, 4))
    assert one == four


def test_summaries_are_part_of_a_page() -> None:
    """Of the breakdown of memory and of plans, cut over devices as heads are: two float32 numbers for each of a key."""
    settings = {"model.path": str(MODEL), "parallel.tensor": 2, "cache.page_size": PAGE}
    chosen = {"attention.select": "quest", "attention.pages": 3}

    def page_bytes(more: dict) -> int:
        config = load_config(None, settings | more).config
        model = decoder_config(configured_checkpoint(config.model))[1]
        absent = place_ahead(config, model, topology="v5e:2x2", to_compile=False)
        return plan_stage_memory(config, absent.sizes, absent.stages, absent.attention, 1 << 34).page_bytes

    assert page_bytes(chosen) - page_bytes({}) == 2 * 1 * 16 * 2 * 4, "2 layers, a head of 16 on each device"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention__pages": 4}, "attention.pages is 4, but without attention.select"),
        ({"attention__select": "quest"}, "attention.pages is not set"),
        ({"attention__select": "qest", "attention__pages": 4}, "no attention selector is called 'qest'.*'quest'"),
        ({**THREE, "speculation__method": "ngram"}, "rejected drafts would widen"),
        ({**THREE, **CANONICAL}, "no canonical form"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(MODEL, **POOL, **settings)


def test_a_model_with_windows_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"attention.select names Quest.*window of \d+ tokens"):
        build(FIXTURES / "gemma2", **POOL, **THREE)
