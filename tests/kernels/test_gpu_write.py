"""The write on GPUs: in the interpreter against a scatter, and in place when compiled for an H200."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.cases import REAL, Case, small
from jaxserve.kernels.paged_attention import AttentionSpec
from jaxserve.kernels.pallas import gpu_write
from tests.kernels.gpu_compiler import compile_for_h200, needs_gpu_compiler, shapes_of
from tests.kernels.gpu_interpreter import INTERPRETER, PADDING_IS_A_RACE, inputs_of, plain_write, watched

ROWS = ((1, 1), (1, 16), (1, 33), (2, 2), (17, 48))
write = jax.jit(functools.partial(gpu_write.write, interpret=INTERPRETER))


@pytest.fixture(scope="module")
def watch():
    with watched() as watch:
        yield watch


def make_case(kv_heads: int, head_dim: int, page_size: int, dtype: str, rows=ROWS, padding_tokens: int = 5) -> Case:
    spec = AttentionSpec(num_query_heads=kv_heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=1.0)
    return Case(
        name="write",
        spec=spec,
        rows=rows,
        page_size=page_size,
        query_dtype="bfloat16",
        cache_dtype=dtype,
        padding_rows=1,
        padding_tokens=padding_tokens,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "page_size", "dtype"),
    [
        (3, 256, 8, "bfloat16"),
        (1, 96, 64, "float8_e5m2"),
        (2, 40, 128, "float8_e4m3fn"),
        (2, 128, 32, "int8"),
    ],
)
def test_the_write_stores_what_a_scatter_stores_and_nothing_else(kv_heads, head_dim, page_size, dtype, watch):
    inputs = inputs_of(make_case(kv_heads, head_dim, page_size, dtype))
    found = write(inputs.k, inputs.v, inputs.cache, inputs.batch, inputs.scales)
    wanted = plain_write(inputs.k, inputs.v, inputs.cache, inputs.batch, inputs.scales)
    for leaf, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert leaf.dtype == jnp.dtype(dtype)
        as_bytes = np.dtype(f"uint{8 * leaf.dtype.itemsize}")
        # Page 0 takes what padding tokens bring, in any order.
        np.testing.assert_array_equal(np.asarray(leaf)[1:].view(as_bytes), np.asarray(right)[1:].view(as_bytes))
    assert not watch.found_races() or PADDING_IS_A_RACE


@pytest.mark.parametrize("rows", [((1, 9), (1, 17), (1, 32)), ((37, 37),)])
def test_any_number_of_tokens(rows, watch):
    inputs = inputs_of(make_case(1, 64, 16, "bfloat16", rows=rows, padding_tokens=0))
    found = write(inputs.k, inputs.v, inputs.cache, inputs.batch)
    wanted = plain_write(inputs.k, inputs.v, inputs.cache, inputs.batch)
    for leaf, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf)[1:].view(np.uint16), np.asarray(right)[1:].view(np.uint16))


def test_padding_tokens_touch_no_page_but_the_dummy(watch):
    inputs = inputs_of(make_case(1, 64, 16, "bfloat16"))
    padding = jnp.full_like(inputs.batch.token_rows, len(inputs.batch.context_lens))
    found = write(inputs.k, inputs.v, inputs.cache, dataclasses.replace(inputs.batch, token_rows=padding))
    for leaf, before in zip(jax.tree.leaves(found), jax.tree.leaves(inputs.cache), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf)[1:].view(np.uint16), np.asarray(before)[1:].view(np.uint16))


def compiled(case: Case):
    inputs = shapes_of(case)
    return inputs, compile_for_h200(
        gpu_write.write, inputs.k, inputs.v, inputs.cache, inputs.batch, inputs.scales, donate=(2,)
    )


def assert_in_place(executable, cache) -> None:
    """Both leaves of the donated cache are the kernel's out- and input, and nothing of their size is made."""
    text = executable.as_text()
    (kernel,) = re.findall(r".* custom-call\(.*mosaic_gpu.*", text)
    aliases = re.search(r"output_to_operand_aliasing=\{\{0\}: \((\d+), \{\}\), \{1\}: \((\d+), \{\}\)\}", kernel)
    assert aliases, kernel
    bytes_of_cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    memory = executable.memory_analysis()
    assert memory.alias_size_in_bytes == bytes_of_cache
    shape = ",".join(map(str, cache.keys.shape))
    copies = re.findall(rf"= \S+\[{shape}\]\S* (?:copy|fusion|select|scatter)\(", text)
    assert not copies


@needs_gpu_compiler
@pytest.mark.parametrize(
    "name",
    ["llama3-8b-tp1/decode64/64/bfloat16", "gpt-oss/decode64/128/float8_e4m3fn"],
)
def test_the_compiled_write_is_in_place(name):
    inputs, executable = compiled(REAL[name])
    assert_in_place(executable, inputs.cache)


@needs_gpu_compiler
def test_a_copy_would_be_seen():
    case = small(REAL["llama3-8b-tp8/decode64/64/bfloat16"])
    inputs = shapes_of(case)
    kept = compile_for_h200(gpu_write.write, inputs.k, inputs.v, inputs.cache, inputs.batch)
    with pytest.raises(AssertionError):
        assert_in_place(kept, inputs.cache)


@needs_gpu_compiler
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 64), (1, 192), (64, 256)])
def test_odd_heads_of_eight_bits_compile(kv_heads, head_dim):
    compiled(make_case(kv_heads, head_dim, 16, "float8_e5m2"))
