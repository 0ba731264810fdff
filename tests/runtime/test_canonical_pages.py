"""Pages in their canonical form: the same bytes from every layout, and into every layout."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.ops import PAGED_ATTENTION
from jaxserve.kernels.paged_attention import CACHE_DTYPES, AttentionBatch, PagedAttention, stored
from jaxserve.kernels.pallas.tpu_layout import PageShape
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.family import find_family
from jaxserve.models.partition import Partition
from jaxserve.runtime.canonical_pages import CacheForm, SlotForm, StageForm
from jaxserve.runtime.mesh import layer_ranges
from jaxserve.runtime.page_groups import PageGroups

BODIES = {
    "xla": "cpu",
    "numba_cpu": "cpu",
    "xla_batched": "cpu",
    "mosaic_gpu": "gpu",
    "mosaic_tpu": "tpu",
}
HEADS, LAYERS = 3, 3  # uneven on 2 devices, padded on 4, copied on 8
HEAD_DIMS = {"mosaic_gpu": 40, "mosaic_tpu": 40}  # no whole lanes


def body(name: str) -> PagedAttention:
    kinds = {"cpu": "cpu", "gpu": "NVIDIA H200", "tpu": "TPU v5 lite"}
    found: Any = PAGED_ATTENTION.implementations.get(name)
    return found if isinstance(found, PagedAttention) else found(Device(backend=BODIES[name], kind=kinds[BODIES[name]]))


@functools.cache
def model(head_dim: int) -> DecoderConfig:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2 * HEADS * head_dim,
        "intermediate_size": 64,
        "num_attention_heads": 2 * HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": head_dim,
        "num_hidden_layers": LAYERS,
        "vocab_size": 128,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }
    return find_family(raw, "config.json").decoder_config(raw, "config.json")


def form(
    attention: PagedAttention,
    dtype: str,
    *,
    page_size: int = 16,
    tensor: int = 1,
    stages: int = 1,
    head_dim: int = 32,
    groups: PageGroups | None = None,
) -> SlotForm:
    config = model(head_dim)
    groups = groups or PageGroups.of([None] * LAYERS, 512)
    assert attention.host_pages is not None
    # Devices of a slot need not be in the order of the heads.
    order = [*range(1, tensor), 0]
    cache = CacheForm.of(attention, Partition.of(config, tensor), page_size, np.dtype(jnp.dtype(dtype)), order)
    num_layers = len(groups.windows)
    ranges = [range(num_layers)] if stages == 1 else layer_ranges(num_layers, stages)
    return SlotForm(
        host_pages=attention.host_pages,
        page_size=page_size,
        stages=tuple(
            StageForm(caches=(cache,) * groups.num_slots(layers), places=groups.places(layers)) for layers in ranges
        ),
    )


def filled(layout: SlotForm, page: bytes) -> bytes:
    """The slot of that page, which gives the page back."""
    slot = bytearray(layout.slot_bytes)
    layout.from_page(memoryview(page), memoryview(slot))
    assert layout.to_page(memoryview(slot)) == page
    return bytes(slot)


@pytest.mark.parametrize("name", BODIES)
def test_every_layout_gives_the_bytes_that_it_was_given(name: str) -> None:
    attention, head_dim = body(name), HEAD_DIMS.get(name, 32)
    for dtype, page_size in itertools.product(CACHE_DTYPES, (16, 64, 128)):
        numbers = LAYERS * 2 * page_size * HEADS * head_dim
        page = np.random.default_rng(7).bytes(numbers * jnp.dtype(dtype).itemsize)
        slots, descriptions = [], set()
        for tensor, stages in itertools.product((1, 2, 4, 8), (1, 2)):
            layout = form(attention, dtype, page_size=page_size, tensor=tensor, stages=stages, head_dim=head_dim)
            assert layout.page_bytes == len(page)
            slots.append((stages, filled(layout, page)))
            descriptions.add(layout.describe())
        # All layouts got the same page, so each gives what any other takes; and no layout is another's.
        assert len(descriptions) == 1 and f"{page_size} tokens" in descriptions.pop()
        assert len({slot for stages, slot in slots if stages == 1}) == 4


@pytest.mark.parametrize(("dtype", "page_size"), [("bfloat16", 16), ("float8_e4m3fn", 20)])
@pytest.mark.parametrize("name", BODIES)
def test_the_layout_of_an_implementation_is_where_it_writes(name: str, dtype: str, page_size: int) -> None:
    """The XLA bodies write for real; the kernels' pages are put together by what they write (`PageShape.join`, and
    zeros behind the numbers of a head)."""
    attention, head_dim, pages = body(name), HEAD_DIMS.get(name, 32), 2
    rng = np.random.default_rng(1)
    count, kind = pages * page_size, jnp.dtype(dtype)
    keys, values = (stored(jnp.asarray(rng.normal(size=(count, HEADS, head_dim)) * 9), None, kind) for _ in range(2))
    cache = attention.init_cache(pages, page_size, HEADS, head_dim, kind)

    def by_page(x: jax.Array) -> jax.Array:
        return x.reshape(pages, page_size, *x.shape[1:])

    if name == "mosaic_gpu":
        padded = [jnp.pad(x, [(0, 0), (0, 0), (0, 64 - head_dim)]) for x in (keys, values)]
        leaves = [by_page(x).swapaxes(1, 2) for x in padded]
    elif name == "mosaic_tpu":
        lines = by_page(PageShape.make(page_size, head_dim, kind).join(keys, values))  # [pages, page, K, planes, 128]
        leaves = [jnp.zeros_like(cache)[1:].at[:, :, :, :page_size].set(lines.transpose(0, 2, 3, 1, 4))]
    else:
        batch = AttentionBatch(
            positions=jnp.arange(count, dtype=jnp.int32),
            token_rows=jnp.zeros(count, jnp.int32),
            q_starts=jnp.asarray([0, count], jnp.int32),
            context_lens=jnp.asarray([count], jnp.int32),
            block_tables=jnp.asarray([[1, 2]], jnp.int32),
            page_size=page_size,
            decode_only=False,
        )
        written = attention.write(keys, values, cache, batch)
        leaves = [leaf[1:] for leaf in jax.tree.leaves(written)]
    shapes = [leaf.shape[1:] for leaf in jax.tree.leaves(cache)]
    assert [leaf.shape[1:] for leaf in leaves] == shapes
    bits = np.dtype(f"u{kind.itemsize}")
    native = [np.asarray(leaf).view(bits) for leaf in leaves]
    assert attention.host_pages is not None
    k, v = attention.host_pages.read(native, page_size, head_dim)
    for found, want in ((k, keys), (v, values)):
        assert np.array_equal(found, np.asarray(by_page(want)).view(bits))
    for found, want in zip(attention.host_pages.write(k, v), native, strict=True):
        assert np.array_equal(found, want)


def test_heads_are_where_their_devices_have_them() -> None:
    """Three heads on eight devices: each is copied to two, and two devices have padding."""
    layout = form(body("xla_batched"), "float32", tensor=8)
    [cache, *_] = layout.caches
    assert cache.heads == ((0,), (1,), (1,), (2,), (2,), (None,), (None,), (0,))  # devices 1 to 7, then 0
    page = np.random.default_rng(7).integers(0, 1 << 32, (LAYERS, 2, 16, HEADS, 32), np.uint32)
    slot = filled(layout, page.tobytes())
    for heads, found in zip(cache.heads, np.frombuffer(slot, np.uint32).reshape(8, LAYERS, 2, 16, 32), strict=True):
        [head] = heads
        assert np.array_equal(found, np.zeros_like(found) if head is None else page[:, :, :, head])


def test_pages_of_layers_with_windows_follow_from_the_stages() -> None:
    """Layers of several groups share a cache, and other stages other ones: then no page is the other's."""
    groups = PageGroups.of([None, 40, 40, None, 40, 40, None, 40], 512)
    assert len(groups.groups) > 1
    one, other, two = (
        form(body(name), "bfloat16", groups=groups, tensor=tensor, stages=stages)
        for name, tensor, stages in (("xla", 1, 1), ("xla_batched", 2, 1), ("numba_cpu", 2, 2))
    )
    assert one.describe() == other.describe() != two.describe()
    for layout in (one, other, two):
        filled(layout, np.random.default_rng(7).bytes(layout.page_bytes))
