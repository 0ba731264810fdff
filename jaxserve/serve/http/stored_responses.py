"""The answers of `/v1/responses` that are kept, so that the next request can go on from one by its id.

They are kept in memory, bounded in number, bytes and time, and each belongs to the key of its request: with another
key it does not exist. If there is no room, the owner with the most bytes loses the one that was not used for longest,
so that a caller who stores much cannot push out the answers of the others.
"""

import collections
import dataclasses
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An answer, and the conversation up to and with it, without instructions; both as JSON, whose bytes count."""

    response_id: str
    response: bytes
    messages: bytes

    @property
    def num_bytes(self) -> int:
        """What it counts for."""
        return len(self.response) + len(self.messages)


class StoredResponses:
    """Mutated on one event loop.

    Args:
      most: answers; 0: none is kept.
      most_bytes: of all together, as JSON.
      keep_s: seconds that an answer is kept after its last use.
      clock: seconds that never go back.
    """

    def __init__(self, most: int, most_bytes: int, keep_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._keep_s = keep_s
        self._clock = clock
        self._entries: dict[bytes, collections.OrderedDict[str, tuple[float, Stored]]] = {}  # longest unused first
        self._bytes: collections.Counter[bytes] = collections.Counter()

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    @property
    def num_bytes(self) -> int:
        """Of all answers that are kept."""
        return self._bytes.total()

    @property
    def keeps(self) -> bool:
        """Whether answers are kept at all."""
        return self._most > 0

    def put(self, owner: bytes, stored: Stored) -> None:
        """Keeps an answer, and lets others go for it where needed. One that is larger than all room is not kept."""
        self._drop_old()
        if not self.keeps or stored.num_bytes > self._most_bytes:
            return
        self._entries.setdefault(owner, collections.OrderedDict())[stored.response_id] = (self._clock(), stored)
        self._bytes[owner] += stored.num_bytes
        while len(self) > self._most or self.num_bytes > self._most_bytes:
            richest = max(self._entries, key=lambda each: self._bytes[each])
            self.remove(richest, next(iter(self._entries[richest])))

    def get(self, owner: bytes, response_id: str) -> Stored | None:
        """None: there is none of that name for this owner, or no longer."""
        self._drop_old()
        mine = self._entries.get(owner, {})
        if response_id not in mine:
            return None
        _, stored = mine.pop(response_id)
        mine[response_id] = (self._clock(), stored)
        return stored

    def remove(self, owner: bytes, response_id: str) -> bool:
        """False when there was none."""
        mine = self._entries.get(owner)
        if mine is None or response_id not in mine:
            return False
        _, stored = mine.pop(response_id)
        self._bytes[owner] -= stored.num_bytes
        if not mine:
            del self._entries[owner], self._bytes[owner]
        return True

    def _drop_old(self) -> None:
        before_s = self._clock() - self._keep_s
        for owner in list(self._entries):
            mine = self._entries[owner]
            old = []
            for name, (used_s, _) in mine.items():
                if used_s > before_s:
                    break
                old.append(name)
            for name in old:
                self.remove(owner, name)
