"""`Turns`: the threads that share one engine which has no thread of its own.

Each call drives the engine itself, one step at a time, and whoever has the turn computes the requests of all: so the
prompts of several threads run in one batch, and no thread waits for the end of another one's call.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from jaxserve.engine import AnyEngine
from jaxserve.errors import EngineStopped
from jaxserve.offline.forks import Maker

_PAUSE_S = 0.1  # the longest sleep for work that waits: interrupts are checked between two


class Turns:
    """Lets one thread at a time step the engine. Any thread.

    A generator that nobody holds any more is ended by whatever thread Python chooses, in the middle of any line. Hence
    the locks may be taken again by the thread that has them.
    """

    def __init__(self, engine: AnyEngine) -> None:
        self.engine = engine
        self._maker = Maker()  # looked at before any lock: those of a child may be held by threads that it has not
        # `_stepping` is held for a step, and `_door` by the next thread that wants one: whoever has just had a step
        # finds the door shut, and so does not take them all.
        self._door, self._stepping = threading.RLock(), threading.RLock()
        self._stepper: int | None = None
        self._changed = threading.Condition()
        self._num_calls = 0
        self._is_alone = self._closed = False

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around a call that may step. Waits while another thread is `alone`. Raises EngineStopped after `close`, and
        ForkedProcess."""
        self._maker.check()
        with self._changed:
            self._changed.wait_for(lambda: not self._is_alone)
            self._check_open()
            self._num_calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Around a call that begins when those of other threads have ended, and that new ones wait for. A stream that
        nobody reads at the moment is no call. Raises EngineStopped after `close`, and ForkedProcess."""
        self._maker.check()
        with self._exclusive():
            self._check_open()
            yield

    def close(self, end: Callable[[], None]) -> None:
        """Calls `end` when the calls of other threads have ended; new ones raise EngineStopped. Again, and
        in a child that was forked: does nothing."""
        if not self._maker.is_here:
            return
        with self._exclusive():
            if not self._closed:
                self._closed = True
                end()

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_alone)
            self._is_alone = True
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._num_calls == 0)
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()

    def step(self, done: Callable[[], bool]) -> bool:
        """One step, unless `done` has become true while other threads had theirs. False when there is nothing to do.

        An error of a step ends the engine, whose state is then unknown.
        """
        with self._turn():
            if done():
                return True
            try:
                self.engine.pause(_PAUSE_S)
                return self.engine.step()
            except BaseException as error:
                self.engine.fail(error)
                raise

    def finish(self, done: Callable[[], bool]) -> None:
        """Steps until requests that were aborted have ended, as `done` says, and what was launched for them, too.

        Inside of a step of the same thread, where Python may end a generator, it does nothing: the next one ends them.
        Nor does it in a child that was forked.
        """
        if self._stepper == threading.get_ident() or not self._maker.is_here:
            return
        engine = self.engine
        while engine.failure is None and not done() and self.step(done):
            pass
        # The step that was launched ahead of the last token; with requests of others it is theirs.
        while engine.failure is None and not self._has_requests() and self.step(self._has_requests):
            pass

    def _has_requests(self) -> bool:
        return self.engine.num_live > 0 or self.engine.num_unstarted > 0

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStopped("this LLM was closed, and its memory given back; make another one")

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        with self._door:
            self._stepping.acquire()
        try:
            self._stepper = threading.get_ident()
            yield
        finally:
            self._stepper = None
            self._stepping.release()


class HasTurns(Protocol):
    """What `one_call` is for."""

    _turns: Turns


_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound=HasTurns)


def one_call(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Wraps a method that the engine must not sleep or be closed under."""

    @functools.wraps(method)
    def called(self: _S, *args: _P.args, **options: _P.kwargs) -> _R:
        with self._turns.call():
            return method(self, *args, **options)

    return called
