"""What a child that was forked is told. JAX computes with threads, and a fork copies none of them: a child would wait
for ever for what its parent's threads were to do.
"""

import functools
import os
import sys

from jaxserve.errors import ForkedProcess

_REMEDY = (
    "a fork copies none of the threads that compute, so a call would wait for ever; begin workers by "
    "multiprocessing.get_context('spawn') and make the LLM there"
)


class Maker:
    """The process that made an engine."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        """False in a child that was forked since."""
        return os.getpid() == self._process

    def check(self) -> None:
        """Raises ForkedProcess in a child."""
        if not self.is_here:
            raise ForkedProcess(
                f"this LLM was made in process {self._process}, and process {os.getpid()} was forked from it: {_REMEDY}"
            )


class Forks:
    """Whether this process is a fork of one that had started JAX. One for all engines of the process.

    JAX does not say where it was started, so each fork is looked at when it happens.
    """

    def __init__(self) -> None:
        self._jax_is_started = False
        self._parent: int | None = None

    def check(self) -> None:
        """Raises ForkedProcess where no engine can be made."""
        if self._parent is not None:
            raise ForkedProcess(
                f"process {os.getpid()} was forked from process {self._parent}, which had started JAX: {_REMEDY}, or "
                "fork before JAX is used"
            )

    def before(self) -> None:
        """In the parent."""
        bridge = sys.modules.get("jax._src.xla_bridge")
        if not self._jax_is_started and bridge is not None:
            self._jax_is_started = bridge.backends_are_initialized()

    def in_child(self) -> None:
        """In the child, before anything else."""
        if self._jax_is_started and self._parent is None:
            self._parent = os.getppid()


@functools.cache
def watch_forks() -> Forks:
    """Those of this process, from the first call on."""
    forks = Forks()
    if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
        os.register_at_fork(before=forks.before, after_in_child=forks.in_child)
    return forks
