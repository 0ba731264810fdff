"""Products with the low-rank weights of LoRA adapters (Hu et al., 2021), a different adapter for each token.

A projection y = W x becomes y = W x + B (A x), where A has r rows and B has r columns. The weights of all adapters of a
device lie in slots, of which slot 0 holds zeros: it is that of tokens without an adapter. The form of the slots is that
which the form of W wants (`matmul.Weight.slots_for`): here is XLA's, for all but packed weights (`packed_low_rank`).

Bits: a token has the products of its own slot, and exact zeros of all others, whatever their order. So its bits do not
depend on the slots or on the adapters of other tokens, as long as all adapters are finite.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRank:
    """The adapters of one projection from [*in] to [*out]; or, without the axis S, one of them.

    A fused projection has parts with an A each (query, key and value, say): slices of `axis` of [*out], in their order.

    A tree of arrays, of the device or of the host, and so also of their shapes or shardings.

    Attributes:
      down: A [S, P, r, *in], for each of P parts.
      up: B [S, *out, r] of each part, with the scale of the adapter in it.
      axis: of [*out].
    """

    down: Any
    up: tuple[Any, ...]
    axis: int = dataclasses.field(metadata={"static": True})

    def written(self, slot: Int[Array, ""], one: "LowRank") -> "LowRank":
        """`SlotArrays.written`."""
        return jax.tree.map(lambda all_, own: with_one(all_, slot, own), self, one)

    def cut(self, one: "LowRank") -> "LowRank":
        """`SlotArrays.cut`: that of one, along the other axes."""
        return jax.tree.map(lambda spec: PartitionSpec(None, *spec), one, is_leaf=_is_spec)


class SlotArrays(Protocol):
    """The adapters of one projection in all slots of a device, in the form that its products want."""

    def written(self, slot: Int[Array, ""], one: LowRank) -> Self:
        """With an adapter in a slot."""
        ...

    def cut(self, one: LowRank) -> Self:
        """The cut over devices, a `PartitionSpec` for each array, where `one` is that of one adapter."""
        ...


def with_one(all_: Array, slot: Int[Array, ""], one: Array) -> Array:
    """The array [S, ...] with another one [...] in a slot."""
    return lax.dynamic_update_index_in_dim(all_, one, slot, 0)


def _is_spec(leaf: object) -> bool:
    return isinstance(leaf, PartitionSpec)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenSlots:
    """The slots of a step.

    Attributes:
      of_token: the slot of each token; 0: none.
      used: the slots that some token has, ascending, and unused ones behind them.
      count: of the slots that some token has.
    """

    of_token: Int[Array, " T"]
    used: Int[Array, " S-1"]
    count: Int[Array, ""]

    @classmethod
    def of(cls, of_token: Int[Array, " T"], num_slots: int) -> "TokenSlots":
        """`num_slots`: S, slot 0 included."""
        slots = jnp.arange(1, num_slots)
        is_used = jnp.any(of_token[:, None] == slots[None, :], axis=0)  # [S - 1]
        used = slots[jnp.argsort(~is_used, stable=True)]
        return cls(of_token=of_token, used=used, count=jnp.sum(is_used, dtype=jnp.int32))


class TokenAdapters(NamedTuple):
    """The adapters of one projection, and the slots of the tokens that are multiplied."""

    arrays: SlotArrays
    slots: TokenSlots


def low_rank_product(x: Float[Array, "T ..."], weights: LowRank, slots: TokenSlots) -> Float[Array, "T ..."]:
    """B (A x) of each token's own adapter, [T, *out] in float32. A step without adapters skips it.

    A CPU visits the slots that are used, one after the other: it waits for the bytes of weights. Accelerators make
    two products with all slots, since a loop whose length the device alone knows costs them more.
    """
    return lax.platform_dependent(x, weights, slots, cpu=visit_used_slots, default=multiply_all_slots)


def visit_used_slots(x: Float[Array, "T ..."], weights: LowRank, slots: TokenSlots) -> Float[Array, "T ..."]:
    """Reads the used slots alone."""

    def add_slot(number: Int[Array, ""], total: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        slot = slots.used[number]
        down, *up = (lax.dynamic_index_in_dim(array, slot, 0, keepdims=False) for array in (weights.down, *weights.up))
        rank = down.shape[1]
        inner = _dot(_flat(x), down.reshape(-1, math.prod(down.shape[2:])))  # [T, P * r]
        inner = jnp.where((slots.of_token == slot)[:, None], inner, 0).astype(x.dtype)
        parts = [
            _dot(inner[:, part * rank : (part + 1) * rank], array.reshape(-1, rank)).reshape(-1, *array.shape[:-1])
            for part, array in enumerate(up)
        ]
        return total + _joined(parts, weights.axis)

    return lax.fori_loop(0, slots.count, add_slot, _zeros(x, weights))


def multiply_all_slots(x: Float[Array, "T ..."], weights: LowRank, slots: TokenSlots) -> Float[Array, "T ..."]:
    """Reads all slots, if any is used."""

    def multiply(x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        num_slots, num_parts, rank = weights.down.shape[:3]
        inner = _dot(_flat(x), weights.down.reshape(num_slots * num_parts * rank, -1))
        inner = inner.reshape(-1, num_slots, num_parts, rank)
        is_own = slots.of_token[:, None] == jnp.arange(num_slots)  # [T, S]
        inner = jnp.where(is_own[:, :, None, None], inner, 0).astype(x.dtype)
        parts = []
        for part, array in enumerate(weights.up):
            axes = (((1, 2), (0, array.ndim - 1)), ((), ()))
            parts.append(_general(inner[:, :, part], array, axes))
        return _joined(parts, weights.axis)

    return lax.cond(slots.count > 0, multiply, lambda x: _zeros(x, weights), x)


def _zeros(x: Float[Array, "T ..."], weights: LowRank) -> Float[Array, "T ..."]:
    parts = [jax.ShapeDtypeStruct((x.shape[0], *array.shape[1:-1]), jnp.float32) for array in weights.up]
    shape = [*parts[0].shape]
    shape[1 + weights.axis] = sum(part.shape[1 + weights.axis] for part in parts)
    return jnp.zeros(shape, jnp.float32)


def _joined(parts: list[Float[Array, "T ..."]], axis: int) -> Float[Array, "T ..."]:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1 + axis)


def _flat(x: Float[Array, "T ..."]) -> Float[Array, "T D"]:
    return x.reshape(x.shape[0], -1)


def _dot(x: Float[Array, "T D"], weight: Float[Array, "N D"]) -> Float[Array, "T N"]:
    return _general(x, weight, (((1,), (1,)), ((), ())))


def _general(
    x: Array, weight: Array, axes: tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
) -> Array:
    """In float32; float32 operands are not rounded to less, as in `xla_matmul`."""
    precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(x, weight, axes, precision=precision, preferred_element_type=jnp.float32)
