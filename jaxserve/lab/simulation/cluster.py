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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxserve.api import FinishReason, Pooling
from jaxserve.engine.interpreter import collector_paused
from jaxserve.errors import ConfigError
from jaxserve.lab.simulation.arriving import Arrivals, Chains
from jaxserve.lab.simulation.cluster_values import (
    Apart,
    Autoscale,
    ClusterResult,
    Event,
    Failure,
    Machine,
    ReplicaSummary,
    ScaleTo,
    Slowdown,
)
from jaxserve.lab.simulation.engine import AcceptDrafts, SimulatedEngine, summarise
from jaxserve.lab.simulation.store import SimulatedStore, StoreModel
from jaxserve.lab.simulation.values import CostModel, SimRequest, SimulatedRequest, VirtualClock
from jaxserve.routing import Balancer, PromptKey, Router, RouterOptions, create_router, key_of_tokens
from jaxserve.sched.create import SchedulerFactory, create_scheduler
from jaxserve.sched.options import SchedulerOptions
from jaxserve.sched.page_exchange import PageExchange
from jaxserve.sched.page_exchange import Prompt as PagePrompt
from jaxserve.sched.plan import Limits
from jaxserve.sched.policy import Policy


def simulate_cluster(
    scheduler: str | type[Policy] | SchedulerFactory,
    trace: Iterable[SimRequest] | Chains,
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
    keep_token_times: bool = False,
    apart: Apart | None = None,
    unlike: Mapping[int, Machine] | None = None,
) -> ClusterResult:
    """Runs the trace to its end on `replicas` replicas, numbered from 0.

    Args:
      scheduler: a name, a class or a function: each replica makes its own.
      trace: in the order of arrival; may be a generator of any length. `Chains` as in `simulate`.
      cost_model, limits: of one replica; all are alike but those in `unlike`.
      router, router_options: as for `create_router`. Prefix affinity without a cap is a large `slack`.
      options: of the schedulers.
      accept: says which drafts are right, as in `simulate`.
      store: behind the host slots of each replica, of its own.
      events: what happens, at which time.
      autoscale: scaling by load; `replicas` is where it begins.
      restart_lost: requests of a replica that dies begin anew elsewhere; their first token stays the one that was seen.
        False: they fail.
      keep_steps, keep_token_times: collect the steps of each replica, and the time of every token. A token that is
        generated again, since its replica died, has the time at which it was seen first.
      apart: some replicas compute prompts for the others. `limits` have slots of host memory then, and there are
        neither events nor scaling.
      unlike: replicas on other machines, by number. Routers count requests and do not know the difference, as in a
        real fleet. Replicas that scaling adds are alike, and one that comes back has its own machine again.

    Raises ConfigError for names, options and replicas that do not exist, InvalidRequest for an unsorted trace.
    """
    if replicas < 1:
        raise ConfigError(f"a cluster of {replicas} replicas was asked for; it needs 1 or more")
    if isinstance(scheduler, Policy):
        raise ConfigError("replicas cannot share one policy object; give its class")

    unlike = unlike or {}
    if strange := sorted(number for number in unlike if not 0 <= number < replicas):
        raise ConfigError(f"replica {strange[0]} has a machine of its own, but replicas are numbered to {replicas - 1}")
    machines = [unlike.get(number, Machine(cost_model=cost_model, limits=limits)) for number in range(replicas)]
    if apart is not None:
        _check_apart(apart, [machine.limits for machine in machines], bool(events) or autoscale is not None)
    options = SchedulerOptions() if options is None else options

    def make_engine(number: int, on_end: Callable[[SimulatedRequest], None]) -> SimulatedEngine:
        clock = VirtualClock()
        pages = None if store is None else SimulatedStore(store, clock)
        lends = apart is not None and number < apart.prefill
        machine = unlike.get(number)
        own_costs, own_limits = (cost_model, limits) if machine is None else (machine.cost_model, machine.limits)
        made = create_scheduler(
            scheduler, own_limits, options=dataclasses.replace(options, lends=lends), clock=clock, store=pages
        )
        return SimulatedEngine(
            made,
            own_costs,
            own_limits,
            clock,
            on_end,
            accept=accept,
            store=pages,
            number=number,
            keep_steps=keep_steps,
            keep_token_times=keep_token_times,
        )

    balancer = Balancer(create_router(router, router_options))
    if apart is not None:
        cluster = _ClusterApart(make_engine, balancer, apart, limits.page_size)
    else:
        cluster = _Cluster(make_engine, balancer, autoscale, restart_lost)
    cluster.scale(replicas, 0.0)
    for event in events:
        cluster.plan_event(event)
    with collector_paused():
        return cluster.run(Arrivals(trace))


