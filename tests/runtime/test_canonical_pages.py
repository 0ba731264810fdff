"""Pages in their canonical form: the same bytes from every layout, and into every layout."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.ops import PAGED_ATTENTION
from jaxserve.kernels.paged_attention import CACHE_DTYPES, AttentionBatch, PagedAttention, stored
from jaxserve.kernels.pallas.tpu_layout import PageShape
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.family import find_family
from jaxserve.models.partition import Partition
from jaxserve.runtime.canonical_pages import (
    CacheForm,
    CanonicalPages,
    GroupPages,
    SlotForm,
    StageForm,
    export_pages,
    import_pages,
)
from jaxserve.runtime.mesh import layer_ranges
from jaxserve.runtime.page_groups import PageGroups

BODIES = {
    "xla": "cpu",
    "numba_cpu": "cpu",
    "xla_batched": "cpu",
    "mosaic_gpu": "gpu",
    "mosaic_tpu": "tpu",
}
TOKENS, HEADS, LAYERS = 256, 3, 3  # uneven on 2 devices, padded on 4, copied on 8
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
    scales: bytes = b"",
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
        scales=scales,
    )


def anything(layout: SlotForm, starts: list[int] | None = None) -> CanonicalPages:
    """Random bits."""
    layers = layout.layers
    starts = starts or [0] * len(layers)
    sizes = [
        (TOKENS - at) * 2 * k.num_heads * k.head_dim * k.bits.itemsize for at, k in zip(starts, layers, strict=True)
    ]
    data = np.random.default_rng(7).bytes(sum(sizes)) + layout.scales
    return CanonicalPages(layers=layers, starts=tuple(starts), end=TOKENS, data=data)


@pytest.mark.parametrize("name", BODIES)
def test_every_layout_gives_the_bytes_that_it_was_given(name: str) -> None:
    attention, head_dim = body(name), HEAD_DIMS.get(name, 32)
    for dtype in CACHE_DTYPES:
        wanted, slots_before = None, []
        for tensor, page_size, stages in itertools.product((1, 2, 4, 8), (16, 64, 128), (1, 2)):
            layout = form(
                attention, dtype, page_size=page_size, tensor=tensor, stages=stages, head_dim=head_dim, scales=b"2.5"
            )
            # All layouts get the same pages, so each gives what any other takes.
            wanted = wanted or anything(layout)
            [pages] = import_pages(layout, wanted)
            assert pages.slots.shape == (TOKENS // page_size, layout.slot_bytes)
            found = export_pages(layout, [pages])
            assert found == wanted, (dtype, tensor, page_size, stages)
            # A page by itself, as stores keep it; and no layout is another's.
            slot = bytearray(layout.slot_bytes)
            page = layout.to_page(memoryview(pages.slots[1].tobytes()))
            layout.from_page(memoryview(page), memoryview(slot))
            assert len(page) == layout.page_bytes and slot == pages.slots[1].tobytes()
            slots_before.append((stages, pages.slots.tobytes()))
        assert len({slots for stages, slots in slots_before if stages == 1}) == 12


@pytest.mark.slow
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
    layout = form(body("xla_batched"), "float32", tensor=8, page_size=16)
    [cache, *_] = layout.caches
    assert cache.heads == ((0,), (1,), (1,), (2,), (2,), (None,), (None,), (0,))  # devices 1 to 7, then 0
    [pages] = import_pages(layout, anything(layout))
    by_device = pages.slots.reshape(len(pages.slots), 8, -1)
    assert np.array_equal(by_device[:, 0], by_device[:, 7]) and np.array_equal(by_device[:, 1], by_device[:, 2])
    assert not by_device[:, 5:7].any() and by_device[:, 3].any()
    assert not np.array_equal(by_device[:, 0], by_device[:, 1])


def test_layers_with_windows_have_their_last_tokens() -> None:
    groups = PageGroups.of([None, 40, 40, None, 40, 40, None, 40], 512)
    assert len(groups.groups) > 1
    one = form(body("xla"), "bfloat16", groups=groups)
    two = form(body("numba_cpu"), "bfloat16", groups=groups, page_size=64, tensor=2, stages=2)
    assert one.describe() != two.describe()  # a page by itself has other layers
    starts = [192 if window else 0 for window in groups.windows]
    wanted = anything(one, starts)
    there = import_pages(two, wanted)
    assert [pages.first for pages in there] == [3 if group.window else 0 for group in groups.groups]
    assert export_pages(two, there) == wanted
    here = import_pages(one, export_pages(two, there))
    assert export_pages(one, here) == wanted


def test_whole_pages_alone_are_taken() -> None:
    small, large = (form(body("xla"), "int8", page_size=size) for size in (16, 128))
    wanted = anything(small)
    [pages] = import_pages(small, wanted)
    cut = export_pages(small, [GroupPages(1, pages.slots[1:15])])  # tokens 16 to 239
    assert (cut.starts, cut.end) == ((16,) * LAYERS, 240)
    [found] = import_pages(large, cut)
    assert (found.first, len(found.slots)) == (1, 0)
    [found] = import_pages(large, export_pages(small, [GroupPages(0, pages.slots[:15])]))
    [whole] = import_pages(large, wanted)
    assert found.first == 0 and np.array_equal(found.slots, whole.slots[:1])


def test_pages_of_something_else_are_refused() -> None:
    layout = form(body("xla"), "int8", scales=b"1234")
    pages = anything(layout)
    with pytest.raises(ConfigError, match="in int8, but this model has 3 layers of 3 heads of 32 in bfloat16"):
        import_pages(form(body("xla"), "bfloat16"), pages)
    with pytest.raises(ConfigError, match="other scales"):
        import_pages(dataclasses.replace(layout, scales=b"1235"), pages)
    with pytest.raises(ConfigError, match="export them again"):
        import_pages(layout, dataclasses.replace(pages, data=pages.data[1:]))
    with pytest.raises(ConfigError, match="export them again"):
        import_pages(layout, dataclasses.replace(pages, end=TOKENS + 16))
