"""The whole engine on the kernels of other hardware, simulated: the same tokens as on the XLA implementation."""

import pytest

from jaxserve import LLM, SamplingParams

pytestmark = pytest.mark.slow

PROMPTS = ["What is 683+784?", "Hello!"]  # of different lengths
SIZES = {
    "model.path": "demo",
    "cache.page_size": 16,
    "cache.num_pages": 40,
    "model.max_len": 128,
    "sched.max_rows": 2,
    "sched.max_step_tokens": 16,
    "runtime.token_buckets": [16],
    "runtime.row_buckets": [2],
    "kernels.matmul": "xla",  # in bfloat16 `auto` goes by the rates that each start measures
}


def answers(**settings: object) -> list[tuple[int, ...]]:
    llm = LLM.from_config(None, overrides={**SIZES, **settings})
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("cache_dtype", ["int8"])  # which other numbers pass, tests/kernels says
def test_the_tpu_kernels_give_the_tokens_of_the_xla_implementation(cache_dtype):
    implementation = {"kernels.paged_attention": "tests.kernels.tpu_interpreter:IMPLEMENTATION"}
    dtypes = {"model.dtype": "bfloat16", "cache.dtype": cache_dtype}
    assert answers(**dtypes, **implementation) == answers(**dtypes)


@pytest.mark.parametrize("cache_dtype", ["int8"])
def test_the_batched_loops_for_gpus_give_the_tokens_of_those_for_cpus(cache_dtype):
    dtype = {"cache.dtype": cache_dtype}
    answer = answers(**dtype, **{"kernels.paged_attention": "xla"})
    assert answers(**dtype, **{"kernels.paged_attention": "xla_batched"}) == answer
