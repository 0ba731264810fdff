"""`LoadingScheduler`: a scheduler whose sequences may wait for pages from a store, see `loading`."""

from collections.abc import Callable

from jaxserve.sched.core import ContinuousScheduler
from jaxserve.sched.loading import Loader, SlotStore
from jaxserve.sched.options import SchedulerOptions
from jaxserve.sched.plan import Limits
from jaxserve.sched.policy import Policy


class LoadingScheduler(ContinuousScheduler):
    """A `ContinuousScheduler` whose sequences may wait for a store. A `sched.base.MayWait`."""

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

    def waits(self) -> bool:
        """See `MayWait`."""
        return self._held_back is not None

    def waits_until_s(self) -> float:
        """See `MayWait`."""
        assert self._held_back is not None
        return self.loader.until_s(self._held_back)
