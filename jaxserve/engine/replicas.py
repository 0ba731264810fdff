"""`EngineGroup`: several engines of one model behind the interface of one.

The group knows which replica has which request. Each replica is an `Engine` with its own loop, scheduler and device; a
`Router` chooses between them.

A replica that dies takes down no other. Its requests move to others, where they go on behind what their clients have:
tokens depend on the seed and those before them alone, so a client cannot tell.
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
)
from jaxserve.engine.base import Load, reason_of
from jaxserve.engine.engine import Engine
from jaxserve.engine.inputs import ModelInfo, Prompt
from jaxserve.engine.outputs import Sink, Update
from jaxserve.engine.stats import EngineStats
from jaxserve.errors import EngineStopped, InvalidRequest, JaxserveError, QueueFull
from jaxserve.routing import Balancer, PromptKey, Router, key_of_tokens
from jaxserve.text.base import Tokenizer
from jaxserve.text.chat import ChatTemplate

logger = logging.getLogger(__name__)

_LOOK_S = 0.01


class _Routed:
    """One request and where it is. Mutated under the group's lock, but for what was streamed: by its replica's loop."""

    __slots__ = ("aborted", "key", "num_deaths", "num_streamed", "parts", "replica", "request", "sent", "sink")

    def __init__(self, request: Request, sink: Sink, key: PromptKey) -> None:
        self.request = request
        self.sent = request  # what its replica was given: `request`, or that behind what has been streamed
        self.sink = sink
        self.key = key
        self.replica = -1
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

    def move(self) -> None:
        """The replica is gone: the next one goes on behind what the client has."""
        known = tuple(Known(tuple(part.token_ids), part.num_chars, part.finished) for part in self.parts)
        if any(part.token_ids or part.finished for part in self.parts):
            self.sent = dataclasses.replace(self.request, resume=Resume(sequences=known, reason=ResumeReason.DIED))


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

    def __init__(self, replicas: Sequence[Engine], router: Router, *, retries: int = 2) -> None:
        """`retries`: times that a request may move without a new token: it is likely the cause of so many deaths."""
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
        """None while one replica lives; then the reasons for which they died."""
        failures = [replica.failure for replica in self._replicas]
        if None in failures:
            return None
        return EngineStopped("; ".join(f"replica {k} has died: {failure!r}" for k, failure in enumerate(failures)))

    @property
    def accepting(self) -> bool:
        """False once the group drains or stops, or when every replica has died."""
        return self._accepting and any(replica.accepting for replica in self._replicas)

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
        """Requests that the loops have taken and that have not ended."""
        return sum(replica.num_live for replica in self._replicas)

    @property
    def num_unstarted(self) -> int:
        """Requests that have no token yet."""
        return sum(replica.num_unstarted for replica in self._replicas)

    @property
    def load(self) -> Load:
        """The load of the living replicas together."""
        loads = [replica.load for replica in self._replicas if replica.failure is None]
        return Load(*map(sum, zip(*loads, strict=True))) if loads else Load(0, 0, 0, 0, 0)

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
        routed = _Routed(request, sink, key)
        with self._lock:
            if not self.accepting:
                raise EngineStopped(f"the engine takes no more requests: {reason_of(self.failure)}")
            if (same := self._routed.get(request.request_id)) is not None:
                if request.resume is None:
                    raise InvalidRequest(f"a request with id {request.request_id!r} is live already; choose another")
                self._abort(same)  # itself, on a connection that has been lost
            self._place(routed)
            self._routed[request.request_id] = routed

    def check_room(self, num_sequences: int) -> None:
        """See `Engine.check_room`. Requests are assumed to spread evenly: the group is full when all replicas are."""
        living = [replica for replica in self._replicas if replica.accepting]
        full: QueueFull | None = None
        for replica in living:
            try:
                replica.check_room(-(-num_sequences // len(living)))
            except QueueFull as error:
                full = error
            else:
                return
        if full is not None:
            raise full

    def abort(self, request: str | Request) -> None:
        """See `Engine.abort`."""
        request_id = request.request_id if isinstance(request, Request) else request
        with self._lock:
            routed = self._routed.get(request_id)
            if routed is None or (isinstance(request, Request) and request is not routed.request):
                return
            self._abort(routed)

    def _abort(self, routed: _Routed) -> None:
        routed.aborted = True  # its replica may be dying, and the request must not be moved
        self._replicas[routed.replica].abort(routed.sent)

    def watch_deliveries(self, tell: Callable[[], None]) -> None:
        """See `Engine.watch_deliveries`; the loops of all replicas call it."""
        for replica in self._replicas:
            replica.watch_deliveries(tell)

    def unwatch_deliveries(self, tell: Callable[[], None]) -> None:
        """See `Engine.unwatch_deliveries`."""
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
        for replica in self._replicas:
            if replica.failure is None:
                replica.fail(error)

    def start(self) -> None:
        """Gives each replica a thread of its own."""
        for replica in self._replicas:
            replica.start()

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for the live ones, those that move included. True when all ended in time."""
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            self._accepting = False
            drained = self._idle.wait_for(lambda: not self._routed, timeout_s)
        for replica in self._replicas:
            drained &= replica.drain(max(0.0, deadline_s - time.monotonic()))
        return drained

    def stop(self) -> None:
        """Refuses new requests, ends the live ones with ABORT, and ends the threads."""
        with self._lock:
            self._accepting = self._moving = False
        # All at once: one whose device does not answer must not keep the clients of the others waiting.
        stopping = [threading.Thread(target=r.stop, name="jaxserve-stop", daemon=True) for r in self._replicas]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()

    # ---- requests that move ----------------------------------------------------------------------------------------

    def _place(self, routed: _Routed, *, accepted: bool = False) -> None:
        """Gives the request to a replica that takes it. Raises QueueFull or EngineStopped when there is none."""
        candidates = [number for number, replica in enumerate(self._replicas) if replica.accepting]
        full: QueueFull | None = None
        for number in set(range(len(self._replicas))) - set(candidates):
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
        raise full or EngineStopped(f"no replica takes requests: {reason_of(self.failure)}")

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
        if isinstance(update.error, EngineStopped):  # only the death of a replica gives this error
            if update.last:  # with n > 1 the error comes once for each sequence
                self._move(routed, update.error)
            return
        update = routed.take(update)
        if update.last:
            with self._lock:
                self._forget(routed)
        routed.sink(update)

    def _move(self, routed: _Routed, death: EngineStopped) -> None:
        """Sends a request of a dead replica elsewhere, or tells its client."""
        error: JaxserveError | None = None
        with self._lock:
            dead = routed.replica
            self._report_death(dead)
            if not routed.aborted:
                error = self._try_elsewhere(routed, death)
                if error is None:
                    return
            self._forget(routed, dead)
        request = routed.request
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        left = [index for index, part in enumerate(routed.parts) if not part.finished]
        for index in left:
            last = index == left[-1]
            routed.sink(Update(request.request_id, index, finish_reason=reason, error=error, last=last))

    def _try_elsewhere(self, routed: _Routed, death: EngineStopped) -> JaxserveError | None:
        """None when another replica has taken it, else why none did."""
        name, dead = self._name(routed.replica), routed.replica
        if not self._moving:
            return EngineStopped(f"{name}: {death}")
        when = f"after {routed.num_streamed} tokens had been streamed" if routed.num_streamed else "before it answered"
        if routed.num_deaths >= self._retries:
            return EngineStopped(
                f"{name} has died {when}, after {routed.num_deaths} moves of this request from replicas that died "
                f"without a new token; no more are tried (route.retries): {death}"
            )
        routed.num_deaths += 1
        routed.move()
        try:
            self._place(routed, accepted=True)
        except JaxserveError as error:
            return EngineStopped(f"{name} has died {when}, and no other takes the request: {error}")
        self._balancer.end(dead)
        return None

    def _forget(self, routed: _Routed, replica: int | None = None) -> None:
        if self._routed.get(routed.request.request_id) is routed:  # else it goes on under this id elsewhere
            del self._routed[routed.request.request_id]
        self._balancer.end(routed.replica if replica is None else replica)
        if not self._routed:
            self._idle.notify_all()

    def _name(self, number: int) -> str:
        return f"replica {number} of {len(self._replicas)}"
