"""Experts as codes and scales, multiplied by XLA in a loop over tiles of rows: runs everywhere.

A turn reads the codes of one expert and widens no others. Where inputs are in groups, the products of all groups are
one batched product, before their scales come: a loop over groups in a loop over tiles would be turns of microseconds.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.kernels.coded_weight import CodedWeight, RoundedRows, round_weight
from jaxserve.kernels.matmul import Axes
from jaxserve.kernels.storage import FLOAT, Arithmetic, Storage
from jaxserve.kernels.xla_grouped_matmul import by_tiles, pad_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CodedExperts:
    """Matrices [E, *out, in] of experts as codes.

    Attributes:
      codes: [E, *out, in].
      scales: float32 [E, *out, G], of each group of inputs.
      zeros: int16, as scales are; None: codes are symmetric.
      storage, arithmetic, dtype, cut_over: as those of `CodedWeight`.
    """

    codes: Array
    scales: Float[Array, "E ..."]
    zeros: Int[Array, "E ..."] | None
    storage: Storage = dataclasses.field(metadata={"static": True})
    arithmetic: Arithmetic = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})
    cut_over: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def num_in(self) -> int:
        """Axes that a product sums over."""
        return 1

    def multiply(self, x: Float[Array, "M D"], group_sizes: Int[Array, " E"]) -> Float[Array, "M ..."]:
        """`ExpertWeight.multiply`. Rows are rounded, where they are, before the loop."""
        experts, out_shape = self.codes.shape[0], self.codes.shape[1:-1]
        is_rounded = self.arithmetic.activations == "int8"
        rows = self.of(0).rounded(x) if is_rounded else None
        operands = tuple(pad_rows(one, experts) for one in ((x,) if rows is None else (rows.codes, rows.scales)))

        def product(expert: Array, first: Array, size: int) -> Array:
            weight = self.of(expert)
            found = [jax.lax.dynamic_slice_in_dim(operand, first, size) for operand in operands]
            if rows is None and self.storage.group is None:
                return weight.multiply(found[0])
            if rows is None:
                return weight.multiply_batched(found[0]).reshape(size, *out_shape)
            tile = RoundedRows(codes=found[0], scales=found[1], block=rows.block)
            return weight.multiply_rounded(tile).reshape(size, *out_shape)

        return by_tiles(product, group_sizes, x.shape[0], out_shape)

    def of(self, expert: Array | int) -> CodedWeight:
        """The matrix of one expert."""
        codes, scales, zeros = (
            None if leaf is None else jax.lax.dynamic_index_in_dim(leaf, expert, keepdims=False)
            for leaf in (self.codes, self.scales, self.zeros)
        )
        assert codes is not None and scales is not None
        return CodedWeight(
            codes=codes,
            scales=scales,
            zeros=zeros,
            num_in=1,
            storage=self.storage,
            arithmetic=self.arithmetic,
            dtype=self.dtype,
            cut_over=self.cut_over,
        )

    def numbers(self) -> np.ndarray:
        """The matrices [E, *out, in] in float64, on the host."""
        return np.stack([self.of(expert).numbers() for expert in range(self.codes.shape[0])])

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """`ExpertWeight.leaf_axes`."""
        by_scale = axes if self.storage.group is not None else (*axes[:-1], None)
        return (axes, by_scale) if self.zeros is None else (axes, by_scale, by_scale)


def round_experts(array: np.ndarray, storage: Storage, dtype: str, arithmetic: Arithmetic = FLOAT) -> CodedExperts:
    """Float matrices [E, *out, in] in the nearest codes, each group by its largest magnitude."""
    rounded = [round_weight(matrix, 1, storage, dtype, arithmetic) for matrix in array]
    codes, scales = (jnp.stack(leaves) for leaves in zip(*((one.codes, one.scales) for one in rounded), strict=True))
    return CodedExperts(codes=codes, scales=scales, zeros=None, storage=storage, arithmetic=arithmetic, dtype=dtype)
