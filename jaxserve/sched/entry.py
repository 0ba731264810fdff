"""A block of tokens that can be found: what the prefix cache and the host tier know of it."""

from jaxserve.sched.plan import DUMMY_PAGE

NO_SLOT = -1


class PageEntry:
    """One full block that can be found, with a page in each group that still has it. Mutated only by `PrefixCache`.

    Attributes:
      page_ids: the page of each group; 0 where the group's page was evicted or never recorded.
      slots: the host slot of each group, or NO_SLOT. Written by `HostTier`.
      num_children: entries whose parent it is. An entry without pages or slots stays as long as it has children, since
        the way to them leads through it: a group with a window finds the end of a sequence whose beginning is gone.
      alive: whether the cache still knows it.
      wide_key: for stores, see `loading`; empty until it is asked for.
    """

    __slots__ = (
        "__weakref__",
        "alive",
        "content",
        "key",
        "num_children",
        "page_ids",
        "parent",
        "slots",
        "wide_key",
    )

    def __init__(self, key: bytes, parent: "PageEntry | None", content: bytes, num_groups: int) -> None:
        self.key = key
        self.parent = parent
        self.content = content
        self.page_ids = [DUMMY_PAGE] * num_groups
        self.slots = [NO_SLOT] * num_groups
        self.num_children = 0
        self.alive = True
        self.wide_key = b""

    @property
    def is_empty(self) -> bool:
        """Nothing of the block is left."""
        return not any(self.page_ids) and all(slot == NO_SLOT for slot in self.slots)
