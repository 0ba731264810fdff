"""Affinity to cached prompt beginnings, within a cap on load.

This is the trade-off between a cache hit and a queue. The policy does not ask what a replica has cached: it remembers
which prompts it sent where, which needs no message and is right as long as the cache is as large as the table.
"""

from collections.abc import Sequence

from jaxserve.routing.base import Load, Replica, Router, RouterOptions, least_loaded
from jaxserve.routing.prompts import PrefixTable, PromptKey


class Prefix(Router):
    """Among replicas whose load is at most the least load plus `slack`: the one that saw most of this beginning.

    Equals, and prompts that no replica has seen, go to the least loaded of them. So a system prompt that all requests
    share
    spreads by itself: its replica fills up to the cap, the next request goes to another, and then both have seen it.
    """

    uses_prompt = True

    def __init__(self, options: RouterOptions) -> None:
        super().__init__(options)
        self._tables: dict[Replica, PrefixTable] = {}
        self._next = 0

    def choose(self, key: PromptKey, loads: Sequence[Load]) -> int:
        cap = min(load for _, load in loads) + self.options.slack
        matched = [self._match_len(key, replica) if load <= cap else -1 for replica, load in loads]
        best = [i for i, length in enumerate(matched) if length == max(matched)]
        first = next((n for n, i in enumerate(best) if i >= self._next), 0)
        chosen = best[least_loaded([loads[i] for i in best], first)]
        self._next = chosen + 1
        return chosen

    def routed(self, key: PromptKey, replica: Replica) -> None:
        self._tables.setdefault(replica, PrefixTable(self.options.table_blocks)).add(key)

    def forget(self, replica: Replica) -> None:
        self._tables.pop(replica, None)

    def _match_len(self, key: PromptKey, replica: Replica) -> int:
        table = self._tables.get(replica)
        return 0 if table is None else table.match_len(key)
