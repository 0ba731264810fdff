"""Adapters of a projection in the order in which a CPU's own product with its weight reads them.

A CPU has the product of a packed weight in panels (`packed_weight`), and B lies in the same panels: so what an adapter
adds is added where the product of a panel is still in the cache, before gate and up are multiplied with each other. The
base is multiplied as without adapters, to the bit. The machine code, in `cpu.low_rank`, reads the slots that tokens of
the step have, and where none has one it looks at the slots of the tokens and does nothing more.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxserve.kernels import halves
from jaxserve.kernels.cpu.scratch import LowRankScratch
from jaxserve.kernels.low_rank import LowRank, TokenSlots, with_one


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedLowRank:
    """`SlotArrays` beside a `PackedWeight` with panels of W columns.

    A x of a token is [P * r], of all parts one after the other, and H = W / 2 of these numbers are a strip of A.

    Attributes:
      down: A [S, N, in, H] in N strips, with zeros past the last; of bfloat16 [S, N, in / 2, H, 2], two inputs side by
        side as in the weight.
      up: B [S, panels, r, W], with the columns of a panel where the weight has them.
      out_shape: of the weight.
      part_sizes: of each part along `axis` of `out_shape`.
    """

    down: Float[Array, "S N K H"] | Float[Array, "S N K/2 H 2"]
    up: Float[Array, "S P r W"]
    out_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    part_sizes: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def shapes(cls, one: LowRank, num_slots: int, out_shape: tuple[int, ...], width: int) -> "PackedLowRank":
        """With shapes in place of arrays, for adapters of the shapes of `one` and a weight to `out_shape`."""
        num_parts, rank = one.down.shape[:2]
        depth, dtype, half = math.prod(one.down.shape[2:]), one.down.dtype, width // 2
        inputs = (-(-depth // 2), half, 2) if dtype == jnp.bfloat16 else (depth, half)
        down: Any = jax.ShapeDtypeStruct((num_slots, -(-num_parts * rank // half), *inputs), dtype)
        up: Any = jax.ShapeDtypeStruct((num_slots, halves.num_panels(out_shape, width), rank, width), dtype)
        sizes = tuple(part.shape[one.axis] for part in one.up)
        return cls(down=down, up=up, out_shape=out_shape, part_sizes=sizes, axis=one.axis)

    def written(self, slot: Int[Array, ""], one: LowRank) -> "PackedLowRank":
        """`SlotArrays.written`."""
        _, strips, _, half = self.down.shape[:4]
        down = one.down.reshape(-1, math.prod(one.down.shape[2:]))  # [P * r, in]
        odd = down.shape[1] % 2 if self.down.ndim == 5 else 0
        down = jnp.pad(down, ((0, strips * half - down.shape[0]), (0, odd)))
        down = down.reshape(strips, half, *self.down.shape[2:3], -1)  # [N, H, in, 1] or [N, H, in / 2, 2]
        down = down.transpose(0, 2, 1, 3).reshape(self.down.shape[1:])
        _, panels, rank, width = self.up.shape
        up = jnp.concatenate(one.up, axis=self.axis)  # [*out, r]
        up = halves.to_panels(up.reshape(math.prod(self.out_shape), rank), self.out_shape, width)
        up = up.reshape(panels, width, rank).swapaxes(1, 2)
        return dataclasses.replace(self, down=with_one(self.down, slot, down), up=with_one(self.up, slot, up))

    def cut(self, one: LowRank) -> "PackedLowRank":
        """`SlotArrays.cut`: a device has all of a packed weight, and of its adapters."""
        del one
        return jax.tree.map(lambda _: PartitionSpec(), self)

    def operands(self, slots: TokenSlots) -> tuple[list[Array], int]:
        """What the machine code is given beside the operands of the weight, and bytes of scratch memory."""
        from jaxserve.kernels.cpu.low_rank import BLOCK_TOKENS  # needs Numba

        num_slots, strips, _, half = self.down.shape[:4]
        scratch = LowRankScratch.of(
            num_tokens=slots.of_token.shape[0], columns=strips * half, num_slots=num_slots, block=BLOCK_TOKENS
        )
        begins = jnp.asarray([scratch.tokens_begin, scratch.blocks_begin], jnp.int32)
        return [slots.of_token, self.down, self.up, jnp.asarray(self._parts()), begins], scratch.num_bytes

    def _parts(self) -> np.ndarray:
        """int32: the part of each half of a panel, -1 where its columns are of several; then that of each column."""
        _, panels, _, width = self.up.shape
        numbers = np.repeat(np.arange(len(self.part_sizes), dtype=np.int32), self.part_sizes)
        shape = [1] * len(self.out_shape)
        shape[self.axis] = -1
        of_outputs = np.broadcast_to(numbers.reshape(shape), self.out_shape).reshape(-1)
        # Columns past the last belong to no part, and so to any: B has zeros there.
        columns = np.asarray(halves.side_by_side(of_outputs + 1, self.out_shape, width)) - 1
        columns = np.pad(columns, (0, panels * width - len(columns)), constant_values=-1).reshape(2 * panels, -1)
        found = []
        for column in columns:
            parts = set(column[column >= 0].tolist()) or {found[-1]}
            found.append(parts.pop() if len(parts) == 1 else -1)
        return np.concatenate([np.asarray(found, np.int32), np.maximum(columns, 0).reshape(-1).astype(np.int32)])
