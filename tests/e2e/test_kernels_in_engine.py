"""The whole engine on the kernels of other hardware, simulated: the same tokens as on the XLA implementation."""

import pytest

from jaxserve import LLM, SamplingParams

PROMPTS = ["What is 683+784?", 'Spell "wagon" backwards.']
SIZES = {
    "model.path": "demo",
    "cache.page_size": 16,
    "cache.num_pages": 40,
    "model.max_len": 128,
    "sched.max_rows": 2,
    "sched.max_step_tokens": 16,
    "runtime.token_buckets": [16],
    "runtime.row_buckets": [2],
}


def answers(**settings: object) -> list[tuple[int, ...]]:
    llm = LLM.from_config(None, overrides={**SIZES, **settings})
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=6), use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.slow
def test_the_tpu_kernels_give_the_tokens_of_the_xla_implementation():
    implementation = {"kernels.paged_attention": "tests.kernels.tpu_interpreter:IMPLEMENTATION"}
    dtype = {"model.dtype": "bfloat16"}
    assert answers(**dtype, **implementation) == answers(**dtype)


@pytest.mark.slow
def test_the_batched_loops_for_gpus_give_the_tokens_of_those_for_cpus():
    answer = answers(**{"kernels.paged_attention": "xla"})
    assert answers(**{"kernels.paged_attention": "xla_batched"}) == answer


@pytest.mark.slow
def test_caches_of_eight_bits_answer_too():
    """The demo model's answers survive two bits of mantissa in its keys and values."""
    assert answers(**{"cache.dtype": "float8_e5m2"}) == answers()
