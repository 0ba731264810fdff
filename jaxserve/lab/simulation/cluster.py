"""Simulated clusters: many simulated engines behind a router of `jaxserve.routing`, with failures and scaling.

Schedulers and routers are the real objects, so a question about a thousand chips is answered by the code that would run
on them.

Time is global: the earliest event is carried out first, and at one moment events come before arrivals and arrivals
before turns. So a router sees exactly the requests that had not ended when one arrived. The cost of a real router's
messages and of a network is left out.
"""

import collections
import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jaxserve.api import FinishReason
from jaxserve.engine.interpreter import collector_paused
from jaxserve.errors import ConfigError
from jaxserve.lab.simulation.cluster_values import (
    Autoscale,
    ClusterResult,
    Event,
    Failure,
    ReplicaSummary,
    ScaleTo,
    Slowdown,
)
from jaxserve.lab.simulation.engine import AcceptDrafts, SimulatedEngine, summarise
from jaxserve.lab.simulation.simulate import in_order
from jaxserve.lab.simulation.store import SimulatedStore, StoreModel
from jaxserve.lab.simulation.values import CostModel, SimRequest, SimulatedRequest, VirtualClock
from jaxserve.routing import Balancer, Router, RouterOptions, create_router, key_of_tokens
from jaxserve.sched.create import SchedulerFactory, create_scheduler
from jaxserve.sched.options import SchedulerOptions
from jaxserve.sched.plan import Limits
from jaxserve.sched.policy import Policy


def simulate_cluster(
    scheduler: str | type[Policy] | SchedulerFactory,
    trace: Iterable[SimRequest],
    cost_model: CostModel,
    limits: Limits,
    *,
    replicas: int,
    router: str | type[Router] | Router = "prefix",
    router_options: RouterOptions | None = None,
    options: SchedulerOptions | None = None,
    accept: AcceptDrafts | None = None,
    store: StoreModel | None = None,
    events: Sequence[Event] = (),
    autoscale: Autoscale | None = None,
    restart_lost: bool = True,
    keep_steps: bool = False,
) -> ClusterResult:
    """Runs the trace to its end on `replicas` replicas, numbered from 0.

    Args:
      scheduler: a name, a class or a function: each replica makes its own.
      trace: in the order of arrival; may be a generator of any length.
      cost_model, limits: of one replica; all are alike.
      router, router_options: as for `create_router`. Prefix affinity without a cap is a large `slack`.
      options: of the schedulers.
      accept: says which drafts are right, as in `simulate`.
      store: behind the host slots of each replica, of its own.
      events: what happens, at which time.
      autoscale: scaling by load; `replicas` is where it begins.
      restart_lost: requests of a replica that dies begin anew elsewhere; their first token stays the one that was seen.
        False: they fail.
      keep_steps: collect the steps of each replica.

    Raises ConfigError for names, options and replicas that do not exist, InvalidRequest for an unsorted trace.
    """
    if replicas < 1:
        raise ConfigError(f"a cluster of {replicas} replicas was asked for; it needs 1 or more")
    if isinstance(scheduler, Policy):
        raise ConfigError("replicas cannot share one policy object; give its class")

    def make_engine(number: int, on_end: Callable[[SimulatedRequest], None]) -> SimulatedEngine:
        clock = VirtualClock()
        pages = None if store is None else SimulatedStore(store, clock)
        made = create_scheduler(scheduler, limits, options=options, clock=clock, store=pages)
        return SimulatedEngine(
            made,
            cost_model,
            limits,
            clock,
            on_end,
            accept=accept,
            store=pages,
            number=number,
            keep_steps=keep_steps,
        )

    cluster = _Cluster(make_engine, Balancer(create_router(router, router_options)), autoscale, restart_lost)
    cluster.scale(replicas, 0.0)
    for event in events:
        cluster.plan_event(event)
    with collector_paused():
        return cluster.run(trace)


class _Before(NamedTuple):
    """Facts of a request from replicas that have died: how often it began anew, and when its first token came."""

    restarts: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None


class _Replica:
    """One life of a replica. Mutated only by its cluster."""

    __slots__ = ("draining", "ended_s", "engine", "num_ended", "started_s")

    def __init__(self, engine: SimulatedEngine, started_s: float) -> None:
        self.engine = engine
        self.started_s = started_s
        self.ended_s = math.inf
        self.num_ended = 0
        self.draining = False


