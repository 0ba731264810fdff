"""The body for TPUs on a CPU: JAX's interpreter, which simulates copies, semaphores and memories."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # has no public name yet
from jax.experimental.pallas import tpu as pltpu

from jaxserve.kernels.cases import Case, Inputs
from jaxserve.kernels.paged_attention import Device, PagedAttention
from jaxserve.kernels.pallas.tpu_body import make_body
from jaxserve.kernels.tuning import TunedTable

V5E = Device(backend="tpu", kind="TPU v5 lite")
NO_TABLE = TunedTable(device_kind=V5E.kind, entries={})
# Copies happen as late as they may, memory starts as NaN, and two threads that meet without a semaphore are reported.
INTERPRETER = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", dma_execution_mode="on_wait")
BODY = make_body(V5E, NO_TABLE, INTERPRETER)


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


def run(attend, case: Case, inputs: Inputs):
    """(out, cache) of a jitted `attend`."""
    return attend(
        inputs.q, inputs.k, inputs.v, inputs.cache, inputs.batch, case.spec, inputs.sinks, inputs.alibi_slopes,
        inputs.scales,
    )  # fmt: skip


def body_with(entries: dict[str, dict[str, int]]) -> PagedAttention:
    return make_body(V5E, TunedTable(device_kind=V5E.kind, entries=entries), INTERPRETER)
