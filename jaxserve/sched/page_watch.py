"""What an observer of the prefix cache is told: which pages can be found, and where, from the moment that they can be.

The calls come from the scheduler's thread in the middle of planning, so an observer only notes them. `kv.page_events`
sends them to others.
"""

from typing import Literal

from jaxserve.sched.entry import PageEntry

Tier = Literal["device", "host"]


class PageWatcher:
    """The default, which watches nothing.

    Attributes:
      passes_on: whether anybody is told.
      num_noted, num_lost: pages that were told of and are passed on, and those that were lost for want of room.
    """

    passes_on = False
    num_noted = 0
    num_lost = 0

    def stored(self, entry: PageEntry, at: int, tier: Tier) -> None:
        """The page of group `at` can be found on `tier`, or can be in a step or two, when it is written."""

    def removed(self, entry: PageEntry, at: int, tier: Tier) -> None:
        """The page of group `at` cannot be found on `tier` any more."""