def _check_apart(apart: Apart, limits: Sequence[Limits], changes: bool) -> None:
    """`limits`: of each replica."""
    if changes:
        raise ConfigError("replicas that compute prompts for others are simulated without events and scaling")
    if apart.prefill >= len(limits):
        raise ConfigError(f"{apart.prefill} of {len(limits)} replicas are to compute prompts, so that none answers")
    if not all(one.slots.num_slots for one in limits):
        raise ConfigError("pages of other replicas arrive in slots of host memory; set cache.host_bytes")
    if len(sizes := {one.page_size for one in limits}) > 1:
        raise ConfigError(
            f"replicas that hand over pages have pages of {' and '.join(map(str, sorted(sizes)))} tokens here, and "
            "pages of one size are simulated; set cache.page_size"
        )


class _Before(NamedTuple):
    """Facts of a request from replicas that have died: how often it began anew, and when its tokens came first."""

    restarts: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None
    token_times_s: tuple[float, ...] = ()


class _Replica:
    """One life of a replica. Mutated only by its cluster."""

    __slots__ = ("asked_s", "draining", "ended_s", "engine", "num_ended", "started_s")

    def __init__(self, engine: SimulatedEngine, asked_s: float, started_s: float) -> None:
        self.engine = engine
        self.asked_s = asked_s
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
        self._starting: list[float] = []  # when each replica that is starting was decided on
        self._turns: list[tuple[float, int, _Replica]] = []
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_events = 0
        self._ended: list[SimulatedRequest] = []
        self._num_live = 0
        self._restarts: dict[str, _Before] = {}
        self._homeless: list[SimRequest] = []
        self._wanted: collections.deque[tuple[float, int]] = collections.deque()
        self._sizes: list[tuple[float, int]] = []
        self._arrivals = Arrivals(())

    # ---- what happens, in order ------------------------------------------------------------------------------------

    def run(self, arrivals: Arrivals) -> ClusterResult:
        """Runs everything, until no request is left."""
        self._arrivals = arrivals
        if self._autoscale is not None:
            self._at(0.0, self._look)
        now_s, turns, events = 0.0, self._turns, self._events
        while True:
            if events and events[0][0] <= min(turns[0][0] if turns else math.inf, arrivals.next_s):
                if arrivals.next_s == math.inf and not self._num_live:
                    break  # later events of an empty cluster do not matter
                now_s, _, event = heapq.heappop(events)
                event(now_s)
            elif arrivals.next_s < math.inf and (not turns or arrivals.next_s <= turns[0][0]):
                arriving = arrivals.take()
                now_s = arriving.arrival_s
                self._num_live += 1
                self._route(arriving, now_s)
            elif turns:
                turn_s, _, replica = turns[0]
                if turn_s != replica.engine.next_turn_s:
                    heapq.heappop(turns)  # it has died
                    continue
                now_s = turn_s
                self._turn(replica, now_s)
            elif self._homeless:
                homeless, self._homeless = self._homeless, []
                for request in homeless:
                    self._fail(request, "no replica was left to run it", now_s)  # and what follows it arrives
            else:
                break
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
        key = self._key_of(request)
        number = self._balancer.choose(key, self._accepting)
        assert isinstance(number, int), number
        self._balancer.start(key, number)
        self._submit(request, self._replicas[number], now_s)

    def _key_of(self, request: SimRequest) -> PromptKey:
        asked = request.request
        if not self._balancer.uses_prompt:
            return ()
        return key_of_tokens(asked.prompt_token_ids, cache_salt=asked.cache_salt, content=asked.content)

    def _submit(self, request: SimRequest, replica: _Replica, now_s: float) -> None:
        asleep = replica.engine.next_turn_s == math.inf
        replica.engine.submit(request, now_s)
        if asleep:
            heapq.heappush(self._turns, (now_s, replica.engine.number, replica))

    def _end(self, replica: _Replica, outcome: SimulatedRequest) -> None:
        self._balancer.end(outcome.replica)
        replica.num_ended += 1
        if self._restarts and outcome.request_id in self._restarts:
            before = self._restarts.pop(outcome.request_id)
            outcome = dataclasses.replace(
                outcome,
                restarts=before.restarts,
                admitted_s=outcome.admitted_s if before.admitted_s is None else before.admitted_s,
                first_token_s=outcome.first_token_s if before.first_token_s is None else before.first_token_s,
                token_times_s=_seen_first(before.token_times_s, outcome.token_times_s),
            )
        self._note_end(outcome, replica.engine.now_s)

    # ---- replicas come and go --------------------------------------------------------------------------------------

    def scale(self, count: int, now_s: float, asked_s: float | None = None) -> None:
        """Makes `count` replicas accept requests; new ones were decided on at `asked_s`, None: now."""
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
                self._start(self._next_number, now_s, asked_s)
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

    def _start(self, number: int, now_s: float, asked_s: float | None = None) -> None:
        self._next_number = max(self._next_number, number + 1)
        engine = self._make_engine(number, lambda outcome: self._end(self._replicas[number], outcome))
        replica = _Replica(engine, now_s if asked_s is None else asked_s, now_s)
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
                self._fail(request, f"replica {number} died", now_s, number)
                continue
            before = self._restarts.get(request_id, _Before())
            admitted_s, first_token_s, token_times_s = started[request_id]
            self._restarts[request_id] = _Before(
                before.restarts + 1,
                admitted_s if before.admitted_s is None else before.admitted_s,
                first_token_s if before.first_token_s is None else before.first_token_s,
                _seen_first(before.token_times_s, token_times_s),
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
        have = len(self._accepting) + len(self._starting)
        if wanted > have:
            missing = wanted - have
            self._starting += [now_s] * missing
            self._at(now_s + rule.start_up_s, lambda then_s: self._add_started(missing, now_s, then_s))
        elif not self._starting:
            keep = max(count for _, count in self._wanted)
            if keep < have:
                self.scale(keep, now_s)

    def _add_started(self, count: int, asked_s: float, now_s: float) -> None:
        del self._starting[:count]  # those that were decided on first start first
        self.scale(len(self._accepting) + count, now_s, asked_s)

    # ---- what is left ----------------------------------------------------------------------------------------------

    def _note_end(self, outcome: SimulatedRequest, now_s: float) -> None:
        self._num_live -= 1
        self._ended.append(outcome)
        self._arrivals.ended(outcome.request_id, now_s if outcome.last_token_s is None else outcome.last_token_s)

    def _fail(self, request: SimRequest, error: str, now_s: float, replica: int = -1) -> None:
        asked = request.request
        before = self._restarts.pop(asked.request_id, _Before())
        self._note_end(
            SimulatedRequest(
                request_id=asked.request_id,
                owner=asked.owner,
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
            ),
            now_s,
        )

    def _note_size(self, now_s: float) -> None:
        self._sizes.append((now_s, len(self._accepting)))

    def _result(self, now_s: float) -> ClusterResult:
        summaries = tuple(
            ReplicaSummary(
                number=life.engine.number,
                asked_s=life.asked_s,
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
            replica_s=sum(summary.ended_s - summary.asked_s for summary in summaries)
            + sum(now_s - asked_s for asked_s in self._starting),
        )


class _ClusterApart(_Cluster):
    """A cluster in which the first replicas compute prompts for the others.

    The pages cross a link, and are then in host slots of the replica that answers: its scheduler loads them as it would
    on a real device, and computes what did not come in time. Prompts wait for their pages outside of its queue.
    """

    def __init__(
        self,
        make_engine: Callable[[int, Callable[[SimulatedRequest], None]], SimulatedEngine],
        balancer: Balancer,
        apart: Apart,
        page_size: int,
    ) -> None:
        super().__init__(make_engine, balancer, None, restart_lost=True)
        self._apart = apart
        self._page_size = page_size
        self._answering = Balancer(create_router("least_load"))
        self._on_their_way: dict[str, tuple[SimRequest, int, int]] = {}  # the request, its replica, tokens to send
        self._link_free_s = [0.0] * apart.prefill
        self._arrived: collections.defaultdict[int, list[str]] = collections.defaultdict(list)  # not admitted yet

    def _route(self, request: SimRequest, now_s: float) -> None:
        first = self._apart.prefill
        answering = self._answering.choose((), range(first, len(self._replicas)))
        assert isinstance(answering, int), answering
        self._answering.start((), answering)
        asked = request.request
        num_tokens = (len(asked.prompt_token_ids) - 1) // self._page_size * self._page_size
        if len(asked.prompt_token_ids) <= self._apart.above or not num_tokens:
            self._submit(request, self._replicas[answering], now_s)
            return
        key = self._key_of(request)
        number = self._balancer.choose(key, range(first))
        assert isinstance(number, int), number
        self._balancer.start(key, number)
        self._on_their_way[asked.request_id] = (request, answering, num_tokens)
        alone = dataclasses.replace(
            asked,
            prompt_token_ids=asked.prompt_token_ids[:num_tokens],
            max_tokens=0,
            pooling=Pooling.LAST,
            stop_token_ids=frozenset(),
        )
        self._submit(dataclasses.replace(request, request=alone), self._replicas[number], now_s)

    def _end(self, replica: _Replica, outcome: SimulatedRequest) -> None:
        number = replica.engine.number
        if number >= self._apart.prefill:
            self._answering.end(number)
            replica.num_ended += 1
            self._note_end(outcome, replica.engine.now_s)
            return
        self._balancer.end(number)
        replica.num_ended += 1
        request, answering, num_tokens = self._on_their_way[outcome.request_id]
        now_s = replica.engine.now_s
        if outcome.error:  # it computes its prompt where it is answered, or hears the same there
            self._on_their_way[outcome.request_id] = (request, answering, 0)
            self._at(now_s, lambda then_s: self._arrive(outcome.request_id, then_s))
            return
        found = self._exchange(answering).num_found(_prompt_of(request)) * self._page_size
        begin_s, until_s = max(now_s, self._link_free_s[number]), now_s + self._apart.wait_s
        end_s = begin_s + max(0, num_tokens - found) * self._apart.token_s
        if end_s > until_s:  # a part has come by then, or nothing has
            num_tokens = found + max(0, int((until_s - begin_s) / self._apart.token_s))
            self._on_their_way[outcome.request_id] = (request, answering, num_tokens)
            end_s = until_s
        self._link_free_s[number] = max(self._link_free_s[number], end_s if begin_s < end_s else 0.0)
        self._at(end_s + self._apart.latency_s, lambda then_s: self._arrive(outcome.request_id, then_s))

    def _arrive(self, request_id: str, now_s: float) -> None:
        request, answering, num_tokens = self._on_their_way.pop(request_id)
        if num_tokens:
            exchange, name = self._exchange(answering), request_id.encode()
            wanted = exchange.expect(name, _prompt_of(request), num_tokens, request.request.tenant)
            exchange.arrive(name, wanted.slots)
            self._arrived[answering].append(request_id)
        self._submit(request, self._replicas[answering], now_s)

    def _turn(self, replica: _Replica, now_s: float) -> None:
        super()._turn(replica, now_s)
        arrived = self._arrived.get(replica.engine.number)
        if arrived:  # what is admitted has its pages
            waiting = [name for name in arrived if replica.engine.is_waiting(name)]
            for name in set(arrived).difference(waiting):
                self._exchange(replica.engine.number).release(name.encode())
            self._arrived[replica.engine.number] = waiting

    def _exchange(self, number: int) -> PageExchange:
        exchange = self._replicas[number].engine.exchange
        assert exchange is not None, "`_check_apart` has seen the slots"
        return exchange


def _prompt_of(request: SimRequest) -> PagePrompt:
    asked = request.request
    return PagePrompt(asked.cache_salt, asked.prompt_token_ids, asked.content)


def _seen_first(before_s: tuple[float, ...], now_s: tuple[float, ...]) -> tuple[float, ...]:
    """Of the tokens of two lives of a request, the second after the first, the times at which each came first."""
    return before_s + now_s[len(before_s) :]
