"""Admission to a tier: whether a page is written at all.

Three of four pages of a chat service are never asked for again, so a small tier that takes in all of them writes much
and drops pages shortly before they come back. A page that is offered for the second time has shown that it does.
"""

import abc
import collections
import statistics

_GAPS = 512  # of the last reuses, of which the median is taken
_EVERY = 64  # offers between two medians


class Admission(abc.ABC):
    """Mutated by the policy that owns it. `strict`: whether a page is refused at first sight just now."""

    strict = False

    @abc.abstractmethod
    def admit(self, key: bytes) -> bool:
        """Whether the page of `key`, which the tier lacks, is to be taken in."""

    @abc.abstractmethod
    def seen(self, key: bytes) -> None:
        """The page of `key` was used in the tier."""

    @abc.abstractmethod
    def full(self, num_keys: int) -> None:
        """The tier has no room; it holds `num_keys` pages."""


class AdmitAll(Admission):
    """Takes in every page."""

    def admit(self, key: bytes) -> bool:
        return True

    def seen(self, key: bytes) -> None:
        pass

    def full(self, num_keys: int) -> None:
        pass


class SecondSight(Admission):
    """Takes a page in when it is offered again, while a page would not survive until then; else at once.

    With every page taken in, a tier of C pages has turned over after C offers. So a page is taken in at once as long as
    the median number of offers between two sightings of a page is no more than C; while the tier has never been full,
    nothing turns over. That is the comparison of a tier's lifetime (capacity / insert rate) with the time until
    reuse, both times the rate of offers: no clock is read, so none can jump.

    A reuse after more offers than there are ghost keys is not seen as one, and counts for neither side.
    """

    def __init__(self, *, ghost_keys: int) -> None:
        self._ghost_keys = ghost_keys
        self._capacity: int | None = None
        self._num_offers = 0
        self._last_seen: collections.OrderedDict[bytes, int] = collections.OrderedDict()  # key -> offers until then
        self._gaps: collections.deque[int] = collections.deque(maxlen=_GAPS)

    def admit(self, key: bytes) -> bool:
        self._num_offers += 1
        known = self._note(key)
        if self._num_offers % _EVERY == 0:
            self._judge()
        return known or not self.strict

    def seen(self, key: bytes) -> None:
        self._note(key)

    def full(self, num_keys: int) -> None:
        if self._capacity is None:
            self._capacity = num_keys
            self._judge()
        self._capacity = num_keys

    def _judge(self) -> None:
        self.strict = (
            self._capacity is not None and len(self._gaps) > 0 and statistics.median(self._gaps) > self._capacity
        )

    def _note(self, key: bytes) -> bool:
        """Whether the key was seen of late."""
        last = self._last_seen.pop(key, None)
        self._last_seen[key] = self._num_offers
        if last is not None:
            self._gaps.append(self._num_offers - last)
        elif len(self._last_seen) > self._ghost_keys:
            self._last_seen.popitem(last=False)
        return last is not None
