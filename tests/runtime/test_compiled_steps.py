"""Every executable of a CPU: nothing of the size of a cache or of a weight is copied, and caches stay where they are.

A copy of a cache in each step costs more than the attention that reads it; so does a weight that XLA lays out anew.
"""

import dataclasses

import jax
import numpy as np
import pytest

from jaxserve.kernels.xla_attention import XLA_ATTENTION
from jaxserve.models.decoder_config import DecoderConfig, LayerSpec, MlpSpec, RopeConfig
from jaxserve.models.loading import one_device_mesh
from jaxserve.models.partition import Partition
from jaxserve.runtime.compile import Job, compile_all
from jaxserve.runtime.drafter import FromTokens, Speculation
from jaxserve.runtime.drafting import NgramDrafter
from jaxserve.runtime.executables import AbstractStage, Sizes, make_jobs
from jaxserve.runtime.hlo import parse_hlo, shape_bytes
from jaxserve.runtime.page_groups import PageGroups
from jaxserve.runtime.sum_order import read_orders
from jaxserve.sched.plan import Bucket

pytestmark = pytest.mark.slow

# One row, few rows, many tokens: each multiplies in a way of its own. And drafts, in one round and in a loop.
BUCKETS = (
    Bucket(1, 1, True),
    Bucket(8, 8, True),
    Bucket(80, 8, False),
    Bucket(32, 8, True, 4, 1),
    Bucket(32, 8, True, 4, 3),
)
PAGES, PAGE = 700, 16
LAYER = LayerSpec(mlp=MlpSpec(size=768), position=RopeConfig(theta=10_000.0, rotary_dim=32), scale=32**-0.5)
# Two groups of one layer: both write to the same array, one after the other.
MODEL = DecoderConfig(
    vocab_size=512,
    hidden_size=256,
    num_query_heads=8,
    num_kv_heads=2,
    head_dim=32,
    max_position=512,
    layers=(LAYER, dataclasses.replace(LAYER, window=48)),
)
CACHE_BYTES = (PAGES + 1) * 2 * 32 * PAGE * 4  # of the keys, or of the values, of one slot
SMALLEST_WEIGHT = 256 * 256 * 4  # the output projection of attention; larger than any array of activations here
_MOVES = ("copy", "copy-start", "transpose")


def jobs() -> list[Job]:
    stage = AbstractStage.of(
        Partition.of(MODEL, 1), range(2), one_device_mesh(jax.devices("cpu")[0]), np.dtype("float32")
    )
    sizes = Sizes(
        backend="cpu",
        page_size=PAGE,
        max_rows=8,
        max_model_len=512,
        buckets=BUCKETS,
        cache_dtype=np.dtype("float32"),
        page_groups=PageGroups.of(MODEL.windows, 512),
        speculation=Speculation(drafter=FromTokens(NgramDrafter(min_len=1, max_len=3)), window=512),
    )
    assert sizes.page_groups.num_slots(stage.layers) == 1 and len(sizes.page_groups.groups) == 2
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
        assert memory.alias_size_in_bytes >= 2 * CACHE_BYTES, name
        assert memory.temp_size_in_bytes < CACHE_BYTES, (name, memory.temp_size_in_bytes)


def test_a_step_of_one_row_needs_no_room_for_a_weight(compiled):
    """XLA multiplies a single vector in a way of its own, and copied weights of several axes for it."""
    assert compiled["decode 1x1"].temporary_bytes < SMALLEST_WEIGHT


def test_no_sum_over_a_row_is_left_to_the_compiler(compiled):
    """It would order the additions by the number of rows. The products of these steps are XLA's own."""
    for name, executable in compiled.items():
        assert {found.kind for found in read_orders(executable.call.as_text())} <= {"product"}, name


def test_a_copy_would_be_seen():
    cache = jax.ShapeDtypeStruct((PAGES + 1, 2, PAGE, 32), np.float32)
    step = jax.jit(lambda c: (c, c.at[1].set(1.0)), donate_argnums=0)
    assert large_moves(step.lower(cache).compile(), CACHE_BYTES)
