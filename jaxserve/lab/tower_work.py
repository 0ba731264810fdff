"""The least that a vision tower does for one picture, and the seconds that this takes by published peaks.

For plans and simulations. As `roofline`, it needs no JAX but to look at a tower that was planned.
"""

import dataclasses
from typing import TYPE_CHECKING

from jaxserve.lab.roofline import Assumptions, roofline_seconds
from jaxserve.values.chips import Topology

if TYPE_CHECKING:
    from jaxserve.models.tower_loading import PlannedTower

_ACTIVATION_WIDTHS = (8, 4)  # of a block's width and of its feed-forward size, read and written for each patch
_WINDOWS = 3  # of keys that a block of queries reads: its own window may lie across two others


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TowerWork:
    """A tower in numbers. Every device of a replica has all of it and computes all of it.

    Attributes:
      block_params: weights that each patch is multiplied with, in all blocks; and of the product that makes a patch a
        vector.
      merge_params: weights that each token is multiplied with, behind the blocks.
      width, mlp_size: of a block.
      seen: patches that a patch attends to, by block; None: all.
      merge: patches of a token.
      num_bytes: of all weights.
      item_bytes: of a number of activations.
    """

    block_params: int
    merge_params: int
    width: int
    mlp_size: int
    seen: tuple[int | None, ...]
    merge: int
    num_bytes: int
    item_bytes: int

    @classmethod
    def of(cls, planned: "PlannedTower") -> "TowerWork":
        """Of a tower whose weights are in their files."""
        import jax
        from flax import nnx

        from jaxserve.models.sharding import WeightParameter

        config, sizes = planned.config, {True: 0, False: 0}
        for path, variable in nnx.to_flat_state(planned.state):
            if isinstance(variable, WeightParameter):
                sizes[path[0] == "blocks"] += sum(leaf.size for leaf in jax.tree.leaves(variable))
        windows = None if config.window is None else _WINDOWS * config.window_patches
        return cls(
            block_params=sizes[True] + config.width * config.num_values,
            merge_params=sizes[False],
            width=config.width,
            mlp_size=config.mlp.size,
            seen=tuple(None if layer in config.full_layers else windows for layer in range(config.num_layers)),
            merge=config.merge**2,
            num_bytes=planned.num_bytes,
            item_bytes=planned.dtype.itemsize,
        )

    def flops(self, patches: int) -> float:
        """Operations for a picture of a bucket of so many patches."""
        products = 2 * (patches * self.block_params + patches // self.merge * self.merge_params)
        return products + sum(4 * patches * self.width * min(patches, seen or patches) for seen in self.seen)

    def moved_bytes(self, patches: int) -> float:
        """Bytes through the memory of the device: all weights, and activations."""
        of_patch = _ACTIVATION_WIDTHS[0] * self.width + _ACTIVATION_WIDTHS[1] * self.mlp_size
        return self.num_bytes + self.item_bytes * len(self.seen) * patches * of_patch

    def seconds(self, patches: int, topology: Topology, assumed: Assumptions, dtype: str) -> float:
        """For a picture of a bucket."""
        return roofline_seconds(
            topology,
            assumed,
            dtype,
            flops=self.flops(patches),
            moved_bytes=self.moved_bytes(patches),
            collectives=0,
            sent_bytes=0.0,
            group=1,
        ).total
