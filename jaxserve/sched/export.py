"""`Export`: the pages that a device still has on their way to a store, before its server ends.

Full pages go to the store as they come, so what is left are pages that found no slot, pages that the policy of the host
tier did not take in, pages whose write the store had no room for, and those of the last step. Nothing is computed
meanwhile: plans save pages and nothing else, as many as may be on their way. Pages of running sequences go first, since
these go on at another server at once; then the others, in the order of their last use, the latest first.
"""

import collections
from collections.abc import Iterable

from jaxserve.sched.entry import NO_SLOT, PageEntry
from jaxserve.sched.host_tier import HostTier
from jaxserve.sched.loading import Loader
from jaxserve.sched.prefix import PrefixCache


class Export:
    """Mutated by the scheduler that made it."""

    def __init__(
        self, prefix: PrefixCache, tier: HostTier, loader: Loader, chains: Iterable[Iterable[PageEntry]]
    ) -> None:
        """`chains`: of the sequences that hold pages."""
        self._tier = tier
        self._loader = loader
        first = [(entry, at) for chain in chains for entry in chain for at in range(len(entry.page_ids))]
        self._left = collections.deque(dict.fromkeys([*first, *prefix.idle_pages()]))

    @property
    def num_left(self) -> int:
        """Pages that have not been saved, or not written. 0 where a tier is switched off: it takes none in."""
        if not (self._tier.enabled and self._loader.is_used):
            return 0
        return len(self._left) + self._tier.num_filling + len(self._loader.unwritten) + len(self._loader.writing)

    @property
    def may_save(self) -> bool:
        """Whether pages are left that no plan has saved."""
        return bool(self._left)

    def save(self) -> None:
        """Has the next plan save as many pages as may be on their way, once the store takes what was saved before."""
        self._loader.write_rest()
        while self._left and self._tier.has_room and not self._loader.unwritten:
            entry, at = self._left[0]
            lacks = entry.alive and entry.page_ids[at] and entry.slots[at] == NO_SLOT
            if lacks and not self._tier.save_now(entry, at):
                return  # all slots are being filled or written
            self._left.popleft()
