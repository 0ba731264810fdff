"""Contract of the product with a weight: what a weight can do, and what an implementation of the op must give.

A layer multiplies with a weight or looks rows up in it, and asks nothing else. How its numbers lie in memory, in which
type, and in how many arrays, is the weight's own affair: whole (`xla_matmul.DenseWeight`), as codes beside their scales
(`coded_weight.CodedWeight`), or in the order in which a CPU reads it (`packed_weight.PackedWeight`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
from jaxtyping import Array, Float, Int

from jaxserve.kernels.activations import ACTIVATIONS
from jaxserve.kernels.low_rank import LowRank, TokenAdapters, low_rank_product
from jaxserve.kernels.storage import FLOAT, Arithmetic, Storage

Axes = tuple[str | None, ...]  # logical names of an array's axes; None: one that has none, and is never cut


class Weight(Protocol):
    """A matrix [*out, *in] that is multiplied with, or a table [out, in] of rows; a pytree of arrays.

    Forms of weights derive from it, for what it does by way of `multiply`.

    Inside a step the arrays are those of one device, so what is static in a weight must not name a size that is cut.
    """

    def multiply(self, x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        """x [T, *in] times the weight as [T, *out], summed and returned in float32."""
        ...

    def multiply_gated(self, x: Float[Array, "T ..."], activation: str) -> Float[Array, "T F"]:
        """Of a weight [2, F, *in], gate before up: activation(gate x) * (up x), in the dtype of x.

        `activation` is a name of `ACTIVATIONS`. A form that cannot do it where its products end does it here, from
        products in the dtype of x.
        """
        both = self.multiply(x).astype(x.dtype)
        return ACTIVATIONS[activation](both[:, 0]) * both[:, 1]

    def slots_for(self, one: LowRank, num_slots: int) -> Any:
        """The `SlotArrays` that the next two methods take, of shapes; `one`: the shapes of an adapter."""
        shapes = (jax.ShapeDtypeStruct((num_slots, *leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(one))
        return jax.tree.unflatten(jax.tree.structure(one), shapes)

    def multiply_adapted(self, x: Float[Array, "T ..."], adapters: TokenAdapters) -> Float[Array, "T ..."]:
        """`multiply`, and the product with the adapter of each token."""
        assert isinstance(adapters.arrays, LowRank), adapters.arrays
        with jax.named_scope("adapters"):
            added = low_rank_product(x, adapters.arrays, adapters.slots)
        return self.multiply(x) + added

    def multiply_gated_adapted(
        self, x: Float[Array, "T ..."], activation: str, adapters: TokenAdapters
    ) -> Float[Array, "T F"]:
        """`multiply_gated` of gate x and up x with what adapters add to them.

        All tokens go the same way, so that one without an adapter has the same bits beside tokens with one.
        """
        both = self.multiply_adapted(x, adapters).astype(x.dtype)
        return ACTIVATIONS[activation](both[:, 0]) * both[:, 1]

    def take(self, rows: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Rows of a table, in the dtype of activations; zeros for a row past the last."""
        ...

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """Logical axes of each leaf, in the order of `jax.tree.leaves`, where `axes` are those of [*out, *in].

        Devices share a leaf along the axes that the sharding rules name, each leaf by itself.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MatmulUse:
    """The facts about a model's products that are known before anything is compiled.

    Attributes:
      dtype: of activations, and of weights that are no codes.
      num_devices: that share each weight.
      storage: of weights that are codes; None: numbers of `dtype`.
      arithmetic: of products with codes.
      adapters: whether tokens may have adapters.
    """

    dtype: str
    num_devices: int
    storage: Storage | None = None
    arithmetic: Arithmetic = FLOAT
    adapters: bool = False

    def __str__(self) -> str:
        stored = self.dtype if self.storage is None else str(self.storage)
        rounded = f", times {self.arithmetic.activations} activations" if self.arithmetic != FLOAT else ""
        adapted = " with adapters" if self.adapters else ""
        return f"{stored} weights{rounded}{adapted} over {self.num_devices} devices"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matmul:
    """One implementation: the form in which it wants weights. The product itself is the weight's `multiply`.

    `convert(weight)` is given a `DenseWeight` or a `CodedWeight` of arrays that lie on their devices, and returns a
    `Weight` of the same numbers, or nearly so. `shapes(weight)` is what `convert` will return, with
    `jax.ShapeDtypeStruct` leaves, for a weight of such: executables are compiled for it while weights are still read.
    `refuses(use)` says why the implementation cannot run a use, with the limit and the remedy, or None. `prepare(use)`
    makes ready what executables of that use call by name; it comes before any of them runs, those read from a disk
    included. `takes_whole(weight)` says of a weight with offsets whether `convert` and `shapes` take it as one; else
    they are given its parts. `rounding` is the largest relative error of a product that the form of the weights
    explains, rounded activations left out. `row_invariant`: the product of a row has the same bits alone and beside any
    number of others (tested, not hoped).
    """

    name: str
    convert: Callable[..., Weight]
    shapes: Callable[..., Weight]
    refuses: Callable[[MatmulUse], str | None]
    prepare: Callable[[MatmulUse], object] = lambda use: None
    takes_whole: Callable[[Any], bool] = lambda weight: False
    rounding: float = 1e-5
    row_invariant: bool = False
