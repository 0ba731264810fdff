"""Pages of a CPU take no memory before they are used, and stay where they are."""

import ctypes
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import load_config
from jaxserve.kernels.xla_attention import XLA_ATTENTION
from jaxserve.models import plan_model
from jaxserve.runtime import zeros
from jaxserve.runtime.compile import Compiler
from jaxserve.runtime.executables import AbstractStage, state_job
from jaxserve.runtime.resolve import resolve_sizes
from jaxserve.runtime.store import ExecutableStore

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory that is zero by itself is Linux's")

SIZE = 256 * 2**20


def resident_bytes(array: jax.Array) -> int:
    """How much of an array's memory is there, page by page."""
    begin = -(-array.block_until_ready().unsafe_buffer_pointer() // 4096) * 4096
    count = array.nbytes // 4096 - 1
    there = (ctypes.c_ubyte * count)()
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert mincore(begin, count * 4096, there) == 0
    return 4096 * sum(page & 1 for page in bytes(there))


def make(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    zeros.register()
    return jax.jit(lambda: zeros.fresh_zeros(shape, np.dtype(dtype)))()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.uint16, jnp.float8_e4m3fn])
def test_fresh_zeros_are_zeros_that_take_no_memory(dtype: Any) -> None:
    array = make((SIZE // jnp.dtype(dtype).itemsize,), dtype).block_until_ready()
    assert array.dtype == dtype
    assert resident_bytes(array) == 0
    assert not np.asarray(array[:: 2**16]).astype(np.float32).any()


def test_a_donated_cache_stays_in_place_and_only_what_is_written_becomes_resident() -> None:
    write = jax.jit(lambda cache, page: cache.at[page].set(1.0), donate_argnums=0)
    cache = make((256, SIZE // 1024), jnp.float32).block_until_ready()
    where = cache.unsafe_buffer_pointer()
    for page in (3, 200, 3):
        cache = write(cache, page)
    assert cache.unsafe_buffer_pointer() == where
    assert SIZE // 128 <= resident_bytes(cache) < SIZE // 16
    assert float(cache[3].min()) == 1.0 and float(jnp.abs(cache[4]).max()) == 0.0


@pytest.mark.parametrize("offset", [0, 8, 4095])
@pytest.mark.parametrize("size", [1, 4095, 3 * 4096 + 5])
def test_memory_that_was_used_before_is_zeroed_to_its_edges_and_no_further(offset: int, size: int) -> None:
    memory = np.full(32 * 4096, 7, np.uint8)
    zeros.make_zero(memory.ctypes.data + 4096 + offset, size)
    assert not memory[4096 + offset : 4096 + offset + size].any()
    assert (memory[: 4096 + offset] == 7).all() and (memory[4096 + offset + size :] == 7).all()


@pytest.mark.usefixtures("store_alone")
def test_the_state_of_a_start_has_untouched_pages(tmp_path: Path) -> None:
    shapes = plan_model("demo").shapes
    sizes = resolve_sizes(load_config(None).config, shapes.partition.model, shapes.dtype, "cpu")
    stage = AbstractStage.of(shapes.partition, shapes.layers, shapes.mesh, shapes.dtype)
    job = state_job(stage, XLA_ATTENTION, sizes, num_pages=3000)
    store = ExecutableStore(tmp_path, ["state"], devices=list(shapes.mesh.devices.flat))
    for stored in (False, True):
        built = Compiler(None, store).build_one(job)
        assert built.stored is stored
        leaves = jax.tree.leaves(built.call().caches)
        total = sum(leaf.nbytes for leaf in leaves)
        assert total > 3000 * 64 * 5 * 1024
        assert sum(map(resident_bytes, leaves)) == 0
        assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
