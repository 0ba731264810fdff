"""The implementation for TPUs on a CPU: JAX's interpreter, which simulates copies, semaphores and memories."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # has no public name yet
from jax.experimental.pallas import tpu as pltpu

from jaxserve.kernels.cases import Case, Inputs, Room, make_inputs
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.paged_attention import AttentionBatch, KVScales, PagedAttention, stored
from jaxserve.kernels.pallas.tpu_implementation import make_attention
from jaxserve.kernels.pallas.tpu_layout import PageShape
from jaxserve.kernels.tuning import TunedTable

V5E = Device(backend="tpu", kind="TPU v5 lite")
NO_TABLE = TunedTable(device_kind=V5E.kind, entries={})
# Copies happen as late as they may, memory starts as NaN, and two threads that meet without a semaphore are reported.
INTERPRETER = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", dma_execution_mode="on_wait")
IMPLEMENTATION = make_attention(V5E, NO_TABLE, INTERPRETER)


@dataclasses.dataclass(slots=True)
class Watch:
    """What the interpreter saw. Appended to by every kernel that starts."""

    states: list[Any] = dataclasses.field(default_factory=list)

    def found_races(self) -> bool:
        """Whether any kernel raced since the last call; there must have been one."""
        assert self.states, "no kernel ran in the interpreter"
        found = any(state.races_found for state in self.states)
        self.states.clear()
        return found


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Keeps the findings of all kernels: the interpreter itself forgets those of all but the last."""
    watch, make_state = Watch(), interpret_pallas_call.RaceDetectionState

    def state_of_kernel(num_cores: int) -> Any:
        watch.states.append(make_state(num_cores=num_cores))
        return watch.states[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpret_pallas_call, "RaceDetectionState", state_of_kernel)
        yield watch


def plain_write(
    k: jax.Array, v: jax.Array, cache: jax.Array, batch: AttentionBatch, scales: KVScales | None = None
) -> jax.Array:
    """The write as an XLA scatter, from the documented layout: a hundred times as quick as the interpreted kernel."""
    shape = PageShape.make(batch.page_size, k.shape[-1], cache.dtype)
    key_scale, value_scale = (None, None) if scales is None else (scales.keys, scales.values)
    lines = shape.join(stored(k, key_scale, cache.dtype), stored(v, value_scale, cache.dtype))
    page_ids = batch.block_tables.at[batch.token_rows, batch.positions // batch.page_size].get(mode="clip")
    nowhere = cache.shape[0]  # for padding, which is not written
    page_ids = jnp.where(batch.token_rows < batch.context_lens.shape[0], page_ids, nowhere)
    return cache.at[page_ids, :, :, batch.positions % batch.page_size].set(lines, mode="drop")


def inputs_of(
    case: Case, implementation: PagedAttention = IMPLEMENTATION, *, seed: int = 0, room: Room | None = None
) -> Inputs:
    """Inputs among poison, whose cache holds the earlier tokens. The kernels under test write those of the step."""
    return make_inputs(case, dataclasses.replace(implementation, write=plain_write), seed=seed, poison=True, room=room)


def run(attend, case: Case, inputs: Inputs):
    """(out, cache) of a jitted `attend`."""
    return attend(
        inputs.q, inputs.k, inputs.v, inputs.cache, inputs.batch, case.spec, inputs.sinks, inputs.alibi_slopes,
        inputs.scales,
    )  # fmt: skip


def implementation_with(entries: dict[str, dict[str, int]]) -> PagedAttention:
    return make_attention(V5E, TunedTable(device_kind=V5E.kind, entries=entries), INTERPRETER)
