"""`LoadingScheduler`: a scheduler whose sequences may wait for pages from a store, and leave theirs to it.

See `loading` and `export`.
"""

import math
from collections.abc import Callable

from jaxserve.sched.core import ContinuousScheduler
from jaxserve.sched.draft import Flight
from jaxserve.sched.export import Export
from jaxserve.sched.loading import Loader, SlotStore
from jaxserve.sched.options import SchedulerOptions
from jaxserve.sched.plan import Limits, StepPlan
from jaxserve.sched.policy import Policy

_RETRY_S = 0.05  # for a store that had no room for a write


class LoadingScheduler(ContinuousScheduler):
    """A `ContinuousScheduler` whose sequences may wait for a store. A `sched.base.MayWait`, and an `Exports`."""

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        options: SchedulerOptions,
        clock: Callable[[], float],
        store: SlotStore,
    ) -> None:
        super().__init__(limits, policy, options, clock)
        assert self.memory.tier is not None, "a store fills slots of host memory, and there are none"
        self.memory.tier.saves_early = True
        self._policy_may_wait = False  # it waits for pages of a store, and not for its policy
        self.loader = self._loader = Loader(store, self.memory, self.memory.tier, options.store_wait_s, clock)
        self._export: Export | None = None
        self._exported: Callable[[int], None] | None = None

    def export(self, done: Callable[[int], None]) -> None:
        """See `Exports`."""
        assert self.memory.prefix is not None and self.memory.tier is not None
        chains = [seq.chain for seq in (*self._running, *self._running.ending)]
        self._export = Export(self.memory.prefix, self.memory.tier, self.loader, chains)
        self._exported = done

    def end_export(self) -> None:
        """See `Exports`."""
        if self._export is not None and self._exported is not None:
            self._exported(self._export.num_left)
            self._exported = None

    def schedule(self) -> StepPlan | None:
        """See `Scheduler`."""
        if self._export is None:
            return super().schedule()
        self._held_back = None
        self.loader.poll()
        if self._exported is None:
            return None
        self._export.save()
        if not self._export.num_left:
            self.end_export()
            return None
        return self._plan_saves(self._export)

    def _plan_saves(self, export: Export) -> StepPlan | None:
        """A step that computes nothing. One that saves nothing, either, tells how much is still on its way."""
        tier = self.memory.tier
        assert tier is not None
        if not tier.has_saves and (tier.has_room or not export.may_save or self._flights):
            return None
        plan = StepPlan(step_id=self._step_id, saves=tier.take_saves(), freed_rows=self._running.take_freed_rows())
        self._step_id += 1
        self._flights.append(Flight(plan, [], []))
        return plan

    def has_work(self) -> bool:
        """See `Scheduler`."""
        return self._exported is not None or super().has_work()

    def waits(self) -> bool:
        """See `MayWait`."""
        return self._held_back is not None or self._export is not None

    def waits_until_s(self) -> float:
        """See `MayWait`."""
        if self._held_back is None:  # each write that ends wakes the loop, unless the store took none
            return self._clock() + _RETRY_S if self.loader.unwritten else math.inf
        return self.loader.until_s(self._held_back)
