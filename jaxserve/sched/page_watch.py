"""What an observer of the prefix cache is told: which pages can be found, and where, from the moment that they can be.

The calls come from the scheduler's thread in the middle of planning, so an observer only notes them. `kv.page_events`
sends them to others.
"""

from typing import Literal, Protocol

Tier = Literal["device", "host"]


class WatchedEntry(Protocol):
    """A block, as `prefix.PageEntry` has it: its key, its tokens as 64-bit integers and more, and the block before."""

    @property
    def key(self) -> bytes: ...

    @property
    def content(self) -> bytes: ...

    @property
    def parent(self) -> "WatchedEntry | None": ...


class PageWatcher:
    """The default, which watches nothing.

    Attributes:
      num_noted, num_lost: pages that were told of and are passed on, and those that were lost for want of room.
    """

    num_noted = 0
    num_lost = 0

    def stored(self, entry: WatchedEntry, at: int, tier: Tier) -> None:
        """The page of group `at` can be found on `tier`, or can be in a step or two, when it is written."""

    def removed(self, entry: WatchedEntry, at: int, tier: Tier) -> None:
        """The page of group `at` cannot be found on `tier` any more."""
