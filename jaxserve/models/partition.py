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

from jaxserve.errors import ConfigError
from jaxserve.models.decoder_config import DecoderConfig, ExpertSpec, LayerSpec, MlpSpec
from jaxserve.models.sharding import EXPERT_AXIS, MESH_AXES, Axes, Placement, Shards

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
      expert_parts: into how many parts experts are dealt; `devices` / `expert_parts` devices share each expert.
      copies: of each key/value head.
      kv_heads, group: key/value heads over all devices, copies and padding included; query heads of each of them.
      vocab_size: V, padded.
    """

    model: DecoderConfig
    devices: int
    expert_parts: int
    copies: int
    kv_heads: int
    group: int
    vocab_size: int

    @classmethod
    def of(cls, model: DecoderConfig, devices: int, expert_parts: int = 1) -> "Partition":
        """The cut that gives the most loaded device the least: first key/value heads, then query heads.

        Raises ConfigError for several parts of experts that no layer has.
        """
        assert devices >= 1 and devices % expert_parts == 0, (devices, expert_parts)
        if expert_parts > 1 and not any(isinstance(layer.mlp, ExpertSpec) for layer in model.layers):
            raise ConfigError(
                f"parallel.expert is {expert_parts}, but no layer of this model has experts; set it to 1: "
                "parallel.tensor alone cuts what there is"
            )
        per_copy = model.group_size
        most = max(1, devices // model.num_kv_heads)
        # The fewest copies that still give a device no more query heads than `most` copies would.
        copies = next(c for c in range(1, most + 1) if _ceil(per_copy, c) == _ceil(per_copy, most))
        return cls(
            model=model,
            devices=devices,
            expert_parts=expert_parts,
            copies=copies,
            kv_heads=_round_up(model.num_kv_heads * copies, devices),
            group=_ceil(per_copy, copies),
            vocab_size=model.vocab_size if devices == 1 else _round_up(model.vocab_size, devices * _MASK_BITS),
        )

    @property
    def placement(self) -> Placement:
        """The `Placement` of one of the devices."""
        query_heads: list[int | None] = [None] * (self.kv_heads * self.group)
        for to, start, size in self._head_runs():
            query_heads[to : to + size] = range(start, start + size)
        return Placement(
            shards=Shards(count=self.devices, axis=MESH_AXES),
            experts=Shards(count=self.expert_parts, axis=EXPERT_AXIS),
            num_tokens=self.model.vocab_size,
            query_heads=tuple(query_heads),
            num_kv_heads=self.model.num_kv_heads * self.copies,
        )

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
            num_kv_heads=self.kv_heads // parts,
            num_query_heads=self.kv_heads * self.group // parts,
            layers=tuple(self._resized_layer(layer, parts) for layer in self.model.layers),
        )

    def _resized_layer(self, layer: LayerSpec, parts: int) -> LayerSpec:
        return dataclasses.replace(layer, mlp=self._resized_mlp(layer.mlp, parts))

    def _resized_mlp(self, mlp: MlpSpec | ExpertSpec, parts: int) -> MlpSpec | ExpertSpec:
        if isinstance(mlp, MlpSpec):
            return dataclasses.replace(mlp, size=_round_up(mlp.size, self.devices) // parts)
        expert_parts = self.expert_parts if parts > 1 else 1
        return dataclasses.replace(
            mlp,
            held=_round_up(mlp.count, self.expert_parts) // expert_parts,
            size=_round_up(mlp.size, self.devices // self.expert_parts) * expert_parts // parts,
            shared_size=_round_up(mlp.shared_size, self.devices) // parts,
        )

    def blocks(self, axes: Axes, shape: tuple[int, ...]) -> list[Block]:
        """The blocks of a checkpoint parameter with these axes and this shape; the rest of the padded array is zero."""
        if "slots" in axes:
            return [self._block(axes, shape, {"kv_heads": heads, "slots": slots}) for heads, slots in self._qkv_runs()]
        if "kv_heads" in axes:
            copies, heads = self.copies, self.model.num_kv_heads
            runs = [(0, 0, heads)] if copies == 1 else [(i, i // copies, 1) for i in range(heads * copies)]
            return [self._block(axes, shape, {"kv_heads": run}) for run in runs]
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
