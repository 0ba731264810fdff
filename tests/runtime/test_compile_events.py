"""The count of compilations: sees each one, and nothing else."""

from pathlib import Path

import jax
import jax.numpy as jnp
from jax._src import monitoring  # the public module cannot list them

from jaxserve.runtime.compile import Compiler
from jaxserve.runtime.compile_events import CompileCounter
from jaxserve.runtime.store import ExecutableStore


def test_counts_compilations_after_its_creation() -> None:
    def double(x: jax.Array) -> jax.Array:
        return x * 2 + 1

    compiled = jax.jit(double)
    x, y = jnp.zeros(3), jnp.zeros(5)
    compiled(x).block_until_ready()
    counter = CompileCounter()
    compiled(x).block_until_ready()
    assert counter.count == 0
    compiled(y).block_until_ready()
    assert counter.count == 1


def test_starts_leave_nothing_behind_in_jax(tmp_path: Path) -> None:
    """JAX keeps its listeners for ever: a process that builds several models has one of each kind."""

    def listeners() -> int:
        return len(monitoring.get_event_listeners()) + len(monitoring.get_event_duration_listeners())

    def start() -> None:
        CompileCounter()
        Compiler(None, ExecutableStore(tmp_path, [], jax.local_devices()[:1]))

    start()
    before = listeners()
    for _ in range(5):
        start()
    assert listeners() == before
