"""When simulated requests arrive: at their times, or when the answer before them has come.

With `Chains` a load answers to the server, as people and agents do: whoever waits longer sends later.
"""

import dataclasses
import heapq
import math
from collections.abc import Iterable, Iterator

from jaxserve.errors import InvalidRequest
from jaxserve.lab.simulation.values import SimRequest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chains:
    """Requests that follow each other: the turns of sessions, or all that one client sends.

    Attributes:
      chains: the first request of each arrives at its time. The `arrival_s` of any other, and its deadline, count from
        the end of the request before it, also where that failed.

    Raises InvalidRequest for two requests of one id, and for times that are no time.
    """

    chains: tuple[tuple[SimRequest, ...], ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for one in (request for chain in self.chains for request in chain):
            if one.request.request_id in seen:
                raise InvalidRequest(f"request id {one.request.request_id!r} stands twice in chains; give each its own")
            seen.add(one.request.request_id)
            if not 0 <= one.arrival_s < math.inf:
                raise InvalidRequest(f"request {one.request.request_id!r} waits for {one.arrival_s} s; give 0 or more")


class Arrivals:
    """The requests of a load, in the order of their arrival. Mutated by the simulation that takes them.

    Raises InvalidRequest, also in `take`, at a request of a trace that arrives before the one before it, or before 0.
    """

    def __init__(self, load: Iterable[SimRequest] | Chains) -> None:
        self._following: dict[str, Iterator[SimRequest]] = {}
        self._ready: list[tuple[float, int, SimRequest]] = []  # of chains; the number breaks ties
        self._num_ready = 0
        self._timed = in_order(()) if isinstance(load, Chains) else in_order(load)
        if isinstance(load, Chains):
            for chain in map(iter, load.chains):
                self._push(next(chain, None), chain)
        self._upcoming = next(self._timed, None)

    @property
    def next_s(self) -> float:
        """When the next one arrives, as far as is known; infinity for none."""
        if self._ready:
            return self._ready[0][0]
        return math.inf if self._upcoming is None else self._upcoming.arrival_s

    def take(self) -> SimRequest:
        """The next one."""
        if self._ready:
            return heapq.heappop(self._ready)[2]
        taken, self._upcoming = self._upcoming, next(self._timed, None)
        assert taken is not None, "next_s is infinite"
        return taken

    def ended(self, request_id: str, now_s: float) -> None:
        """A request has ended, and what follows it in its chain has a time."""
        chain = self._following.pop(request_id, None)
        if chain is None:
            return
        following = next(chain, None)
        if following is not None:
            arrival_s, asked = now_s + following.arrival_s, following.request
            deadline_s = asked.deadline_s - following.arrival_s + arrival_s
            moved = dataclasses.replace(asked, arrival_s=arrival_s, deadline_s=deadline_s)
            self._push(dataclasses.replace(following, request=moved, arrival_s=arrival_s), chain)

    def _push(self, request: SimRequest | None, chain: Iterator[SimRequest]) -> None:
        if request is not None:
            heapq.heappush(self._ready, (request.arrival_s, self._num_ready, request))
            self._num_ready += 1
            self._following[request.request.request_id] = chain


def in_order(trace: Iterable[SimRequest]) -> Iterator[SimRequest]:
    """The requests of a trace. Raises InvalidRequest at one that arrives before the one before it, or before 0."""
    last_s = 0.0
    for request in trace:
        if not last_s <= request.arrival_s < math.inf:
            raise InvalidRequest(
                f"request {request.request.request_id!r} arrives at {request.arrival_s} s, after one at {last_s} s; "
                "sort the trace by arrival, from 0 on"
            )
        last_s = request.arrival_s
        yield request
