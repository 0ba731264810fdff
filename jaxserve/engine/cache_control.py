"""`CacheControl`: what an operator does to the caches of a running engine: flush, resize, switch tiers. For every door.

The loop of each replica carries an order out between two steps, so nothing that runs is disturbed but by the order
itself, and nothing is compiled. Methods wait for that, and a flush for the store as well: they are for threads that may
wait.
"""

import concurrent.futures
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jaxserve.engine.base import AnyEngine
from jaxserve.engine.engine import Engine
from jaxserve.errors import DeadlineExceeded, EngineStopped, InvalidRequest
from jaxserve.sched.base import CacheState, Flushed, Operable, Scheduler

MAX_SALTS = 1024  # of one flush
_TURN_S = 60.0  # a loop comes round after each step

T = TypeVar("T")


class CacheControl:
    """Used by any thread but those of the loops.

    `drive`: of an engine without a thread of its own, what steps it until such orders are carried out.
    """

    def __init__(
        self, engine: AnyEngine, drive: "Callable[[Sequence[concurrent.futures.Future[Any]]], None] | None" = None
    ) -> None:
        self._engine = engine
        self._drive = drive

    def states(self) -> list[CacheState]:
        """Of the replicas that live. Raises as `flush`."""
        return self._each(lambda scheduler: scheduler.cache_state)

    def flush(self, salts: Sequence[str] | None, *, store: bool = True) -> Flushed:
        """Forgets the pages of requests with these cache salts, or of all, in every tier of every replica.

        Afterwards no page is found that was computed before the call, unless `store` is False: then a store keeps its
        pages, and they may be found there. Sequences that run go on with the pages that they hold. Returns the pages
        and slots that were forgotten; what a store had is not counted.

        Raises InvalidRequest for too many salts or a scheduler of another kind, EngineStopped, DeadlineExceeded, and
        what the store raises when a page of it may remain.
        """
        if salts is not None and not 0 < len(salts) <= MAX_SALTS:
            raise InvalidRequest(
                f"a flush of {len(salts)} cache salts is asked for, and takes 1 to {MAX_SALTS}; send several calls, or "
                "flush all"
            )
        wanted: Sequence[str | None] = [None] if salts is None else salts

        def forget(scheduler: Operable) -> Flushed:
            return _sum([scheduler.flush(salt) for salt in wanted])

        first = _sum(self._each(forget))
        if not store:
            return first
        for one in self._each(lambda scheduler: scheduler.store):
            if one is not None:
                for salt in wanted:
                    one.flush(salt)
        # Until now a replica may have filled slots from the store, with pages from before.
        return _sum([first, *self._each(forget)])

    def resize(self, num_pages: int, *, preempt: bool = False) -> list[CacheState]:
        """Every replica gives out so many pages, see `Operable.resize_pool`: all do, or none.

        Raises InvalidRequest for a size that a replica cannot have, and as `flush`.
        """
        done: list[tuple[Engine, int]] = []
        try:
            for replica in self._living():
                before = self._on(replica, lambda scheduler: scheduler.cache_state.grantable)
                self._on(replica, lambda scheduler: scheduler.resize_pool(num_pages, preempt=preempt))
                done.append((replica, before))
        except BaseException:
            for replica, before in done:
                with contextlib.suppress(InvalidRequest, EngineStopped):  # a larger request may have come meanwhile
                    self._on(replica, lambda scheduler, before=before: scheduler.resize_pool(before, preempt=False))
            raise
        return self.states()

    def use_tiers(self, *, host: bool | None = None, store: bool | None = None) -> list[CacheState]:
        """Switches tiers of every replica, see `Operable.use_tiers`. Raises InvalidRequest, and as `flush`."""
        self._each(lambda scheduler: scheduler.use_tiers(host=host, store=store))
        return self.states()

    def _living(self) -> list[Engine]:
        living = [replica for replica in self._engine.replicas if replica.failure is None]
        if not living:
            raise EngineStopped("no engine lives whose cache could be changed")
        return living

    def _each(self, order: Callable[[Operable], T]) -> list[T]:
        return [self._on(replica, order) for replica in self._living()]

    def _on(self, replica: Engine, order: Callable[[Operable], T]) -> T:
        def carry_out(scheduler: Scheduler) -> T:
            if not isinstance(scheduler, Operable):
                raise InvalidRequest(
                    f"the scheduler is a {type(scheduler).__name__}, which has no operations on its cache (see "
                    "`jaxserve.sched.base.Operable`)"
                )
            return order(scheduler)

        done = replica.call(carry_out)
        if self._drive is not None:
            self._drive([done])
        concurrent.futures.wait([done], _TURN_S)
        if done.cancel():
            raise DeadlineExceeded(
                f"the loop of the engine did not come round within {_TURN_S:.0f} s, and will not do what was asked of "
                "it; send it again"
            )
        return done.result()


def _sum(parts: Sequence[Flushed]) -> Flushed:
    return Flushed(sum(part.pages for part in parts), sum(part.slots for part in parts))
