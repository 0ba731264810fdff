"""Keys and values in a form that no layout shows in, from the slots of one engine and into those of another.

    for each layer:            keys [tokens, K, H], then values [tokens, K, H], in the type of the cache
    for a cache with scales:   float32 [L, 2, K], of keys and of values

K are the heads of the checkpoint. So the form is the same for every implementation of attention (transposed keys,
joined keys and values, padding), every number of devices (padded and copied heads), of stages, and of tokens of a page.
Two engines may exchange it if their model and the type of their cache are the same. Numbers are moved as bits.

All of this is about bytes in host memory, as `page_moves` packs them and `host_slots` keeps them: no step is compiled
for it. `SlotForm` is the layout of a slot; `export_pages` and `import_pages` are about pages of one sequence;
`SlotForm.to_page` and `from_page` are about a page by itself, as stores keep it.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.kernels.paged_attention import HostPages, PagedAttention
from jaxserve.models.cache_scales import CacheScales
from jaxserve.models.decoder import CachePlace
from jaxserve.models.partition import Partition
from jaxserve.runtime.executables import AbstractStage, Sizes, packed_sharding, packed_words

_WORD = 4  # bytes; each array of a page begins at a word
_VERSION = 1

# Keys and values of some pages, both [S, page size, K, H]: unsigned integers of the size of the cache's numbers.
KeysValues = tuple[np.ndarray, np.ndarray]


class LayerKind(NamedTuple):
    """What the numbers of a layer are. `num_heads`: K of the checkpoint."""

    dtype: str
    num_heads: int
    head_dim: int

    @property
    def bits(self) -> np.dtype:
        """The unsigned integer of the size of a number."""
        return np.dtype(f"u{np.dtype(self.dtype).itemsize}")

    def __str__(self) -> str:
        return f"{self.num_heads} heads of {self.head_dim} in {self.dtype}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheForm:
    """The arrays of a layer's cache, which layers of several page groups may share.

    Attributes:
      shapes: of one page on one device, of each array in the order of `jax.tree.leaves`.
      heads: for each device, in the order of a slot, the number in the checkpoint of each of its heads; None: padding.
    """

    kind: LayerKind
    shapes: tuple[tuple[int, ...], ...]
    heads: tuple[tuple[int | None, ...], ...]

    @classmethod
    def of(
        cls, attention: PagedAttention, partition: Partition, page_size: int, dtype: np.dtype, order: Sequence[int]
    ) -> "CacheForm":
        """`order`: for each device, in the order of a slot, which part of the heads it has."""
        local, model = partition.local, partition.model
        pages = jax.eval_shape(
            functools.partial(attention.init_cache, 1, page_size, local.num_kv_heads, local.head_dim, dtype)
        )
        real = model.num_kv_heads * partition.copies
        numbers = [head // partition.copies if head < real else None for head in range(partition.kv_heads)]
        each = local.num_kv_heads
        return cls(
            kind=LayerKind(np.dtype(dtype).name, model.num_kv_heads, model.head_dim),
            shapes=tuple(leaf.shape[1:] for leaf in jax.tree.leaves(pages)),
            heads=tuple(tuple(numbers[part * each : (part + 1) * each]) for part in order),
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each array of a page on one device."""
        return tuple(math.prod(shape) * self.kind.bits.itemsize for shape in self.shapes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageForm:
    """The part of a slot that the devices of one stage fill.

    Attributes:
      caches: on each device one behind the other.
      places: of the stage's layers, and behind them those of a drafter; `slot` is a number of `caches`.
    """

    caches: tuple[CacheForm, ...]
    places: tuple[CachePlace, ...]

    @property
    def num_devices(self) -> int:
        return len(self.caches[0].heads)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlotForm:
    """How the bytes of a slot are arranged, which is a page of all stages and devices.

    Attributes:
      host_pages: of the implementation of attention.
      scales: bytes of the scales, as the canonical form has them; empty where the cache needs none.
    """

    host_pages: HostPages
    page_size: int
    stages: tuple[StageForm, ...]
    scales: bytes = b""

    @property
    def slot_bytes(self) -> int:
        """Of a page as it is packed."""
        caches = [(stage.num_devices, size) for stage in self.stages for cache in stage.caches for size in cache.sizes]
        return sum(devices * _in_words(size) for devices, size in caches)

    @property
    def caches(self) -> tuple[CacheForm, ...]:
        """Of all stages."""
        return tuple(cache for stage in self.stages for cache in stage.caches)

    @property
    def page_bytes(self) -> int:
        """Of a page in its canonical form (`to_page`)."""
        return sum(self._side_bytes(cache.kind) * 2 for cache in self.caches)

    @property
    def places(self) -> tuple[CachePlace, ...]:
        """Of the layers of all stages, where `slot` is a number of `caches`."""
        found, start = [], 0
        for stage in self.stages:
            found += [CachePlace(place.group, start + place.slot) for place in stage.places]
            start += len(stage.caches)
        return tuple(found)

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, those of a drafter last."""
        caches = self.caches
        return tuple(caches[place.slot].kind for place in self.places)

    def describe(self) -> str:
        """A text that is equal where `to_page` gives the same bytes for the same keys and values."""
        kinds = collections.Counter(str(cache.kind) for cache in self.caches)
        text = f"canonical {_VERSION}, {self.page_size} tokens, "
        text += ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        if any(place.group for place in self.places):  # several layers share a cache, dealt by stages and windows
            text += f", layers in {[tuple(place) for place in self.places]}"
        return text

    def read(self, slots: np.ndarray) -> list[KeysValues]:
        """Keys and values of each of `caches`, of slots uint8 [S, slot_bytes]."""
        assert slots.shape[1:] == (self.slot_bytes,), (slots.shape, self.slot_bytes)
        found: list[KeysValues] = []
        start = 0
        for stage in self.stages:
            pages = [self.zeros(len(slots), cache.kind) for cache in stage.caches]
            for device in range(stage.num_devices):
                for cache, (keys, values) in zip(stage.caches, pages, strict=True):
                    leaves = []
                    for shape, size in zip(cache.shapes, cache.sizes, strict=True):
                        raw = np.ascontiguousarray(slots[:, start : start + size])
                        leaves.append(raw.view(cache.kind.bits).reshape(-1, *shape))
                        start += _in_words(size)
                    of_device, whole = _held(cache.heads[device])
                    if whole:
                        k, v = self.host_pages.read(leaves, self.page_size, cache.kind.head_dim)
                        keys[:, :, whole], values[:, :, whole] = k[:, :, of_device], v[:, :, of_device]
            found += pages
        return found

    def write(self, pages: Sequence[KeysValues]) -> np.ndarray:
        """The inverse of `read`: uint8 [S, slot_bytes], with 0 in all padding."""
        count, start = len(pages[0][0]), 0
        slots = np.zeros((count, self.slot_bytes), np.uint8)
        rest = iter(pages)
        for stage in self.stages:
            mine = [next(rest) for _ in stage.caches]
            for device in range(stage.num_devices):
                for cache, (keys, values) in zip(stage.caches, mine, strict=True):
                    of_device, whole = _held(cache.heads[device])
                    shape = (count, self.page_size, len(cache.heads[device]), cache.kind.head_dim)
                    k, v = np.zeros(shape, cache.kind.bits), np.zeros(shape, cache.kind.bits)
                    k[:, :, of_device], v[:, :, of_device] = keys[:, :, whole], values[:, :, whole]
                    for leaf, size in zip(self.host_pages.write(k, v), cache.sizes, strict=True):
                        raw = np.ascontiguousarray(leaf).view(np.uint8).reshape(count, size)
                        slots[:, start : start + size] = raw
                        start += _in_words(size)
        return slots

    def to_page(self, slot: memoryview) -> bytes:
        """A slot's page for a store: keys, then values, [page size, K, H] of each of `caches`."""
        pages = self.read(np.frombuffer(slot, np.uint8)[None])
        return b"".join(side.tobytes() for page in pages for side in page)

    def from_page(self, page: memoryview, slot: memoryview) -> None:
        """Fills a slot with what `to_page` gave, here or elsewhere."""
        start, pages = 0, []
        for cache in self.caches:
            size = self._side_bytes(cache.kind)
            shape = (1, self.page_size, cache.kind.num_heads, cache.kind.head_dim)
            sides = [page[at : at + size] for at in (start, start + size)]
            keys, values = (np.frombuffer(side, cache.kind.bits).reshape(shape) for side in sides)
            pages.append((keys, values))
            start += 2 * size
        assert start == page.nbytes, (start, page.nbytes)
        np.frombuffer(slot, np.uint8)[:] = self.write(pages)[0]

    def _side_bytes(self, kind: LayerKind) -> int:
        return self.page_size * kind.num_heads * kind.head_dim * kind.bits.itemsize

    def zeros(self, count: int, kind: LayerKind) -> KeysValues:
        """Of so many pages."""
        shape = (count, self.page_size, kind.num_heads, kind.head_dim)
        return np.zeros(shape, kind.bits), np.zeros(shape, kind.bits)


def slot_form(
    stages: Sequence[AbstractStage], attention: PagedAttention, sizes: Sizes, scales: CacheScales | None
) -> SlotForm | None:
    """The form of the slots of one replica, whose stages have their meshes.

    None where the implementation's layout is not known, or another process has a part of each page.
    """
    if attention.host_pages is None or any(set(s.mesh.devices.flat) != set(s.mesh.local_devices) for s in stages):
        return None
    drafter = None if sizes.speculation is None else sizes.speculation.drafter
    forms = []
    for stage in stages:
        parts = packed_sharding(stage).devices_indices_map((1, stage.mesh.size))
        order = [parts[device][1].start or 0 for device in sorted(parts, key=lambda device: device.id)]
        dtype = np.dtype(sizes.cache_dtype)
        cache = CacheForm.of(attention, stage.partition, sizes.page_size, dtype, order)
        caches, places = [cache] * sizes.page_groups.num_slots(stage.layers), [*sizes.page_groups.places(stage.layers)]
        if drafter is not None and drafter.decoder is not None:  # see `draft_caches`
            partition = Partition.of(drafter.decoder, stage.partition.devices)
            own = CacheForm.of(attention, partition, sizes.page_size, np.dtype(stage.dtype), order)
            for _ in drafter.decoder.layers:
                places.append(CachePlace(drafter.group, len(caches)))
                caches.append(own)
        forms.append(StageForm(caches=tuple(caches), places=tuple(places)))
    form = SlotForm(
        host_pages=attention.host_pages,
        page_size=sizes.page_size,
        stages=tuple(forms),
        scales=b"" if scales is None else np.stack([scales.keys, scales.values], axis=1).tobytes(),
    )
    packed = sum(_WORD * stage.mesh.size * packed_words(stage, attention, sizes) for stage in stages)
    assert form.slot_bytes == packed, (form.slot_bytes, packed)
    return form


class GroupPages(NamedTuple):
    """Successive whole pages of a sequence, of one page group.

    Attributes:
      first: number of the first of them in the sequence; 0 but for layers with a window.
      slots: uint8 [S, slot_bytes].
    """

    first: int
    slots: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalPages:
    """Keys and values of tokens of one sequence.

    Attributes:
      layers: the kind of each layer.
      starts: of each layer, the position of its first token.
      end: the position behind the last token of all layers.
      data: the canonical form.
    """

    layers: tuple[LayerKind, ...]
    starts: tuple[int, ...]
    end: int
    data: bytes


def export_pages(form: SlotForm, groups: Sequence[GroupPages]) -> CanonicalPages:
    """The canonical form of pages that end at the same token. `groups`: the pages of each page group."""
    ends = {group.first + len(group.slots) for group in groups}
    assert len(ends) == 1, ends
    pages = [form.read(group.slots) for group in groups]
    data = [np.ascontiguousarray(side).tobytes() for place in form.places for side in pages[place.group][place.slot]]
    return CanonicalPages(
        layers=form.layers,
        starts=tuple(groups[place.group].first * form.page_size for place in form.places),
        end=ends.pop() * form.page_size,
        data=b"".join([*data, form.scales]),
    )


def import_pages(form: SlotForm, pages: CanonicalPages) -> list[GroupPages]:
    """The slots of each page group, of whole pages alone: tokens that do not fill one are left out.

    Raises ConfigError for pages of another model or cache.
    """
    if pages.layers != form.layers:
        raise ConfigError(
            f"the pages are of {_describe(pages.layers)}, but this model has {_describe(form.layers)}; "
            "the checkpoint and cache.dtype of both engines must be the same"
        )
    counts = [
        (pages.end - start) * kind.num_heads * kind.head_dim
        for start, kind in zip(pages.starts, pages.layers, strict=True)
    ]
    needed = sum(2 * count * kind.bits.itemsize for count, kind in zip(counts, pages.layers, strict=True))
    if min(counts) < 0 or len(pages.data) != needed + len(form.scales):
        raise ConfigError(
            f"the pages have {len(pages.data)} bytes, but tokens up to {pages.end} of this model have "
            f"{needed + len(form.scales)}; export them again"
        )
    if pages.data[needed:] != form.scales:
        raise ConfigError(
            "the pages were kept with other scales than this cache has; cache.scales of both engines must be the same"
        )
    sides, at = [], 0
    for count, kind in zip(counts, pages.layers, strict=True):
        for _ in range(2):
            found = np.frombuffer(pages.data, kind.bits, count, at)
            sides.append(found.reshape(-1, kind.num_heads, kind.head_dim))
            at += found.nbytes
    return [_group_slots(form, pages, sides, group) for group in range(1 + max(place.group for place in form.places))]


def _group_slots(form: SlotForm, pages: CanonicalPages, sides: Sequence[np.ndarray], group: int) -> GroupPages:
    """`sides`: [tokens, K, H], the keys and the values of each layer."""
    size, places = form.page_size, form.places
    layers = [layer for layer, place in enumerate(places) if place.group == group]
    first, end = max(-(-pages.starts[layer] // size) for layer in layers), pages.end // size
    count = max(0, end - first)
    held = [form.zeros(count, cache.kind) for cache in form.caches]
    for layer in layers:
        begin = first * size - pages.starts[layer]
        for into, side in zip(held[places[layer].slot], sides[2 * layer : 2 * layer + 2], strict=True):
            into[:] = side[begin : begin + count * size].reshape(into.shape)
    return GroupPages(first, form.write(held))


def _describe(layers: Sequence[LayerKind]) -> str:
    return ", ".join(f"{count} layers of {kind}" for kind, count in collections.Counter(layers).items())


def _held(heads: Sequence[int | None]) -> tuple[list[int], list[int]]:
    """The places of a device's heads that are no padding, and their numbers in the checkpoint."""
    real = [(place, head) for place, head in enumerate(heads) if head is not None]
    return [place for place, _ in real], [head for _, head in real]


def _in_words(size: int) -> int:
    return -(-size // _WORD) * _WORD
