"""The batched loops for GPUs and TPUs: how often they turn, and what they compile to for devices that are not here.

Whether they compute attention is told with the other implementations that run on a CPU (test_cpu_attention).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import xla_batched
from jaxserve.kernels.cases import MODELS, REAL, Case, Room, make_batch
from jaxserve.kernels.xla_batched import Sums
from jaxserve.lab.compiled.attention import compile_attend
from tests.kernels.cpu_implementations import XLA_BATCHED
from tests.kernels.gpu_compiler import needs_gpu_compiler

MIB = 2**20


# --- turns ----------------------------------------------------------------------------------------------------------


def count_turns(case: Case, monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs the loops with nothing in them: no score is computed."""
    spec, found = case.spec, []

    def skip(queries, cache, page_ids, first_column, scoring):
        jax.debug.callback(lambda: found.append(1))
        lanes, kv_heads, per_head, head_dim = queries.vectors.shape
        none = jnp.zeros((lanes, kv_heads, per_head))
        return Sums(none, none, jnp.broadcast_to(0.0, (lanes, kv_heads, per_head, head_dim)))

    monkeypatch.setattr(xla_batched, "_attend_block", skip)
    context = max(context for _, context in case.rows)
    batch, _ = make_batch(case, np.random.default_rng(0), Room(columns=context // case.page_size + 1, num_pages=6000))
    num_tokens = batch.positions.shape[0]
    q = jnp.zeros((num_tokens, spec.num_query_heads, spec.head_dim), jnp.bfloat16)
    kv = jnp.zeros((num_tokens, spec.num_kv_heads, spec.head_dim), jnp.bfloat16)
    cache = XLA_BATCHED.init_cache(1, case.page_size, spec.num_kv_heads, spec.head_dim, jnp.dtype("bfloat16"))
    jax.block_until_ready(jax.jit(lambda *args: XLA_BATCHED.attend(*args, spec)[0])(q, kv, kv, cache, batch))
    jax.effects_barrier()
    return len(found)


NARROW = dataclasses.replace(MODELS["llama3-8b"], head_dim=1)  # tiles depend on the number of heads alone


@pytest.mark.parametrize(
    ("spec", "rows", "turns"),
    [
        (MODELS["llama3-8b"], ((1, 4096),) * 64, 16),
        (MODELS["llama3-8b"], ((1, 131072), *((1, 100),) * 15), 17),  # a long row takes the lanes of all
        (MODELS["mistral-7b"], ((1, 131072),), 1),  # a window of 4096
        (NARROW, ((8192, 8192),), 144),  # tiles of 256: four of them see one block, four see two, ...
    ],
)
def test_turns_of_the_loops(spec, rows, turns, monkeypatch):
    case = Case(name="turns", spec=spec, rows=rows, page_size=64)
    assert count_turns(case, monkeypatch) == turns


# --- compiled -------------------------------------------------------------------------------------------------------

MANY = "llama3-8b-tp1/decode64/64/bfloat16"
PROMPT = "llama3-8b-tp1/prefill8k/64/bfloat16"
BUSY = "llama3-8b-tp1/busy/64/bfloat16"
# Most bytes of temporaries of a step of bfloat16: of one turn of the loops, and of queries and outputs.
LIMITS = {MANY: 80 * MIB, PROMPT: 180 * MIB}
BUILDS = [
    ("a100:1", MANY),
    ("a100:1", PROMPT),
    *(("a100:1", f"{model}/busy/64/bfloat16") for model in ("gpt-oss", "mpt-7b-alibi")),
    ("l40s:1", "llama3-8b-tp4/busy/32/int8"),
    ("b200:1", "llama3-8b-tp4/busy/32/float8_e4m3fn"),
    ("a100:1", "llama3-8b-tp1/busy/24/bfloat16"),
    ("v5e:2x2", BUSY),
]


def check_build(case: Case, topology: str, limit: int) -> None:
    compiled, _ = compile_attend(case, XLA_BATCHED, topology)
    memory, spec = compiled.memory_analysis(), case.spec
    _, num_pages = make_batch(case, np.random.default_rng(0))
    shape = (num_pages + 1, spec.num_kv_heads, case.page_size, spec.head_dim)
    assert memory.alias_size_in_bytes >= 2 * np.prod(shape) * jnp.dtype(case.cache_dtype).itemsize
    assert memory.temp_size_in_bytes < limit, memory
    dims = f"[{','.join(map(str, shape))}]"
    text = compiled.as_text()
    assert dims in text and not [x for x in text.splitlines() if dims in x.partition(" copy(")[0] and " copy(" in x]


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("topology", "name"), [pytest.param(*b, marks=pytest.mark.slow if b != BUILDS[0] else ()) for b in BUILDS]
)
def test_cases_compile_with_the_cache_in_place_and_bounded_temporaries(topology, name):
    check_build(REAL[name], topology, LIMITS.get(name, 110 * MIB))


@needs_gpu_compiler
@pytest.mark.slow
def test_float32_compiles_for_hopper_and_takes_twice_the_memory():
    case = dataclasses.replace(REAL[PROMPT], query_dtype="float32", cache_dtype="float32")
    check_build(case, "h200:1", 2 * LIMITS[PROMPT])


@needs_gpu_compiler
@pytest.mark.slow
def test_four_times_the_rows_take_only_their_own_queries_more():
    check_build(dataclasses.replace(REAL[MANY], rows=((1, 1024),) * 256), "a100:1", LIMITS[MANY] + 20 * MIB)
