"""A routing policy together with the counts that it needs: how many requests each replica has.

Its owner calls it under a lock, and passes in the replicas that are alive.
"""

import collections
from collections.abc import Iterable

from jaxserve.routing.base import Load, Replica, Router
from jaxserve.routing.prompts import PromptKey


class Balancer:
    """A router and its counts. Mutated by its owner, one call at a time."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._loads: collections.Counter[Replica] = collections.Counter()

    @property
    def uses_prompt(self) -> bool:
        """False: `choose` and `start` may be given an empty key."""
        return self._router.uses_prompt

    def load(self, replica: Replica) -> int:
        """Requests that were started on the replica and have not ended."""
        return self._loads[replica]

    def choose(self, key: PromptKey, alive: Iterable[Replica]) -> Replica:
        """One of `alive`, which must not be empty."""
        counts, new_load = self._loads, tuple.__new__  # half the time of Load(...): there may be hundreds of replicas
        loads = [new_load(Load, (replica, counts[replica])) for replica in alive]
        chosen = self._router.choose(key, loads)
        assert 0 <= chosen < len(loads), f"{type(self._router).__name__} chose {chosen} of {len(loads)} replicas"
        return loads[chosen].replica

    def start(self, key: PromptKey, replica: Replica) -> None:
        """`replica` has taken a request."""
        self._loads[replica] += 1
        self._router.routed(key, replica)

    def end(self, replica: Replica) -> None:
        """One of its requests has ended, for whatever reason."""
        self._loads[replica] -= 1
        assert self._loads[replica] >= 0, f"more requests ended on {replica} than were started"

    def forget(self, replica: Replica) -> None:
        """The replica has died or left. Its requests still end one by one."""
        self._router.forget(replica)
        if not self._loads[replica]:
            del self._loads[replica]
