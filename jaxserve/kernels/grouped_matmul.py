"""Contract of the grouped product of mixture-of-experts layers: each row of a batch times the matrix of its own expert.

    out[r] = W[e] x[r]      for the rows r of expert e: group_sizes[e] of them, one expert's after the other's

A step has a fixed number of rows and a router that decides what each is: so the sizes of the groups are data, and no
number of tokens to an expert compiles anything or is too large. Rows are sorted by expert before they come here.

A batch of few tokens is bound by the bytes of weights. Hence the one demand beside the equation: experts that no row
goes to are not read, and no product is computed of rows and experts that do not belong together.

How the matrices lie is the affair of the weight, as with `matmul.Weight`: a TPU reads [E, in, out] and copies all of a
weight in each step that lies otherwise, a CPU reads panels.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

from jaxtyping import Array, Float, Int

from jaxserve.kernels.matmul import Axes
from jaxserve.kernels.storage import FLOAT, Arithmetic, Storage


class ExpertWeight(Protocol):
    """E matrices [E, *out, in], one for each expert; a pytree of arrays.

    Inside a step the arrays are those of one device, so what is static in a weight must not name a size that is cut.
    """

    def multiply(self, x: Float[Array, "M D"], group_sizes: Int[Array, " E"]) -> Float[Array, "M ..."]:
        """Rows x [M, in], sorted by expert, as [M, *out], summed and returned in float32.

        The first group_sizes[0] rows are expert 0's, and so on. Rows past the sum of the sizes, of which there is one
        of at most M, belong to no expert: whatever they hold, NaN included, they give zeros.
        """
        ...

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """Logical axes of each leaf, in the order of `jax.tree.leaves`, where `axes` are those of [E, *out, in]."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMatmulUse:
    """The facts about a model's grouped products that are known before anything is compiled.

    Attributes:
      dtype: of weights and activations as they are loaded.
      num_experts: that one device holds.
      hidden_size, size: of an expert's matrices on one device: [size, hidden_size] twice, [hidden_size, size] once.
      num_devices: that share each expert's matrix; devices that have different experts do not count.
      storage: of matrices that are codes; None: numbers of `dtype`.
      arithmetic: of products with codes.
    """

    dtype: str
    num_experts: int
    hidden_size: int
    size: int
    num_devices: int
    storage: Storage | None = None
    arithmetic: Arithmetic = FLOAT

    def __str__(self) -> str:
        stored = self.dtype if self.storage is None else str(self.storage)
        rounded = f", times {self.arithmetic.activations} activations" if self.arithmetic != FLOAT else ""
        return (
            f"{self.num_experts} experts of {self.hidden_size} x {self.size} in {stored}{rounded}, each on "
            f"{self.num_devices} devices"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedMatmul:
    """One implementation: the form in which it wants the matrices. The product itself is the weight's `multiply`.

    `convert(weight)` is given a `xla_grouped_matmul.DenseExperts` or a `coded_experts.CodedExperts` of arrays that lie
    on their devices, and returns an `ExpertWeight` of the same numbers. `shapes`, `refuses`, `prepare`, `rounding` and
    `row_invariant` are those of `matmul.Matmul`.
    """

    name: str
    convert: Callable[..., ExpertWeight]
    shapes: Callable[..., ExpertWeight]
    refuses: Callable[[GroupedMatmulUse], str | None]
    prepare: Callable[[GroupedMatmulUse], object] = lambda use: None
    rounding: float = 1e-5
    row_invariant: bool = False
