"""`EngineGroup`: several engines of one model behind the interface of one.

The group knows which replica has which request. Each replica is an `Engine` with its own loop, scheduler and device; a
`Router` chooses between them.

A replica that dies or hangs takes down no other. Its requests move to others, where they go on behind what clients
have: tokens depend on the seed and those before them alone, so a client cannot tell. If none is left, they wait for one
that is built again.
"""

import dataclasses
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

from jaxserve.api import (
    NO_OPTIONS,
    FinishReason,
    Known,
    Request,
    RequestOptions,
    Resume,
    ResumeReason,
    SamplingParams,
    shown_id,
)
from jaxserve.engine.engine import Engine
from jaxserve.engine.inputs import ModelInfo, Prompt
from jaxserve.engine.load import NOTHING_PENDING, Load, Pending
from jaxserve.engine.outputs import Sink, Update
from jaxserve.engine.refusals import ASLEEP, refusal_of
from jaxserve.engine.restarting import Rebuilder, RestartOptions
from jaxserve.engine.stats import EngineStats
from jaxserve.engine.waiting import deadline_error
from jaxserve.engine.watchdog import Watchdog
from jaxserve.errors import Draining, EngineStopped, InvalidRequest, JaxserveError, QueueFull, StepStalled
from jaxserve.routing import Balancer, PromptKey, Router, key_of_tokens
from jaxserve.text.base import Tokenizer
from jaxserve.text.chat import ChatTemplate

logger = logging.getLogger(__name__)

_LOOK_S = 0.01
_NOWHERE = -1


class _Routed:
    """One request and where it is. Mutated under the group's lock, but for what was streamed: by its replica's loop.

    Attributes:
      replica: its number, or `_NOWHERE`: the request waits for one that is built again.
    """

    __slots__ = ("aborted", "key", "num_deaths", "num_streamed", "parts", "replica", "request", "sent", "sink")

    def __init__(self, request: Request, sink: Sink, key: PromptKey) -> None:
        self.request = request
        self.sent = request  # what its replica was given: `request`, or that behind what has been streamed
        self.sink = sink
        self.key = key
        self.replica = _NOWHERE
        self.num_deaths = 0  # of replicas that had it, since the last new token
        self.num_streamed = 0  # tokens that the client has seen, of all its sequences
        self.parts = [_Part(request.known(index)) for index in range(request.sampling.n)]
        self.aborted = False

    def take(self, update: Update) -> Update:
        """Counts an update. Returns it as the client gets it: each sequence tells of its prompt once."""
        part = self.parts[update.index]
        if update.prompt is not None:
            if part.told_prompt:
                update = update._replace(prompt=None, admitted_s=None)
            part.told_prompt = True
        if update.token_ids:
            part.token_ids += update.token_ids
            self.num_streamed += len(update.token_ids)
            self.num_deaths = 0
        part.num_chars += len(update.text)
        part.finished |= update.finish_reason is not None
        return update

    def move(self, reason: ResumeReason) -> None:
        """The replica is gone: the next one goes on behind what the client has."""
        known = tuple(Known(tuple(part.token_ids), part.num_chars, part.finished) for part in self.parts)
        if any(part.token_ids or part.finished for part in self.parts):
            age_s = 0.0 if self.request.resume is None else self.request.resume.age_s  # `arrival_s` has the rest
            self.sent = dataclasses.replace(self.request, resume=Resume(sequences=known, reason=reason, age_s=age_s))


class _Part:
    """One sequence of a request so far. Mutated by its replica's loop."""

    __slots__ = ("finished", "num_chars", "token_ids", "told_prompt")

    def __init__(self, known: Known) -> None:
        self.token_ids = list(known.token_ids)
        self.num_chars = known.text_len
        self.finished = known.finished
        self.told_prompt = False


