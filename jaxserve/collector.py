"""A pause of Python's cycle collector, for work that makes very many objects and no cycles.

Owns the pause. Refuses to decide when a loop collects: `engine.interpreter` does.
"""

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def collector_paused() -> Generator[None, None, None]:
    """No cycle collection inside. By itself the collector would look through all of a million new objects again and
    again, in vain: seconds of a large JSON text, an eighth of the time of a large simulation."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
