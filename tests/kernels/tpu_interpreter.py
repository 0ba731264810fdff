"""The body for TPUs on a CPU: JAX's interpreter, which simulates copies, semaphores and memories."""

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


def run(attend, case: Case, inputs: Inputs):
    """(out, cache) of a jitted `attend`."""
    return attend(
        inputs.q, inputs.k, inputs.v, inputs.cache, inputs.batch, case.spec, inputs.sinks, inputs.alibi_slopes,
        inputs.scales,
    )  # fmt: skip


def found_races() -> bool:
    """Whether the interpreter saw a race in the kernel that ran last."""
    return interpret_pallas_call.races.races_found


def body_with(entries: dict[str, dict[str, int]]) -> PagedAttention:
    return make_body(V5E, TunedTable(device_kind=V5E.kind, entries=entries), INTERPRETER)
