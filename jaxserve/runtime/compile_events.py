"""Counts what JAX compiles after start: the promise that nothing does, as a number.

Owns the listener. Refuses to prevent anything: a step without a bucket already fails (`MissingBucket`); this finds
what slipped in beside the steps. Step shapes that are compiled in the background are not counted: no step waits for
them. The whole process is watched, so in a notebook a cell's own JAX code counts too.
"""

import threading

import jax

from jaxserve.runtime.later import THREAD_NAME

_COMPILED = "/jax/core/compile/backend_compile_duration"  # also when the executable comes out of a cache on disk


class CompileCounter:
    """Counts from its creation on; JAX calls it, on whatever thread compiles."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self)

    def __call__(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILED and threading.current_thread().name != THREAD_NAME:
            self.count += 1