class _Cluster:
    """Mutated by `run`, which is called once."""

    def __init__(
        self,
        make_engine: Callable[[int, Callable[[SimulatedRequest], None]], SimulatedEngine],
        balancer: Balancer,
        autoscale: Autoscale | None,
        restart_lost: bool,
    ) -> None:
        self._make_engine = make_engine
        self._balancer = balancer
        self._autoscale = autoscale
        self._restart_lost = restart_lost
        self._lives: list[_Replica] = []
        self._replicas: dict[int, _Replica] = {}  # live replicas, draining ones included
        self._accepting: list[int] = []
        self._next_number = 0
        self._num_starting = 0
        self._turns: list[tuple[float, int, _Replica]] = []
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_events = 0
        self._ended: list[SimulatedRequest] = []
        self._num_live = 0
        self._restarts: dict[str, _Before] = {}
        self._homeless: list[SimRequest] = []
        self._wanted: collections.deque[tuple[float, int]] = collections.deque()
        self._sizes: list[tuple[float, int]] = []

    # ---- what happens, in order ------------------------------------------------------------------------------------

    def run(self, trace: Iterable[SimRequest]) -> ClusterResult:
        """Runs everything, until no request is left."""
        arrivals = in_order(trace)
        upcoming = next(arrivals, None)
        if self._autoscale is not None:
            self._at(0.0, self._look)
        now_s, turns, events = 0.0, self._turns, self._events
        while True:
            if events and events[0][0] <= min(turns[0][0] if turns else math.inf, _arrival(upcoming)):
                if upcoming is None and not self._num_live:
                    break  # later events of an empty cluster do not matter
                now_s, _, event = heapq.heappop(events)
                event(now_s)
            elif upcoming is not None and (not turns or upcoming.arrival_s <= turns[0][0]):
                now_s = upcoming.arrival_s
                self._num_live += 1
                self._route(upcoming, now_s)
                upcoming = next(arrivals, None)
            elif turns:
                turn_s, _, replica = turns[0]
                if turn_s != replica.engine.next_turn_s:
                    heapq.heappop(turns)  # it has died
                    continue
                now_s = turn_s
                self._turn(replica, now_s)
            else:
                break
        for request in self._homeless:
            self._fail(request, "no replica was left to run it")
        return self._result(now_s)

    def _turn(self, replica: _Replica, now_s: float) -> None:
        engine = replica.engine
        engine.turn()
        if engine.next_turn_s < math.inf:
            heapq.heapreplace(self._turns, (engine.next_turn_s, engine.number, replica))
            return
        heapq.heappop(self._turns)
        if replica.draining:
            self._retire(replica, now_s)

    def _route(self, request: SimRequest, now_s: float) -> None:
        if not self._accepting:
            self._homeless.append(request)
            return
        asked, key = request.request, ()
        if self._balancer.uses_prompt:
            key = key_of_tokens(asked.prompt_token_ids, cache_salt=asked.cache_salt, content=asked.content)
        number = self._balancer.choose(key, self._accepting)
        assert isinstance(number, int), number
        replica = self._replicas[number]
        self._balancer.start(key, number)
        asleep = replica.engine.next_turn_s == math.inf
        replica.engine.submit(request, now_s)
        if asleep:
            heapq.heappush(self._turns, (now_s, number, replica))

    def _end(self, replica: _Replica, outcome: SimulatedRequest) -> None:
        self._balancer.end(outcome.replica)
        replica.num_ended += 1
        self._num_live -= 1
        if self._restarts and outcome.request_id in self._restarts:
            before = self._restarts.pop(outcome.request_id)
            outcome = dataclasses.replace(
                outcome,
                restarts=before.restarts,
                admitted_s=outcome.admitted_s if before.admitted_s is None else before.admitted_s,
                first_token_s=outcome.first_token_s if before.first_token_s is None else before.first_token_s,
            )
        self._ended.append(outcome)

    # ---- replicas come and go --------------------------------------------------------------------------------------

    def scale(self, count: int, now_s: float) -> None:
        """Makes `count` replicas accept requests."""
        surplus = len(self._accepting) - count
        for _ in range(surplus):
            replica = self._replicas[self._accepting.pop()]
            replica.draining = True
            if not replica.engine.num_live and replica.engine.next_turn_s == math.inf:
                self._retire(replica, now_s)
        draining = [replica for replica in self._replicas.values() if replica.draining]
        for _ in range(-surplus):
            if draining:  # still warm
                replica = draining.pop()
                replica.draining = False
                self._accept(replica.engine.number, now_s)
            else:
                self._start(self._next_number, now_s)
        self._note_size(now_s)

    def plan_event(self, event: Event) -> None:
        """Schedules an event for its time."""
        if isinstance(event, ScaleTo):
            self._at(event.at_s, lambda now_s: self.scale(event.replicas, now_s))
        elif isinstance(event, Failure):
            self._at(event.at_s, lambda now_s: self._kill(event.replica, now_s))
            if event.back_s < math.inf:
                self._at(event.back_s, lambda now_s: self._come_back(event.replica, now_s))
        else:
            assert isinstance(event, Slowdown), event
            self._at(event.at_s, lambda now_s: self._slow(event.replica, event.factor))
            if event.until_s < math.inf:
                self._at(event.until_s, lambda now_s: self._slow(event.replica, 1.0))

    def _at(self, at_s: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at_s, self._num_events, event))
        self._num_events += 1

    def _start(self, number: int, now_s: float) -> None:
        self._next_number = max(self._next_number, number + 1)
        engine = self._make_engine(number, lambda outcome: self._end(self._replicas[number], outcome))
        replica = _Replica(engine, now_s)
        self._replicas[number] = replica
        self._lives.append(replica)
        self._accept(number, now_s)

    def _accept(self, number: int, now_s: float) -> None:
        self._accepting.append(number)
        homeless, self._homeless = self._homeless, []
        for request in homeless:
            self._route(request, now_s)

    def _retire(self, replica: _Replica, now_s: float) -> None:
        replica.ended_s = now_s
        self._balancer.forget(replica.engine.number)
        del self._replicas[replica.engine.number]

    def _kill(self, number: int, now_s: float) -> None:
        replica = self._replicas.get(number)
        if replica is None:
            return  # the replica had gone before
        if number in self._accepting:
            self._accepting.remove(number)
        engine = replica.engine
        lost = engine.kill()
        started = {r.request.request_id: engine.started(r.request.request_id) for r in lost}
        for _ in lost:
            self._balancer.end(number)
        self._retire(replica, now_s)
        self._note_size(now_s)
        for request in lost:
            request_id = request.request.request_id
            if not self._restart_lost:
                self._fail(request, f"replica {number} died", number)
                continue
            before = self._restarts.get(request_id, _Before())
            admitted_s, first_token_s = started[request_id]
            self._restarts[request_id] = _Before(
                before.restarts + 1,
                admitted_s if before.admitted_s is None else before.admitted_s,
                first_token_s if before.first_token_s is None else before.first_token_s,
            )
            self._route(request, now_s)

    def _come_back(self, number: int, now_s: float) -> None:
        if number not in self._replicas:
            self._start(number, now_s)
            self._note_size(now_s)

    def _slow(self, number: int, factor: float) -> None:
        if number in self._replicas:
            self._replicas[number].engine.slowness = factor

    def _look(self, now_s: float) -> None:
        """Scales by load, and schedules the next check."""
        rule = self._autoscale
        assert rule is not None
        self._at(now_s + rule.interval_s, self._look)
        wanted = rule.wanted(self._num_live)
        self._wanted.append((now_s, wanted))
        while self._wanted[0][0] < now_s - rule.down_after_s:
            self._wanted.popleft()
        have = len(self._accepting) + self._num_starting
        if wanted > have:
            missing = wanted - have
            self._num_starting += missing
            self._at(now_s + rule.start_up_s, lambda then_s: self._add_started(missing, then_s))
        elif not self._num_starting:
            keep = max(count for _, count in self._wanted)
            if keep < have:
                self.scale(keep, now_s)

    def _add_started(self, count: int, now_s: float) -> None:
        self._num_starting -= count
        self.scale(len(self._accepting) + count, now_s)

    # ---- what is left ----------------------------------------------------------------------------------------------

    def _fail(self, request: SimRequest, error: str, replica: int = -1) -> None:
        asked = request.request
        self._num_live -= 1
        before = self._restarts.pop(asked.request_id, _Before())
        self._ended.append(
            SimulatedRequest(
                request_id=asked.request_id,
                tenant=asked.tenant,
                priority=asked.priority,
                arrival_s=request.arrival_s,
                admitted_s=before.admitted_s,
                first_token_s=before.first_token_s,
                last_token_s=None,
                prompt_tokens=len(asked.prompt_token_ids),
                asked_tokens=asked.max_tokens * asked.sampling.n,
                output_tokens=0,
                preemptions=0,
                cached_tokens=0,
                finish_reason=FinishReason.ERROR,
                error=error,
                replica=replica,
                restarts=before.restarts,
            )
        )

    def _note_size(self, now_s: float) -> None:
        self._sizes.append((now_s, len(self._accepting)))

    def _result(self, now_s: float) -> ClusterResult:
        summaries = tuple(
            ReplicaSummary(
                number=life.engine.number,
                started_s=life.started_s,
                ended_s=min(life.ended_s, now_s),
                requests=life.num_ended,
                num_steps=life.engine.num_steps,
                device_s=life.engine.device_s,
                steps=tuple(life.engine.steps),
            )
            for life in self._lives
        )
        total = summarise([life.engine for life in self._lives], self._ended, now_s)
        return ClusterResult(
            total=dataclasses.replace(total, steps=()),
            replicas=summaries,
            sizes=tuple(self._sizes),
            replica_s=sum(summary.ended_s - summary.started_s for summary in summaries),
        )


def _arrival(request: SimRequest | None) -> float:
    return math.inf if request is None else request.arrival_s
