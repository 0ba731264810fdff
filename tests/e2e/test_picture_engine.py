"""Pictures through the whole engine: the tokens of transformers, at every chunk, in a crowd, after eviction.

One engine for each family, with a pool of embeddings that holds the largest picture and little more, a KV pool that
holds three sequences, and steps of a few tokens: so that chunks end in pictures, rows are preempted, prefixes are hit,
pictures evicted, and loaded from host memory. Each of these is asserted to have happened.
"""

import numpy as np
import pytest
from PIL import Image
from whole import FIXTURES, build, run, scheduler

from jaxserve.api import SamplingParams
from jaxserve.engine import Prompt
from jaxserve.errors import CapacityError, InvalidRequest
from jaxserve.runtime.compile_events import CompileCounter

PLACEHOLDER = 120
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
POOL = {
    "model__max_len": 256,
    "model__skip_tokenizer": True,
    "cache__page_size": 16,
    "cache__num_pages": 18,
    "sched__max_step_tokens": 24,
    "runtime__token_buckets": [24],
    "sched__watermark": 0.0,
    "sched__growth": 0.0,
    "vision__max_pixels": 45 * 28 * 28,
    "vision__pool_tokens": 140,
    "vision__max_step_patches": 64,
    "vision__host_bytes": 300 * 48 * 4,
}


def picture(width: int, height: int) -> Image.Image:
    """As scripts/make_vision_fixtures.py makes it."""
    y, x = np.mgrid[0:height, 0:width]
    channels = [(x * a + y * b + (x * y) // c + (x ^ y) * 3) % 256 for a, b, c in ((3, 5, 7), (2, 9, 11), (7, 1, 5))]
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


def prompts(name: str) -> list[tuple[Prompt, list[int]]]:
    """The prompts of a fixture, and the tokens that follow them."""
    found: list[tuple[Prompt, list[int]]] = []
    with np.load(FIXTURES / "vision" / name / "oracle.npz") as file:
        for i in range(sum(key.startswith("prompt_") for key in file.files)):
            images = [picture(*file["sizes"][k].tolist()) for k in file[f"pictures_{i}"]]
            prompt = {"prompt_token_ids": file[f"prompt_{i}"].tolist(), "multi_modal_data": {"image": images}}
            # Behind a picture that ends a prompt, generate() of transformers takes the next token for a part of it, and
            # differs from its own forward pass: only the first token counts there.
            count = 1 if file[f"prompt_{i}"][-1] == PLACEHOLDER else 64
            found.append((prompt, file[f"greedy_{i}"][:count].tolist()))
    return found


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("qwen2_vl", 1),
        pytest.param("qwen2_5_vl", 2, marks=pytest.mark.slow),
        pytest.param("qwen2_vl", 8, marks=pytest.mark.slow),
        pytest.param("llava", 1, marks=pytest.mark.slow),  # quick, as the demo model: test_demo_vision.py
    ],
)
def test_tokens_equal_transformers(name: str, devices: int) -> None:
    engine = build(FIXTURES / "vision" / name, **{**POOL, "parallel__tensor": devices})
    compiles = CompileCounter()
    for _ in range(2):  # cold; then prefixes and pictures are found
        asked = prompts(name)
        answers = [result.token_ids for [result] in run(engine, [(prompt, GREEDY) for prompt, _ in asked])]
        for answer, (prompt, tokens) in zip(answers, asked, strict=True):
            assert len(answer) == 64 and answer[: len(tokens)] == tokens, prompt
    made = scheduler(engine)
    assert made.num_preemptions > 0
    assert made.memory.num_hit_tokens > 0
    assert made.encoder.num_hits > 0
    assert made.encoder.num_evicted > 0
    assert made.encoder.num_loads > 0
    assert compiles.count == 0
    assert made.encoder.num_used <= made.encoder.pool.num_pages
    made.check()


def test_a_picture_that_comes_twice_is_encoded_once() -> None:
    engine = build(FIXTURES / "vision" / "qwen2_vl", **POOL)
    made, one, other = scheduler(engine), picture(140, 140), picture(139, 141)
    prompt = [*range(1, 20), 120, 5]

    def ask(image: Image.Image) -> list[int]:
        [[result]] = run(engine, [({"prompt_token_ids": prompt, "multi_modal_data": {"image": image}}, GREEDY)])
        return result.token_ids

    first = ask(one)
    assert (made.encoder.num_encodes, made.memory.num_hit_tokens) == (1, 0)
    assert ask(one) == first
    assert (made.encoder.num_encodes, made.memory.num_hit_tokens) == (1, 32)
    assert ask(other) != first
    assert (made.encoder.num_encodes, made.memory.num_hit_tokens) == (2, 48), "one page is before the picture"


def test_a_pool_that_is_smaller_than_a_picture_may_be_is_no_start() -> None:
    with pytest.raises(CapacityError, match=r"vision\.pool_tokens is 44, but the largest picture .* has \d+ tokens"):
        build(FIXTURES / "vision" / "qwen2_vl", **{**POOL, "vision__pool_tokens": 44})


def test_host_memory_that_is_smaller_than_a_picture_may_be_is_no_start() -> None:
    with pytest.raises(CapacityError, match=r"vision\.host_bytes is 100, room for 0 embeddings .* has \d+; raise it"):
        build(FIXTURES / "vision" / "qwen2_vl", **{**POOL, "vision__host_bytes": 100})


def test_a_placeholder_without_a_picture_is_refused() -> None:
    engine = build(FIXTURES / "vision" / "qwen2_vl", **POOL)
    with pytest.raises(InvalidRequest, match="1 placeholders of pictures .* 0 pictures"):
        engine.prepare({"prompt_token_ids": [1, 120, 3]}, GREEDY)
