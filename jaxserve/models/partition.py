"""The partition of one decoder over devices that share every layer, also when nothing divides evenly.

It gives the numbers of heads, ffn columns and vocabulary entries of each device, and the blocks that carry a parameter
of the checkpoint into its padded form. Axes of the mesh and rules are in `sharding`.

Padding and copies take the place of uneven cuts: XLA and the kernels want equal shapes on every device. Zeros beside
the real columns add exact zeros to every sum, so a padded model computes the very same function. Key/value heads fewer
than devices are copied, and the query heads of their group are dealt out over the copies: each device then reads the
whole context for its share of the queries, which costs cache (that of one head on each device) and no time.
"""

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.sharding import TENSOR_AXIS, WHOLE, Axes, Shards

_MASK_BITS = 32  # token masks keep 32 tokens in a word, and a word lies on one device

# Of one axis: where a block begins in the padded array, where in the checkpoint's, and how long it is.
Run = tuple[int, int, int]
Block = tuple[Run, ...]  # one run per axis


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A decoder on `devices` devices. Letters of `DecoderConfig`.

    Attributes:
      model: as the checkpoint says.
      devices: number of devices that share every layer.
      copies: of each key/value head.
      kv_heads, group: key/value heads over all devices, copies and padding included; query heads of each of them.
      ffn_size, vocab_size: F and V, padded.
    """

    model: DecoderConfig
    devices: int
    copies: int
    kv_heads: int
    group: int
    ffn_size: int
    vocab_size: int

    @classmethod
    def of(cls, model: DecoderConfig, devices: int) -> "Partition":
        """The cut that gives the most loaded device the least: first key/value heads, then query heads."""
        assert devices >= 1, devices
        per_copy = model.group_size
        most = max(1, devices // model.num_kv_heads)
        # The fewest copies that still give a device no more query heads than `most` copies would.
        copies = next(c for c in range(1, most + 1) if _ceil(per_copy, c) == _ceil(per_copy, most))
        return cls(
            model=model,
            devices=devices,
            copies=copies,
            kv_heads=_round_up(model.num_kv_heads * copies, devices),
            group=_ceil(per_copy, copies),
            ffn_size=_round_up(model.ffn_size, devices),
            vocab_size=model.vocab_size if devices == 1 else _round_up(model.vocab_size, devices * _MASK_BITS),
        )

    @property
    def shards(self) -> Shards:
        """The `Shards` of one of the devices."""
        return WHOLE if self.devices == 1 else Shards(count=self.devices, axis=TENSOR_AXIS)

    @property
    def padded(self) -> DecoderConfig:
        """Sizes of the arrays over all devices."""
        return self._resized(1)

    @property
    def local(self) -> DecoderConfig:
        """Sizes of the arrays of one device."""
        return self._resized(self.devices)

    def _resized(self, parts: int) -> DecoderConfig:
        return dataclasses.replace(
            self.model,
            vocab_size=self.vocab_size // parts,
            ffn_size=self.ffn_size // parts,
            num_kv_heads=self.kv_heads // parts,
            num_query_heads=self.kv_heads * self.group // parts,
        )

    def blocks(self, axes: Axes, shape: tuple[int, ...]) -> list[Block]:
        """The blocks of a checkpoint parameter with these axes and this shape; the rest of the padded array is zero."""
        if "kv_heads" in axes:
            return [self._block(axes, shape, {"kv_heads": heads, "group": group}) for heads, group in self._qkv_runs()]
        if "heads" in axes:
            return [self._block(axes, shape, {"heads": run}) for run in self._head_runs()]
        return [self._block(axes, shape, {})]

    def _block(self, axes: Axes, shape: tuple[int, ...], runs: dict[str, Run]) -> Block:
        return tuple(
            runs.get(axis, (0, 0, size)) if axis is not None else (0, 0, size)
            for axis, size in zip(axes, shape, strict=True)
        )

    def _qkv_runs(self) -> Iterator[tuple[Run, Run]]:
        """Runs of key/value heads, each with one of its group: query heads, then the key and the value behind them."""
        heads, per_head = self.model.num_kv_heads, self.model.group_size
        if self.copies == 1:
            yield (0, 0, heads), (0, 0, per_head + 2)
            return
        for head in range(heads):
            for copy in range(self.copies):
                place = (head * self.copies + copy, head, 1)
                dealt = min(self.group, per_head - copy * self.group)
                if dealt > 0:
                    yield place, (0, copy * self.group, dealt)
                yield place, (self.group, per_head, 2)

    def _head_runs(self) -> Iterator[Run]:
        heads, per_head = self.model.num_kv_heads, self.model.group_size
        if self.copies == 1:
            yield 0, 0, heads * per_head
            return
        for head in range(heads):
            for copy in range(self.copies):
                dealt = min(self.group, per_head - copy * self.group)
                if dealt > 0:
                    yield (head * self.copies + copy) * self.group, head * per_head + copy * self.group, dealt


def spread(array: jax.Array, blocks: list[Block], shape: tuple[int, ...]) -> jax.Array:
    """A parameter of the checkpoint's shape in its padded `shape`."""
    if array.shape == shape and len(blocks) == 1:
        return array
    out = jnp.zeros(shape, array.dtype)
    for block in blocks:
        into = tuple(slice(to, to + size) for to, _, size in block)
        out = out.at[into].set(array[tuple(slice(start, start + size) for _, start, size in block)])
    return out


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple
