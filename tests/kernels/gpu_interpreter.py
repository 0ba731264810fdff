"""Attention for GPUs on a CPU: JAX's interpreter of Mosaic GPU kernels, which simulates copies, barriers, memories.

All uses of JAX's private modules in the tests are here, and the inputs that tests share.

The interpreter is patched: jax 0.10 traces and compiles a kernel again for each program and warpgroup (a new function
each time, so that no cache can help), a second apiece. Here each kernel is compiled once, without most of LLVM's work,
which a kernel that runs a few times does not repay; what runs is the same.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic.interpret import thread_map  # none of these has a public name yet
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from jaxserve.kernels.cases import Case, Inputs, make_inputs
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.paged_attention import AttentionBatch, KVScales, stored
from jaxserve.kernels.pallas.gpu_implementation import make_attention
from jaxserve.kernels.pallas.gpu_layout import GpuPages
from jaxserve.kernels.tuning import TunedTable

H200 = Device(backend="gpu", kind="NVIDIA H200", compute_capability=(9, 0))
NO_TABLE = TunedTable(device_kind=H200.kind, entries={})
# Each copy in flight needs a clock of its own: with too few of them a missing wait goes unseen.
INTERPRETER = InterpretGPUParams(detect_races=True, num_tma_threads_per_device=64)
IMPLEMENTATION = make_attention(H200, NO_TABLE, INTERPRETER)
# The detector of JAX 0.11 reports that padding tokens are all stored in one place, in any order.
PADDING_IS_A_RACE = jax.__version_info__ >= (0, 11)


class Watch:
    """The kernels that ran under one `watched()`. Only the interpreter appends."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def found_races(self) -> bool:
        """Whether any of the kernels since the last call had a race."""
        assert self.states, "no kernel ran"
        found = any(state.races_found for state in self.states)
        self.states.clear()
        return found


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Within it, kernels compile once, not once for each program, and the races of all of them are kept."""
    compiled: dict[int, tuple[Any, Any]] = {}  # by the jaxpr's id; the jaxpr is kept, so that no other gets its id
    lock = threading.Lock()
    # jax 0.11 has another name for it.
    name = "RaceDetectionState" if hasattr(gpu_callbacks, "RaceDetectionState") else "GPURaceDetectionState"
    watch, make_state = Watch(), getattr(gpu_callbacks, name)

    def run(jaxpr: Any, consts: Sequence[Any], *args: Any) -> None:
        with lock:
            if id(jaxpr) not in compiled:
                evaluate = jax.jit(lambda consts, *args: jax.core.eval_jaxpr(jaxpr, consts, *args) and None)
                options = {"xla_backend_optimization_level": 0}
                compiled[id(jaxpr)] = (jaxpr, evaluate.trace(consts, *args).lower().compile(options))
        compiled[id(jaxpr)][1](consts, *args)

    def state_of_kernel(*args: Any, **kwargs: Any) -> Any:
        watch.states.append(make_state(*args, **kwargs))
        return watch.states[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thread_map, "_run_jaxpr", run)
        patch.setattr(gpu_callbacks, name, state_of_kernel)
        try:
            yield watch
        finally:
            gpu_callbacks.reset_gpu_interpret_mode_state()


def plain_write(
    k: jax.Array, v: jax.Array, cache: GpuPages, batch: AttentionBatch, scales: KVScales | None = None
) -> GpuPages:
    """The write as an XLA scatter, from the documented layout: quick, and a truth for the kernel that does it."""
    real = batch.token_rows < batch.context_lens.shape[0]
    page_ids = batch.block_tables.at[batch.token_rows, batch.positions // batch.page_size].get(mode="clip")
    page_ids, slots = jnp.where(real, page_ids, 0), jnp.where(real, batch.positions % batch.page_size, 0)

    def put(pages: jax.Array, x: jax.Array, scale: jax.Array | None) -> jax.Array:
        kept = jnp.pad(stored(x, scale, pages.dtype), ((0, 0), (0, 0), (0, pages.shape[-1] - x.shape[-1])))
        return pages.at[page_ids, :, slots].set(kept)

    return GpuPages(
        keys=put(cache.keys, k, None if scales is None else scales.keys),
        values=put(cache.values, v, None if scales is None else scales.values),
    )


def inputs_of(case: Case, seed: int = 0) -> Inputs:
    """Inputs among poison, whose cache holds the earlier tokens. The kernels under test have not touched them."""
    return make_inputs(case, dataclasses.replace(IMPLEMENTATION, write=plain_write), seed=seed, poison=True)


def narrowed(case: Case, kv_heads: int = 1) -> Case:
    """The same case with fewer kv heads, of as many query heads each: programs differ in heads by an index alone."""
    group = case.spec.num_query_heads // case.spec.num_kv_heads
    spec = dataclasses.replace(case.spec, num_kv_heads=kv_heads, num_query_heads=kv_heads * group)
    return dataclasses.replace(case, name=f"{case.name}/{kv_heads} kv heads", spec=spec)
