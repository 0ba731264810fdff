"""`Exchanger`: the exchange of pages with other engines, for threads outside the loop."""

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Collection
from typing import TypeVar

from jaxserve.engine.engine import Engine
from jaxserve.errors import DeadlineExceeded, EngineStopped
from jaxserve.sched.base import Exchanges, Scheduler
from jaxserve.sched.page_exchange import Lent, PageExchange, Place, Prompt, Wanted

_TURN_S = 60.0  # a loop comes round after each step
_LOOK_S = 0.5  # between two looks whether the loop lives

T = TypeVar("T")


class Exchanger:
    """`PageExchange` of one engine. Methods wait for a turn of its loop, and are for threads that may wait.

    They raise EngineStopped, and DeadlineExceeded if the loop does not come round; `tell_release` does neither.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def num_found(self, prompt: Prompt) -> int:
        """See `PageExchange.num_found`."""
        return self._on_loop(lambda exchange: exchange.num_found(prompt))

    def lend(self, name: bytes, prompt: Prompt, timeout_s: float) -> Lent:
        """See `PageExchange.lend`; waits until the slots have their pages. After an error nothing is lent."""
        done: concurrent.futures.Future[Lent] = concurrent.futures.Future()
        self._on_loop(lambda exchange: exchange.lend(name, prompt, done.set_result))
        end_s = time.monotonic() + timeout_s
        while (left_s := end_s - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                return done.result(min(left_s, _LOOK_S))
            self._engine.call(lambda scheduler: None)  # raises when the loop has ended, which tells nobody who waits
        self.tell_release(name)
        raise DeadlineExceeded(f"the pages of a prompt were not saved within {timeout_s:g} s")

    def is_whole(self, name: bytes) -> bool:
        """See `PageExchange.is_whole`."""
        return self._on_loop(lambda exchange: exchange.is_whole(name))

    def expect(self, name: bytes, prompt: Prompt, num_tokens: int, tenant: str) -> Wanted:
        """See `PageExchange.expect`."""
        return self._on_loop(lambda exchange: exchange.expect(name, prompt, num_tokens, tenant))

    def arrive(self, name: bytes, places: Collection[Place]) -> None:
        """See `PageExchange.arrive`."""
        self._on_loop(lambda exchange: exchange.arrive(name, places))

    def num_held(self) -> int:
        """See `PageExchange.num_held`."""
        return self._on_loop(lambda exchange: exchange.num_held)

    def tell_release(self, name: bytes) -> None:
        """`PageExchange.release` in the next turn; returns at once. An engine that has ended holds nothing."""
        with contextlib.suppress(EngineStopped):
            self._engine.call(lambda scheduler: _exchange_of(scheduler).release(name))

    def _on_loop(self, work: Callable[[PageExchange], T]) -> T:
        done = self._engine.call(lambda scheduler: work(_exchange_of(scheduler)))
        concurrent.futures.wait([done], _TURN_S)
        if done.cancel():
            raise DeadlineExceeded(f"the loop of the engine did not come round within {_TURN_S:.0f} s")
        return done.result()


def _exchange_of(scheduler: Scheduler) -> PageExchange:
    assert isinstance(scheduler, Exchanges) and scheduler.exchange is not None, "seen at the start"
    return scheduler.exchange
