"""Every executable of a CPU: nothing of the size of a cache or of a weight is copied, and caches stay where they are.

A copy of a cache in each step costs more than the attention that reads it; so does a weight that XLA lays out anew.
"""

import jax
import numpy as np
import pytest

from jaxserve.kernels.xla_attention import XLA_ATTENTION
from jaxserve.lab.compiled.hlo import parse_hlo, shape_bytes
from jaxserve.models.decoder_config import DecoderConfig, RopeConfig
from jaxserve.models.loading import one_device_mesh
from jaxserve.models.partition import Partition
from jaxserve.runtime.compile import Job, compile_all
from jaxserve.runtime.executables import AbstractStage, Sizes, make_jobs
from jaxserve.sched.plan import Bucket

pytestmark = pytest.mark.slow

# One row, few rows, many tokens: each multiplies in a way of its own.
BUCKETS = (Bucket(1, 1, True), Bucket(8, 8, True), Bucket(80, 8, False))
PAGES, PAGE = 700, 16
MODEL = DecoderConfig(
    vocab_size=512,
    hidden_size=256,
    ffn_size=768,
    num_layers=1,
    num_query_heads=8,
    num_kv_heads=2,
    head_dim=32,
    max_position=512,
    rope=RopeConfig(theta=10_000.0, rotary_dim=32),
    windows=(None,),
)
CACHE_BYTES = (PAGES + 1) * 2 * 32 * PAGE * 4  # of the keys, or of the values, of one layer
SMALLEST_WEIGHT = 256 * 256 * 4  # the output projection of attention; larger than any array of activations here
_MOVES = ("copy", "copy-start", "transpose")


def jobs() -> list[Job]:
    stage = AbstractStage.of(
        Partition.of(MODEL, 1), range(1), one_device_mesh(jax.devices("cpu")[0]), np.dtype("float32")
    )
    sizes = Sizes(
        backend="cpu",
        page_size=PAGE,
        max_rows=8,
        max_model_len=512,
        buckets=BUCKETS,
        cache_dtype=np.dtype("float32"),
    )
    return make_jobs(stage, sizes, XLA_ATTENTION, PAGES)


@pytest.fixture(scope="module")
def compiled():
    return compile_all(jobs(), None, lambda *_: None)


def large_moves(compiled: jax.stages.Compiled, limit: int) -> list[str]:
    """Instructions, in fusions too, that only move data and yield an array of at least `limit` bytes."""
    text = compiled.as_text()
    assert text is not None
    module = parse_hlo(text)
    return [
        instruction.text.strip()[:160]
        for instructions in module.computations.values()
        for instruction in instructions
        if instruction.op in _MOVES and max(shape_bytes(instruction.shape), default=0) >= limit
    ]


def test_there_are_executables_of_every_kind(compiled):
    names = {name.split()[0] for name in compiled}
    assert names >= {"decode", "mixed", "copy_pages", "write_tables", "configure_row", "write_masks"}, names


def test_nothing_large_is_copied(compiled):
    assert CACHE_BYTES > SMALLEST_WEIGHT, "then the limit of weights covers caches"
    for name, executable in compiled.items():
        assert not large_moves(executable.call, SMALLEST_WEIGHT), name


def test_caches_are_updated_in_place(compiled):
    for name, executable in compiled.items():
        memory = executable.call.memory_analysis()
        assert memory.alias_size_in_bytes >= 2 * MODEL.num_layers * CACHE_BYTES, name
        assert memory.temp_size_in_bytes < CACHE_BYTES, (name, memory.temp_size_in_bytes)


def test_a_step_of_one_row_needs_no_room_for_a_weight(compiled):
    """XLA multiplies a single vector in a way of its own, and copied weights of several axes for it."""
    assert compiled["decode 1x1"].temporary_bytes < SMALLEST_WEIGHT


def test_a_copy_would_be_seen():
    cache = jax.ShapeDtypeStruct((PAGES + 1, 2, PAGE, 32), np.float32)
    step = jax.jit(lambda c: (c, c.at[1].set(1.0)), donate_argnums=0)
    assert large_moves(step.lower(cache).compile(), CACHE_BYTES)
