"""The policies that look at loads alone: round robin, least load and the power of two choices."""

import random
from collections.abc import Sequence

from jaxserve.routing.base import Load, Router, RouterOptions, least_loaded
from jaxserve.routing.prompts import PromptKey


class RoundRobin(Router):
    """The replicas in turn, whatever their load."""

    def __init__(self, options: RouterOptions) -> None:
        super().__init__(options)
        self._next = 0

    def choose(self, key: PromptKey, loads: Sequence[Load]) -> int:
        chosen = self._next % len(loads)
        self._next = chosen + 1
        return chosen


class LeastLoad(Router):
    """The replica with the fewest requests; equals take turns."""

    def __init__(self, options: RouterOptions) -> None:
        super().__init__(options)
        self._next = 0

    def choose(self, key: PromptKey, loads: Sequence[Load]) -> int:
        chosen = least_loaded(loads, self._next)
        self._next = chosen + 1
        return chosen


class PowerOfTwo(Router):
    """Of two replicas drawn at random, the one with fewer requests.

    Nearly as even as least load, and routers that do not know of each other do not all run to the same replica
    (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).
    """

    def __init__(self, options: RouterOptions) -> None:
        super().__init__(options)
        self._random = random.Random(options.seed)

    def choose(self, key: PromptKey, loads: Sequence[Load]) -> int:
        if len(loads) == 1:
            return 0
        first, second = self._random.sample(range(len(loads)), 2)
        return first if loads[first].load <= loads[second].load else second
