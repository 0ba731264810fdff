"""Keys and values in eight bits through the whole engine: the same tokens however a request is cut, moved or shared."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from whole import DEMO, FIXTURES, POOL, build, narrow, run, scheduler

from jaxserve.api import SamplingParams
from jaxserve.errors import CheckpointError, ConfigError

PAGE = DEMO["cache__page_size"]
# Steps that cut prompts otherwise.
CUT = {
    "sched__max_step_tokens": 11,
    "runtime__token_buckets": [11],
    "sched__watermark": 0.0,
    "sched__growth": 0.0,
}
OPENING = "Once upon a time there was a little fox who lived near a river. Every morning the fox went to the river. "
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
FORKED = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=20, ignore_eos=True, logprobs=2)
# Two that begin alike beyond a page, and one of two sequences whose last page is copied when they part.
ASKED: list[tuple[Any, SamplingParams]] = [
    ({"prompt": OPENING + "One day"}, GREEDY),
    ({"prompt": "12 + 7 is"}, GREEDY),
    ({"prompt": OPENING * 2 + "Then"}, GREEDY),
    ({"prompt": OPENING + "The bird"}, FORKED),
]


def bits(engine: Any, asked: Any = ASKED) -> list[tuple]:
    results = [result for request in run(engine, asked) for result in request]
    assert [result.error for result in results] == [None] * len(results)
    return [(result.token_ids, result.logprobs) for result in results]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_request_has_the_same_bits_whole_in_chunks_preempted_and_hit_by_prefix(dtype: str) -> None:
    engine = build("demo", cache__dtype=dtype, **DEMO)
    whole = [bits(engine, [one]) for one in ASKED]
    whole = [each for request in whole for each in request]
    assert len(whole[0][0]) == 40
    hits = scheduler(engine).memory.num_hit_tokens
    assert bits(engine) == whole, "in a crowd, its prompts hit by prefix"
    assert scheduler(engine).memory.num_hit_tokens > hits

    engine = narrow(build("demo", cache__dtype=dtype, **DEMO, **CUT), 11)
    assert bits(engine) == whole
    assert scheduler(engine).num_preemptions > 0


@pytest.mark.slow
def test_heads_that_are_copied_take_their_scales_along() -> None:
    """Two key/value heads on four devices; the order of sums differs, so tokens are compared, not bits."""
    one = build("demo", cache__dtype="int8", **DEMO)
    four = build("demo", cache__dtype="int8", **DEMO, parallel__tensor=4)
    assert [ids for ids, _ in bits(four)] == [ids for ids, _ in bits(one)]


def ranges(path: Path, layers: int, heads: int, **changes: object) -> str:
    table = {"format": "jaxserve cache ranges", "version": 1}
    table |= {
        side: [[3.0 + layer + head for head in range(heads)] for layer in range(layers)] for side in ("keys", "values")
    }
    path.write_text(json.dumps(table | changes))
    return str(path)


@pytest.mark.slow
def test_groups_of_pages(tmp_path: Path) -> None:
    """Layers with windows share cache arrays with those without, and each has scales of its own."""
    file = ranges(tmp_path / "ranges.json", 3, 2)
    asked = [([i % 90 + 3 for i in range(5, 85)], GREEDY), ([7, 8, 9], GREEDY)]
    settings = POOL | {"cache__dtype": "int8", "cache__scales": file, "runtime__batch_invariant": True}
    whole = build(FIXTURES / "gemma2", **settings)
    cut = narrow(build(FIXTURES / "gemma2", **settings, **CUT), 24)
    assert bits(cut, asked) == bits(whole, asked)


def test_without_scales_int8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"int8, and \S*qwen3 has no scales .* `jaxserve calibrate-cache .* cache.scales"
    ):
        build(FIXTURES / "qwen3", **POOL, cache__dtype="int8")
    file = ranges(tmp_path / "ranges.json", 5, 2)
    with pytest.raises(ConfigError, match=r"cache.scales is \S*ranges.json, but a cache in auto has no scales"):
        build("demo", cache__scales=file)


@pytest.mark.slow
def test_without_scales_float8_warns(caplog: pytest.LogCaptureFixture) -> None:
    quick = {"kernels__paged_attention": "xla", "kernels__matmul": "xla"}
    with caplog.at_level(logging.WARNING, "jaxserve"):
        build(FIXTURES / "qwen3", **POOL, **quick, cache__dtype="float8_e4m3fn")
    assert sum("without scales (1 for all heads)" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2, but must have"),
        ({"keys": [[1.0]]}, "keys must be 5 lists of 2 numbers"),
        ({"values": [[1.0, 1.0]] * 4 + [[1.0, 0.0]]}, "values of layer 4, head 1 are 0.0, but a range must be finite"),
        ({"values": [[1.0, float("nan")]] * 5}, "head 1 are nan"),
        ({"keys": "many"}, "keys must be 5 lists"),
    ],
)
def test_files_of_ranges_that_cannot_be(changes: dict, message: str, tmp_path: Path) -> None:
    file = ranges(tmp_path / "ranges.json", 5, 2, **changes)
    with pytest.raises(CheckpointError, match=message):
        build("demo", cache__dtype="int8", cache__scales=file)
