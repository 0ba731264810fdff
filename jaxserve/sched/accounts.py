"""`Accounts`: virtual token counters, of names that share something."""

_NOTHING = 0.0


class Accounts:
    """What each of some names has been charged, by the rules of the Virtual Token Counter. Mutated by a policy alone.

    A name that had nothing waiting is lifted to the smallest counter of those that wait, or to that of the name which
    ran last where none does, so that no name saves up credit by staying away.

    Attributes:
      counters: by name, of those that are live and of some that were.
      num_waiting, num_live: sequences of each name; a name without any is not there.
      last_run: the name that got a row last.
      places: by name, the order in which they began to wait, which decides between equal counters.
    """

    __slots__ = ("_next_place", "counters", "last_run", "num_live", "num_waiting", "places")

    def __init__(self) -> None:
        self.counters: dict[str, float] = {}
        self.num_waiting: dict[str, int] = {}
        self.num_live: dict[str, int] = {}
        self.last_run = ""
        self.places: dict[str, int] = {}
        self._next_place = 0

    @property
    def num_idle(self) -> int:
        """Counters that are remembered of names with nothing live."""
        return len(self.counters) - len(self.num_live)

    def wait(self, name: str, *, is_new: bool) -> None:
        """A sequence of `name` is about to wait: a new one, or one that lost its row."""
        if is_new:
            self.num_live[name] = self.num_live.get(name, 0) + 1
        if name not in self.num_waiting:
            counters = self.counters
            floor = min(map(counters.__getitem__, self.num_waiting), default=counters.get(self.last_run, _NOTHING))
            counters[name] = max(counters.get(name, _NOTHING), floor)
            self.places[name] = self._next_place
            self._next_place += 1
        self.num_waiting[name] = self.num_waiting.get(name, 0) + 1

    def run(self, name: str) -> None:
        """A sequence of `name` that waited has a row."""
        self.last_run = name
        _take_one(self.num_waiting, name)

    def end(self, name: str, *, waited: bool) -> None:
        """A sequence of `name` has ended."""
        if waited:
            _take_one(self.num_waiting, name)
        _take_one(self.num_live, name)

    def forget_idle(self) -> None:
        """Drops names with nothing live, but not the last one that ran: a newcomer is lifted to it."""
        kept = {*self.num_live, self.last_run}
        self.counters = {name: value for name, value in self.counters.items() if name in kept}
        self.places = {name: place for name, place in self.places.items() if name in kept}


def _take_one(counts: dict[str, int], name: str) -> None:
    if counts[name] == 1:
        del counts[name]
    else:
        counts[name] -= 1
