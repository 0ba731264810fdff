"""The slots of LoRA adapters on the devices: their arrays, what a step reads of them, and the write of one slot.

The arrays are a part of the state on the device, and only where the engine takes adapters: without, a step has no line
of this.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxserve.kernels.low_rank import SlotArrays, TokenSlots
from jaxserve.models.adapters.slots import ProjectionForm, Slot, Slots, by_layer, slot_shapes, slot_specs
from jaxserve.models.decoder import Adapters
from jaxserve.runtime.row_state import NUM_ROW_FIELDS, Field


class AdapterSizes(NamedTuple):
    """`num_slots` for adapters, the slot of zeros not counted; `max_rank` of their matrices; `forms` of what they
    change."""

    num_slots: int
    max_rank: int
    forms: tuple[ProjectionForm, ...]

    @property
    def specs(self) -> Slot:
        """The cut over devices of one adapter's weights."""
        return slot_specs(self.forms)

    def shapes(self, dtype: np.dtype) -> Slot:
        """Of one adapter's weights, over all devices."""
        return slot_shapes(self.forms, self.max_rank, dtype)


def num_params(adapters: AdapterSizes | None) -> int:
    """Columns of the row parameters: with adapters one more, `Field.ADAPTER`."""
    return NUM_ROW_FIELDS + (adapters is not None)


def init_slots(adapters: AdapterSizes, weights: nnx.State, dtype: np.dtype) -> Slots:
    """Zeros for all slots, over all devices. `weights`: of the model, which say in which form."""
    arrays = by_layer(adapters.forms, _slot_shapes(adapters, weights, dtype))
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), arrays)


def slots_specs(adapters: AdapterSizes, weights: nnx.State, dtype: np.dtype) -> Slots:
    """The cut of `init_slots`."""
    found = _slot_shapes(adapters, weights, dtype)
    cuts = [arrays.cut(form.specs()) for form, arrays in zip(adapters.forms, found, strict=True)]
    return by_layer(adapters.forms, cuts)


def _slot_shapes(adapters: AdapterSizes, weights: nnx.State, dtype: np.dtype) -> list[SlotArrays]:
    by_path = dict(nnx.to_flat_state(weights))
    return [
        by_path[form.path].get_raw_value().slots_for(form.shapes(adapters.max_rank, dtype), adapters.num_slots + 1)
        for form in adapters.forms
    ]


def step_adapters(slots: Slots | None, params: Int[Array, "R F"], token_rows: Int[Array, " T"]) -> dict[str, Adapters]:
    """What `Decoder.with_taps` takes of adapters: nothing where the engine has none.

    `params` are those of the rows of the step, `token_rows` [T] the row of each token; R and more for padding.
    """
    if slots is None:
        return {}
    num_slots = jax.tree.leaves(slots)[0].shape[0]
    of_row = jnp.append(params[:, Field.ADAPTER], 0)
    of_token = of_row[jnp.minimum(token_rows, params.shape[0])]
    return {"adapters": Adapters(layers=slots, slots=TokenSlots.of(of_token, num_slots))}


def write_adapter(slots: Slots, slot: Int[Array, ""], weights: Slot) -> Slots:
    """Puts the weights of an adapter into a slot. DONATES slots."""
    return tuple(
        {name: arrays.written(slot, one[name]) for name, arrays in layer.items()}
        for layer, one in zip(slots, weights, strict=True)
    )


class AdapterWriter:
    """Launches `write_adapter` for adapters in the memory of the host. Immutable."""

    def __init__(self, write: Callable[..., Any], shardings: Any) -> None:
        """`write`: compiled. `shardings`: of an adapter's weights, a tree like them."""
        self._write = write
        self._shardings = shardings

    def write(self, slots: Slots, slot: jax.Array, weights: object) -> Slots:
        """The slots of the state with the adapter in one of them. DONATES slots."""
        return self._write(slots, slot, jax.device_put(weights, self._shardings))


def slot_shardings(adapters: AdapterSizes, mesh: Any) -> Any:
    """Where the weights of one adapter lie."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), adapters.specs, is_leaf=_is_spec)


def _is_spec(leaf: object) -> bool:
    return isinstance(leaf, PartitionSpec)
