"""Attention for GPUs as a whole: what it refuses, what it compiles to, and mixed batches in the interpreter."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from jaxserve.kernels.cases import REAL, Case, small
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.ops import PAGED_ATTENTION
from jaxserve.kernels.oracle import TOLERANCE, relative_error
from jaxserve.kernels.pallas.gpu_implementation import NAME, make_attention
from jaxserve.kernels.tuning import TunedTable, entry_name
from tests.kernels.gpu_compiler import compile_for_h200, needs_gpu_compiler, shapes_of
from tests.kernels.gpu_interpreter import (
    H200,
    IMPLEMENTATION,
    INTERPRETER,
    NO_TABLE,
    PADDING_IS_A_RACE,
    inputs_of,
    narrowed,
    watched,
)

# The two kernels alone meet every option with one key head (test_gpu_decode, test_gpu_prefill). Here most options meet
# both of them in one step, and a second key head: the implementation must give each its own scales, sinks and slopes.
MIXED = (
    "gpt-oss/busy/128/float8_e4m3fn",  # sinks, a window, scales; eight query heads for each key head
    "mpt-7b-alibi/ragged/64/bfloat16",  # slopes; a query head for each key head
    "llama3-8b-tp1/decode64/16/bfloat16",  # decode rows alone
)
# Each has another text of the kernels: eight bits, a soft cap, sinks, slopes, many heads. The mixes beside `busy`, that
# has rows of both kinds, differ in sizes of work lists and tables.
COMPILED_QUICK = ("llama3-8b-tp1/decode64/64/bfloat16",)
COMPILED = (
    *COMPILED_QUICK,
    "gpt-oss/busy/128/float8_e4m3fn",
    "gemma2-9b/busy/64/bfloat16",
    "mpt-7b-alibi/busy/64/bfloat16",
    "llama3-8b-tp4/busy/32/float8_e5m2",
    "llama3-8b-tp4/busy/32/int8",
    "llama3-70b-tp1/prefill8k/64/bfloat16",
)
USE = REAL["llama3-8b-tp1/decode64/64/bfloat16"].use


@pytest.fixture(scope="module")
def watch():
    with watched() as watch:
        yield watch


def tuned_for(case: Case) -> TunedTable:
    """Few programs, since the interpreter runs one after the other."""
    num_rows = len(case.rows) + case.padding_rows
    decode = {"stages": 2, "programs": 2 * num_rows * case.spec.num_kv_heads, "min_tiles": 1}
    return TunedTable(device_kind=H200.kind, entries={entry_name(NAME, "decode", case.use): decode})


def check(case: Case, watch) -> None:
    implementation = make_attention(H200, tuned_for(case), INTERPRETER)
    inputs = inputs_of(case)
    i = inputs
    attend = jax.jit(implementation.attend, static_argnums=5)
    out, _ = attend(i.q, i.k, i.v, i.cache, i.batch, case.spec, i.sinks, i.alibi_slopes, i.scales)
    assert out.dtype == i.q.dtype
    out = np.asarray(out)  # its dtype tells the oracle how it was rounded
    assert relative_error(case, inputs, out) <= TOLERANCE["bfloat16"]
    assert (out[sum(n for n, _ in case.rows) :] == 0).all()
    assert not watch.found_races() or PADDING_IS_A_RACE


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED)
def test_named_case_matches_the_oracle(name, watch):
    """With at most two key heads: an interpreter runs each head as a program of its own."""
    case = small(REAL[name])
    check(narrowed(case, min(2, case.spec.num_kv_heads)), watch)


@pytest.mark.slow
def test_a_mixed_step_of_decode_rows_alone(watch):
    case = narrowed(small(REAL["llama3-8b-tp8/decode64/64/bfloat16"]))
    check(dataclasses.replace(case, mixed=True, padding_tokens=4), watch)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"cache_dtype": "float32"}, "float32"),
        ({"query_dtype": "float32"}, "queries in float32"),
        ({"page_size": 24}, "page size 24"),
        ({"page_size": 4}, "page size 4"),
        ({"spec": dataclasses.replace(USE.spec, head_dim=320)}, "head dim 320"),
        ({"spec": dataclasses.replace(USE.spec, num_query_heads=1024)}, "128 query heads"),
    ],
)
def test_what_no_kernel_runs_is_refused_with_the_limit(change, told):
    reason = IMPLEMENTATION.refuses(dataclasses.replace(USE, **change))
    assert reason is not None and told in reason


@pytest.mark.parametrize(
    "device",
    [
        Device(backend="gpu", kind="NVIDIA A100", compute_capability=(8, 0)),
        Device(backend="gpu", kind="NVIDIA B200", compute_capability=(10, 0)),
        Device(backend="gpu", kind="AMD Instinct MI300X"),
        Device(backend="cpu", kind="cpu"),
    ],
)
def test_other_devices_are_refused(device):
    assert "compute capability" in (make_attention(device, NO_TABLE).refuses(USE) or "")


def test_tuned_sizes_beyond_shared_memory_are_refused_with_both_numbers():
    deep = {"stages": 9, "programs": 528, "min_tiles": 8}
    table = TunedTable(device_kind=H200.kind, entries={entry_name(NAME, "decode", USE): deep})
    reason = make_attention(H200, table).refuses(USE)
    assert reason is not None and "232448" in reason and "stages=9" in reason


def test_auto_takes_the_implementation_on_an_h200_and_leaves_what_it_refuses_to_plain_xla():
    assert PAGED_ATTENTION.resolve(device=H200, uses=[USE]).name == NAME
    refused = [dataclasses.replace(USE, page_size=24)]
    assert PAGED_ATTENTION.resolve(device=H200, uses=refused).name == "xla_batched"


def test_every_real_case_of_a_supported_dtype_and_page_size_runs():
    refused = {name for name, case in REAL.items() if IMPLEMENTATION.refuses(case.use) is not None}
    assert all("/24/" in name or REAL[name].cache_dtype == "float32" for name in refused), refused


def test_layers_share_the_code_of_their_kernels():
    """Lowering a kernel takes a second of Python, and a model has dozens of layers."""
    case = small(REAL["llama3-8b-tp8/busy/64/bfloat16"])
    shapes, attention = shapes_of(case), make_attention(H200, NO_TABLE)

    def num_kernels(layers: int) -> int:
        def attend(caches, q, k, v, batch):
            return [attention.attend(q, k, v, cache, batch, case.spec) for cache in caches]

        traced = jax.jit(attend).trace([shapes.cache] * layers, shapes.q, shapes.k, shapes.v, shapes.batch)
        return traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu")

    assert num_kernels(3) == num_kernels(1) > 0


# --- compiled for an H200 --------------------------------------------------------------------------------------------


def compiled(case: Case):
    i, spec = shapes_of(case), case.spec
    implementation = make_attention(H200, NO_TABLE)

    def run(q, k, v, cache, batch, sinks, slopes, scales):
        return implementation.attend(q, k, v, cache, batch, spec, sinks, slopes, scales)

    return i, compile_for_h200(run, i.q, i.k, i.v, i.cache, i.batch, i.sinks, i.alibi_slopes, i.scales, donate=(3,))


@needs_gpu_compiler
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in COMPILED_QUICK else pytest.mark.slow) for n in COMPILED]
)
def test_named_case_compiles_at_full_size_in_place(name):
    inputs, executable = compiled(REAL[name])
    kernels = re.findall(r"custom-call\(.*custom_call_target=\"mosaic_gpu", executable.as_text())
    assert len(kernels) == (3 if REAL[name].decode_only else 4)  # the write, splits, their combination, and prefill
    bytes_of_cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(inputs.cache))
    assert executable.memory_analysis().alias_size_in_bytes == bytes_of_cache
    shape = ",".join(map(str, inputs.cache.keys.shape))
    assert not re.findall(rf"= \S+\[{shape}\]\S* copy\(", executable.as_text())