class EngineGroup:
    """Replicas of one model, an `AnyEngine`. Threads as for `Engine`: driven by hand, or by a thread per replica.

    Requests wait in the queue of their replica, so `max_waiting` holds for each replica: the group is full when all
    are. A request that moves because its replica died is taken even by a full one, since it has been accepted.
    """

    def __init__(
        self,
        replicas: Sequence[Engine],
        router: Router,
        *,
        retries: int = 2,
        rebuild: Callable[[int, Engine], Engine] | None = None,
        restarts: RestartOptions = RestartOptions(),  # noqa: B008 (frozen)
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`retries`: times that a request may move without a new token: it is likely the cause of so many deaths.

        `rebuild` makes an engine in the place of a dead one, with its number, and takes seconds; None: nothing does. It
        is used while the replicas have threads. `clock`: that of the replicas.
        """
        assert replicas, "a group of nothing"
        self._replicas = tuple(replicas)
        self._retries = retries
        self._balancer = Balancer(router)
        self._routed: dict[str, _Routed] = {}
        self._reported_dead: set[int] = set()
        # Held while a replica is chosen and given a request. Engines never call back from `submit` and `abort`.
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._accepting = True
        self._moving = True
        self._clock = clock
        self._watchdog: Watchdog | None = None
        self._rebuilder = None if rebuild is None else Rebuilder(len(self._replicas), rebuild, restarts, self._adopt)
        self._restart_wait_s = restarts.wait_s
        self._stranded: dict[str, float] = {}  # requests that are nowhere: until when they wait for a replica
        self._tells: tuple[Callable[[], None], ...] = ()
        self._waits = False  # in the last turn by hand no replica did anything, and one at least waits

    # ---- any thread ------------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> tuple[Engine, ...]:
        """For observers and operators; requests go through the group."""
        return self._replicas

    @property
    def model(self) -> ModelInfo:
        """The model of each replica."""
        return self._replicas[0].model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Shared by the replicas."""
        return self._replicas[0].tokenizer

    @property
    def failure(self) -> BaseException | None:
        """None while one replica lives or may come back; then the reasons for which they died.

        StepStalled when all of them hung, or one of them so that the others cannot be told.
        """
        replicas = self._replicas
        for replica in replicas:
            if replica.lost:
                return replica.failure
        down = self._down
        if len(down) < len(replicas):
            return None
        kind = StepStalled if all(isinstance(one.failure, StepStalled) for one in replicas) else EngineStopped
        return kind("; ".join(down.values()))

    @property
    def _down(self) -> dict[int, str]:
        """The replicas that are dead and do not come back, and why."""
        return {
            k: f"replica {k} has died: {replica.failure!r}{'' if self._rebuilder is None else self._rebuilder.say(k)}"
            for k, replica in enumerate(self._replicas)
            if replica.failure is not None and not self._may_return(k)
        }

    def _may_return(self, number: int) -> bool:
        return self._watchdog is not None and self._rebuilder is not None and self._rebuilder.hopes(number)

    @property
    def accepting(self) -> bool:
        """False once the group drains or stops, or when every replica has died."""
        return self._accepting and any(replica.accepting for replica in self._replicas)

    @property
    def ready(self) -> bool:
        """New requests should come: one replica advances at least."""
        return self._accepting and any(replica.ready for replica in self._replicas)

    @property
    def stalled_s(self) -> float:
        """Seconds of the replica that has stood still the longest: its requests hang, however well the others do."""
        return max(replica.stalled_s for replica in self._replicas)

    @property
    def stats(self) -> tuple[EngineStats, ...]:
        """The statistics of each replica's loop."""
        return tuple(stats for replica in self._replicas for stats in replica.stats)

    @property
    def num_live(self) -> int:
        """Requests that the loops have taken and that have not ended, those that wait for a replica included."""
        return sum(replica.num_live for replica in self._replicas) + len(self._stranded)

    @property
    def num_unstarted(self) -> int:
        """Requests that have no token yet."""
        return sum(replica.num_unstarted for replica in self._replicas)

    @property
    def load(self) -> Load:
        """The load of the living replicas together; of all of them, who have nothing to do, if none lives.

        So the bounds are never 0: a call that comes while replicas are built again is not too large, but too early.
        """
        living = [replica for replica in self._replicas if replica.failure is None] or self._replicas
        return Load(*map(sum, zip(*[replica.load for replica in living], strict=True)))

    def prepare(self, prompt: Prompt, sampling: SamplingParams, options: RequestOptions = NO_OPTIONS) -> Request:
        """See `Engine.prepare`. Numbers and seeds come from one counter, so they do not depend on the replicas."""
        return self._replicas[0].prepare(prompt, sampling, options)

    def chat_template(self, source: str | None = None) -> ChatTemplate:
        """See `Engine.chat_template`."""
        return self._replicas[0].chat_template(source)

    def submit(self, request: Request, sink: Sink) -> None:
        """Hands the request to a replica. `sink` gets every update, the last one with `last` set.

        Raises QueueFull when every living replica is full, and otherwise as `Engine.submit`; InvalidRequest when a
        request of this id is live, which two replicas would not notice, unless this one resumes it.
        """
        key: PromptKey = ()
        if self._balancer.uses_prompt:
            key = key_of_tokens(request.prompt_token_ids, cache_salt=request.cache_salt, content=request.content)
        routed, ended = _Routed(request, sink, key), None
        with self._lock:
            if not self.accepting:
                raise self._refusal()
            if (same := self._routed.get(request.request_id)) is not None:
                if request.resume is None:
                    name = shown_id(request.request_id)
                    raise InvalidRequest(f"a request with id {name!r} is live already; choose another")
                ended = same if self._abort(same) else None  # itself, on a connection that has been lost
            self._place(routed)
            self._routed[request.request_id] = routed
        if ended is not None:
            self._tell_end(ended, None)

    def check_room(self, num_sequences: int, owner: str, pending: Pending = NOTHING_PENDING) -> None:
        """See `Engine.check_room`. Requests are assumed to spread evenly: the group is full when all replicas are."""
        living = [self._replicas[number] for number in self._candidates()]
        each = {name: -(-count // len(living)) for name, count in pending.items()}
        full: QueueFull | None = None
        for replica in living:
            try:
                replica.check_room(-(-num_sequences // len(living)), owner, each)
            except QueueFull as error:
                full = error
            else:
                return
        if full is not None:
            raise full

    def abort(self, *requests: str | Request) -> None:
        """See `Engine.abort`."""
        for request in requests:
            self._abort_one(request)

    def _abort_one(self, request: str | Request) -> None:
        request_id = request.request_id if isinstance(request, Request) else request
        with self._lock:
            routed = self._routed.get(request_id)
            if routed is None or (isinstance(request, Request) and request is not routed.request):
                return
            ended = self._abort(routed)
        if ended:
            self._tell_end(routed, None)

    def _refusal(self) -> EngineStopped:
        if self._accepting and self.failure is None:
            if any(replica.asleep and replica.failure is None for replica in self._replicas):
                return EngineStopped(ASLEEP)
            return EngineStopped("no replica takes requests: all have died, and one is being built again; try later")
        return refusal_of(self.failure)

    def _abort(self, routed: _Routed) -> bool:
        """Returns whether the request has ended with this, since no replica has it."""
        routed.aborted = True  # its replica may be dying, and the request must not be moved
        if routed.replica == _NOWHERE:
            self._forget(routed)
            return True
        self._replicas[routed.replica].abort(routed.sent)
        return False

    def watch_deliveries(self, tell: Callable[[], None]) -> None:
        """See `Engine.watch_deliveries`; the loops of all replicas call it."""
        with self._lock:
            self._tells += (tell,)
            for replica in self._replicas:
                replica.watch_deliveries(tell)

    def unwatch_deliveries(self, tell: Callable[[], None]) -> None:
        """See `Engine.unwatch_deliveries`."""
        with self._lock:
            self._tells = tuple(one for one in self._tells if one != tell)
            for replica in self._replicas:
                replica.unwatch_deliveries(tell)

    # ---- the loops -------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One turn of each replica. A step that raises costs its replica alone; raises when none is left."""
        worked = waits = False
        for number, replica in enumerate(self._replicas):
            if replica.failure is not None:
                continue
            try:
                if replica.step():
                    worked |= not replica.waits
                    waits |= replica.waits
            except Exception as error:
                logger.error("the step of replica %d failed", number, exc_info=error)
                replica.fail(error)
                worked = True  # its requests have moved, perhaps to one that was idle in this turn
        if (failure := self.failure) is not None:
            raise failure
        self._waits = waits and not worked
        return worked or waits

    def pause(self, most_s: float = math.inf) -> None:
        """See `Engine.pause`. One thread cannot sleep in front of several inboxes, so it looks at all every 10 ms."""
        if not self._waits:
            return
        next(replica for replica in self._replicas if replica.waits).pause(min(most_s, _LOOK_S))

    def run_until_idle(self) -> None:
        """Drives the loops by hand until every request has ended."""
        try:
            while self.step():
                self.pause()
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Declares every replica dead; see `Engine.fail`."""
        with self._lock:
            self._accepting = self._moving = False
        self._end_stranded(EngineStopped(f"the engine has died: {error!r}"))
        for replica in self._replicas:
            if replica.failure is None:
                replica.fail(error)

    def start(self) -> None:
        """Gives each replica a thread of its own, and all of them a watchdog."""
        for replica in self._replicas:
            replica.start_loop()
        if self._rebuilder is not None or any(replica.has_deadlines for replica in self._replicas):
            self._watchdog = Watchdog(lambda: self._replicas, on_death=self._see_death, clock=self._clock)
            self._watchdog.start()

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for the live ones, those that move included. True when all ended in time."""
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            self._accepting = False
        self._end_stranded(Draining("every replica has died, and the engine is shut down before one is built again"))
        with self._lock:
            drained = self._idle.wait_for(lambda: not self._routed, timeout_s)
        for replica in self._replicas:
            drained &= replica.drain(max(0.0, deadline_s - time.monotonic()))
        return drained

    def stop(self, *, hand_over: bool = False) -> None:
        """Refuses new requests, ends the live ones, and ends the threads; see `Engine.stop`."""
        with self._lock:
            self._accepting = self._moving = False
        if self._rebuilder is not None:
            self._rebuilder.stop()
        self._end_stranded(Draining("every replica has died, and the engine was shut down") if hand_over else None)
        self._at_once(lambda replica: replica.stop(hand_over=hand_over))
        if self._watchdog is not None:
            self._watchdog.stop()

    def export(self, timeout_s: float) -> None:
        """See `Engine.export`."""
        self._at_once(lambda replica: replica.export(timeout_s))

    def _at_once(self, work: Callable[[Engine], None]) -> None:
        """On a thread each: a replica whose device does not answer must not keep those of the others waiting."""
        threads = [
            threading.Thread(target=work, args=(replica,), name="jaxserve-end", daemon=True)
            for replica in self._replicas
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    # ---- replicas that come back -----------------------------------------------------------------------------------

    def _see_death(self, number: int) -> None:
        """On the watchdog's thread, at each look as long as it is dead."""
        with self._lock:
            self._report_death(number)
            wanted, failed, now_s = self._accepting, self.failure is not None, self._clock()
            waiting = [(self._routed[name], until_s) for name, until_s in self._stranded.items()]
            over = [one for one, until_s in waiting if failed or min(until_s, one.request.deadline_s) <= now_s]
            for routed in over:
                self._forget(routed)
            # Under the lock that `_adopt` takes: the one that was seen dead may have a successor meanwhile.
            replica = self._replicas[number]
            if wanted and self._rebuilder is not None and replica.failure is not None:
                self._rebuilder.begin(number, replica)
        for routed in over:
            self._tell_end(routed, self._give_up(routed, now_s))

    def _adopt(self, number: int, engine: Engine) -> None:
        """Takes a new engine in the place of a dead one, unless the group has ended meanwhile."""
        with self._lock:
            if not self._accepting:
                engine.stop()
                return
            for tell in self._tells:
                engine.watch_deliveries(tell)
            engine.start_loop()
            engine.stats[0].num_restarts += 1
            self._replicas = tuple(engine if k == number else one for k, one in enumerate(self._replicas))
            self._reported_dead.discard(number)
            for name in [*self._stranded]:
                routed = self._routed[name]
                try:
                    self._place(routed, accepted=True)
                except EngineStopped:  # it has died again: they wait for the next one
                    routed.replica = _NOWHERE
                    break
                del self._stranded[name]
        logger.warning("%s is back", self._name(number))

    def _strand(self, routed: _Routed) -> bool:
        """Lets a request that was accepted wait for a replica that is built again; False: there will be none."""
        may_return = any(self._may_return(k) for k, one in enumerate(self._replicas) if one.failure is not None)
        if not (self._restart_wait_s and self._accepting and may_return):
            return False
        if not self._stranded:
            logger.warning("no replica is left: requests wait %g s for one that is built again", self._restart_wait_s)
        routed.replica = _NOWHERE
        self._stranded[routed.request.request_id] = self._clock() + self._restart_wait_s
        return True

    def _end_stranded(self, error: JaxserveError | None) -> None:
        """Ends the requests that wait for a replica: with ABORT without an error."""
        with self._lock:
            ended = [self._routed[name] for name in self._stranded]
            for routed in ended:
                self._forget(routed)
        for routed in ended:
            self._tell_end(routed, error)

    def _give_up(self, routed: _Routed, now_s: float) -> JaxserveError:
        """The error of a request for which no replica came back in time."""
        if routed.request.deadline_s <= now_s:
            return deadline_error(routed.request, started=routed.num_streamed > 0)
        if (failure := self.failure) is not None:
            return EngineStopped(f"no replica came back: {failure}")
        return EngineStopped(
            f"every replica has died, and none was built again within {self._restart_wait_s:g} s (watchdog.wait_s); "
            "try later"
        )

    # ---- requests that move ----------------------------------------------------------------------------------------

    def _place(self, routed: _Routed, *, accepted: bool = False) -> None:
        """Gives the request to a replica that takes it. Raises QueueFull or EngineStopped when there is none."""
        candidates = self._candidates()
        full: QueueFull | None = None
        for number in range(len(self._replicas)):
            self._report_death(number)
        while candidates:
            number = self._balancer.choose(routed.key, candidates)
            assert isinstance(number, int), number
            routed.replica = number  # before its loop can call the sink
            try:
                sink = functools.partial(self._take, routed)
                self._replicas[number].submit(routed.sent, sink, accepted=accepted)
            except QueueFull as error:
                full = error
            except EngineStopped:  # it died after it was asked whether it accepts
                pass
            else:
                self._balancer.start(routed.key, number)
                return
            candidates.remove(number)
        raise full or self._refusal()

    def _candidates(self) -> list[int]:
        """Those that may be given requests: that advance, or if there is none, those that may yet go on."""
        accepting = [number for number, replica in enumerate(self._replicas) if replica.accepting]
        return [number for number in accepting if self._replicas[number].ready] or accepting

    def _report_death(self, number: int) -> None:
        failure = self._replicas[number].failure
        if failure is None or number in self._reported_dead:
            return
        self._reported_dead.add(number)
        self._balancer.forget(number)
        left = sum(replica.failure is None for replica in self._replicas)
        logger.error("%s has died, %d are left: %r", self._name(number), left, failure)

    def _take(self, routed: _Routed, update: Update) -> None:
        """The sink that each replica is given; on its loop thread."""
        if isinstance(update.error, EngineStopped):  # only the end of a replica gives this error
            if update.last:  # with n > 1 the error comes once for each sequence
                self._move(routed, update.error)
            return
        update = routed.take(update)
        if update.last:
            with self._lock:
                self._forget(routed)
        routed.sink(update)

    def _move(self, routed: _Routed, end: EngineStopped) -> None:
        """Sends a request of a replica that has died or was stopped elsewhere, or tells its client."""
        error: JaxserveError | None = None
        with self._lock:
            dead = routed.replica
            self._report_death(dead)
            if not routed.aborted:
                error = self._try_elsewhere(routed, end)
                if error is None:
                    return
            self._forget(routed, dead)
        self._tell_end(routed, error)

    def _tell_end(self, routed: _Routed, error: JaxserveError | None) -> None:
        """The last updates of a request that no replica has any more. Any thread."""
        request = routed.request
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        left = [index for index, part in enumerate(routed.parts) if not part.finished]
        for index in left:
            last = index == left[-1]
            routed.sink(Update(request.request_id, index, finish_reason=reason, error=error, last=last))
        for tell in self._tells:  # this may not be the thread of a loop, which would do it behind its turn
            tell()

    def _try_elsewhere(self, routed: _Routed, end: EngineStopped) -> JaxserveError | None:
        """None when another replica has taken it, else why none did."""
        name, left, drained = self._name(routed.replica), routed.replica, isinstance(end, Draining)
        if not self._moving:
            return end if drained else EngineStopped(f"{name}: {end}")
        when = f"after {routed.num_streamed} tokens had been streamed" if routed.num_streamed else "before it answered"
        if not drained:  # one that is stopped was not stopped by this request
            if routed.num_deaths >= self._retries:
                return EngineStopped(
                    f"{name} has died {when}, after {routed.num_deaths} moves of this request from replicas that died "
                    f"without a new token; no more are tried (route.retries): {end}"
                )
            routed.num_deaths += 1
        routed.move(ResumeReason.DRAINED if drained else ResumeReason.DIED)
        try:
            self._place(routed, accepted=True)
        except JaxserveError as error:
            if not self._strand(routed):
                went = "was stopped" if drained else "has died"
                return EngineStopped(f"{name} {went} {when}, and no other takes the request: {error}")
        self._balancer.end(left)
        return None

    def _forget(self, routed: _Routed, replica: int | None = None) -> None:
        if self._routed.get(routed.request.request_id) is routed:  # else it goes on under this id elsewhere
            del self._routed[routed.request.request_id]
        if routed.replica == _NOWHERE and replica is None:
            del self._stranded[routed.request.request_id]
        else:
            self._balancer.end(routed.replica if replica is None else replica)
        if not self._routed:
            self._idle.notify_all()

    def _name(self, number: int) -> str:
        return f"replica {number} of {len(self._replicas)}"
