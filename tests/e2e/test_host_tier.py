"""The host tier on real devices: a sequence has the same bits whether its pages stayed, came back from host memory, or
were computed again."""

from typing import Any

import pytest
from whole import DEMO, FIXTURES, POOL, always_loads, build, narrow, run, scheduler

from jaxserve.api import SamplingParams
from jaxserve.engine import AnyEngine
from jaxserve.errors import ConfigError
from jaxserve.runtime.compile_events import CompileCounter
from jaxserve.sched.host_tier import HostTier

PAGE = DEMO["cache__page_size"]
OPENING = "Once upon a time there was a little fox who lived near a river. Every morning the fox went to the river. "
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
DRAWN = SamplingParams(temperature=0.9, seed=5, n=2, max_tokens=24, ignore_eos=True, logprobs=1)
# Pages of one sequence of full length and few more, so that each takes the pages of the one before.
FEW = 200 // PAGE + 4
HOST: dict[str, Any] = {
    "cache__host_bytes": 64 << 20,
    "cache__host_admission": "always",
    "sched__watermark": 0.0,
    "sched__growth": 0.0,
}
PROMPTS = [OPENING + "One day", "12 + 7 is", OPENING * 2 + "Then", "The bird sang. " + OPENING, "My name is"]
ASKED: list[tuple[Any, SamplingParams]] = [
    *(({"prompt": prompt}, GREEDY) for prompt in PROMPTS),
    ({"prompt": OPENING + "The bird"}, DRAWN),
]


def bits(engine: Any, asked: Any) -> list[tuple]:
    results = [result for request in run(engine, asked) for result in request]
    assert [result.error for result in results] == [None] * len(results)
    return [(result.token_ids, result.logprobs) for result in results]


def one_by_one(engine: Any, asked: Any) -> list[tuple]:
    return [each for one in asked for each in bits(engine, [one])]


def tier(engine: AnyEngine) -> HostTier:
    """Host memory, for its counters."""
    found = scheduler(engine).memory.tier
    assert found is not None
    return found


def test_never_preempted_and_swapped_give_the_same_bits() -> None:
    """Computed again does, too: `test_independence`."""
    engine = build("demo", **DEMO, **HOST)
    # Each request by itself, before the engine runs short.
    expected = one_by_one(engine, ASKED)
    narrow(engine, 11)
    always_loads(engine)
    compiles = CompileCounter()
    for _ in range(2):
        assert bits(engine, ASKED) == expected
    assert one_by_one(engine, ASKED) == expected
    assert compiles.count == 0
    assert scheduler(engine).num_preemptions > 0
    assert tier(engine).num_saved > 10 and tier(engine).num_loaded > 10
    assert scheduler(engine).memory.num_loaded_tokens > 0


def test_a_chain_of_pages_on_the_device_in_slots_and_on_the_device_again() -> None:
    """Of a prompt that is an exact multiple of a page, too: its last token is always computed."""
    engine = narrow(build("demo", **DEMO, **HOST), FEW)
    always_loads(engine)
    memory, sampling = scheduler(engine).memory, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    ids = [3 + i * 7 % 400 for i in range(6 * PAGE)]

    def ask(token_ids: list[int]) -> tuple[int, list[int]]:
        """How many tokens were found, and the answer."""
        [[result]] = run(engine, [(token_ids, sampling)])
        assert result.error is None and result.prompt is not None
        return result.prompt.num_cached_tokens, result.token_ids

    found, answer = ask(ids)
    longer = ask([*ids, 9])[1]
    assert found == 0
    for first in (100, 300):  # two prompts that take all pages, one after the other
        ask([first + i for i in range(11 * PAGE)])
    prefix = memory.prefix
    assert prefix is not None
    entries = prefix.match("", prefix.blocks("", [*ids, 9]))
    assert len(entries) == 6 and not any(entry.page_ids[0] for entry in entries)
    assert ask(ids) == (5 * PAGE, answer)
    assert memory.num_loaded_tokens == 5 * PAGE
    # Now the pages in the middle are the next to be evicted.
    middle = [entry.page_ids[0] for entry in entries[2:4]]
    for page_id in middle:
        memory.pool._idle[0].move_to_end(page_id, last=False)
    free = len(memory.pool._free)
    ask([500 + i for i in range((free + 1) * PAGE)])
    assert [bool(entry.page_ids[0]) for entry in entries] == [True, True, False, False, True, True]
    assert ask([*ids, 9]) == (6 * PAGE, longer)
    assert memory.num_loaded_tokens == 5 * PAGE + 2 * PAGE


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [{"cache__dtype": "int8", "parallel__tensor": 2, "parallel__pipeline": 2}, {"parallel__data": 2}]
)
def test_shards_stages_and_scales(layout: Any) -> None:
    engine = build("demo", **DEMO, **HOST, **layout)
    inner = narrow(engine.replicas[0] if "parallel__data" in layout else engine, FEW)
    always_loads(inner)
    whole = one_by_one(inner, ASKED)
    loaded = tier(inner).num_loaded
    assert one_by_one(inner, ASKED) == whole and bits(inner, ASKED) == whole
    assert tier(inner).num_loaded > loaded


@pytest.mark.slow
def test_groups_of_pages() -> None:
    """Layers with a window give pages back; the tier has pages of each group by itself."""
    asked = [([3 + (i * k) % 80 for i in range(70 + 16 * k)], GREEDY) for k in range(1, 5)]
    settings = POOL | {"cache__num_pages": 160}
    engine = build(FIXTURES / "gemma2", **settings, **HOST)
    expected = one_by_one(engine, asked)
    narrow(engine, 40)
    always_loads(engine)
    for _ in range(2):
        assert one_by_one(engine, asked) == expected
        assert bits(engine, asked) == expected
    assert tier(engine).num_loaded > 0


def test_settings_that_cannot_work_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="mru"):
        build("demo", **DEMO, **HOST, cache__host_policy="mru")
    with pytest.raises(ConfigError, match="mru"):
        build("demo", **DEMO, cache__host_policy="mru")
    with pytest.raises(ConfigError, match=r"cache\.host_bytes is 0"):
        build("demo", **DEMO, store__kind="memory")
    with pytest.raises(ConfigError, match=r"store\.kind is not"):
        build("demo", **DEMO, **HOST, store__location="somewhere")
    with pytest.raises(ConfigError, match="tape"):
        build("demo", **DEMO, **HOST, store__kind="tape")
