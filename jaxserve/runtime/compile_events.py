"""A counter of JAX's compiles after the start; the promise is that there are none.

A step without a bucket fails anyway (`MissingBucket`); the counter finds compiles beside the steps. Step shapes that
are compiled in the background are not counted: no step waits for them. The whole process is watched, so in a notebook a
cell's own JAX code counts too.
"""

import functools
import threading

import jax

from jaxserve.runtime.later import THREAD_NAME

_COMPILED = "/jax/core/compile/backend_compile_duration"  # also when the executable comes out of a cache on disk


class CompileCounter:
    """Counts from its creation on."""

    def __init__(self) -> None:
        self._all = _listener()
        self._before = self._all.count

    @property
    def count(self) -> int:
        return self._all.count - self._before


class _Listener:
    """Counts the compiles of the process; JAX calls it on the thread that compiles."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self)

    def __call__(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILED and threading.current_thread().name != THREAD_NAME:
            self.count += 1


@functools.cache  # one for all models of the process: JAX keeps every listener
def _listener() -> _Listener:
    return _Listener()
