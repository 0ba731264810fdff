"""The loop: drain the inbox, schedule, dispatch, commit the step before.

The order of a step, the inbox and the loop thread are here. A request that the loop has taken is looked after in
`live`; which sequences run is decided by the scheduler, which shapes by the runner.
"""

import concurrent.futures
import contextlib
import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from jaxserve.api import NO_OPTIONS, FinishReason, Request, RequestOptions, SamplingParams
from jaxserve.engine.commands import Abort, Call, Change, Command, Interrupt, Submit, Wake
from jaxserve.engine.inputs import ModelInfo, Prompt, prepare_request
from jaxserve.engine.live import LiveRequests
from jaxserve.engine.load import NOTHING_PENDING, Load, Pending
from jaxserve.engine.lookup import LookupOptions
from jaxserve.engine.observers import EndedStep, StepObserver, StepTimes, WatchedLoop, calls
from jaxserve.engine.outputs import Sink
from jaxserve.engine.refusals import ASLEEP, reason_of, refusal_of
from jaxserve.engine.stats import EngineStats
from jaxserve.engine.structured import Grammars, RowMasks
from jaxserve.engine.waiting import Waiting
from jaxserve.engine.watchdog import Watchdog
from jaxserve.errors import Draining, EngineStopped, InvalidRequest, JaxserveError, StepStalled
from jaxserve.sched import uses_priority
from jaxserve.sched.base import Exports, InFlight, LaterBuckets, MayWait, Operable, Runner, Scheduler, TakesLimits
from jaxserve.sched.plan import Limits, StepPlan, StepResult
from jaxserve.text.base import Tokenizer
from jaxserve.text.chat import ChatTemplate

T = TypeVar("T")


class Launched(NamedTuple):
    """A step that the device has, and when its planning began and ended and its launch ended."""

    plan: StepPlan
    limits: Limits  # that it was made for
    handle: InFlight
    begun_s: float
    planned_s: float
    launched_s: float


class Committed(NamedTuple):
    """A step whose tokens the scheduler has and its clients have not, and when the loop asked for it and had it."""

    step: Launched
    result: StepResult
    num_events: int
    asked_s: float
    committed_s: float


logger = logging.getLogger(__name__)

_LOOK_S = 0.1  # between two looks whether the loop that exports pages lives
_FENCE_S = 1.0  # the loop tells clients in much less

_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so seeds of successive requests walk through all of 2**64


class _Fenced(Exception):
    """The loop has come back from its device after it was fenced: its requests are elsewhere, so it ends."""


class Engine:
    """Runs requests to their end.

    Mutable state belongs to whoever calls `step`: the thread of `start`, or the caller itself when it drives the loop
    by hand (offline use). `submit`, `abort`, `wake`, `call`, `prepare`, `chat_template` and the read-only properties
    may be used from any thread.

    Attributes:
      name: in messages.
      waits: the last turn found nothing in flight and only work that waits for something outside (`MayWait`).
      red: a turn has been over its deadline, and has not ended. Set by the watchdog alone.
      allowed_s: the deadline of the turn, in seconds from its beginning.
      may_be_fenced: False where something else ends what hangs.
      lost: it hangs where it cannot be fenced.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        model: ModelInfo,
        max_waiting: int = 4096,
        max_waiting_tokens: int = 2**22,
        max_picture_bytes: int = 2**30,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        observers: Sequence[StepObserver] = (),
        later: LaterBuckets | None = None,
        on_close: Callable[[], None] | None = None,
        lookup: LookupOptions = LookupOptions(),  # noqa: B008 (frozen)
        may_be_fenced: bool = True,
        name: str = "the engine",
        replaces: "Engine | None" = None,
    ) -> None:
        """`observers` watch each step, on `clock`; they are closed when the engine stops or dies.

        `later` brings step shapes that `runner` does not have yet; it has been started, or will be. `on_close` is
        called once the loop has ended. `lookup`: how drafts of rows with a grammar are found, where the grammar does
        not say them. Where an observer allows steps a time, `start` brings a watchdog, which gives up an engine that
        hangs unless not `may_be_fenced`. `replaces`: an engine of the same model that has died, whose statistics,
        numbers of requests and compiled grammars go on here.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.failure: BaseException | None = None
        self._runner = runner
        self._scheduler = scheduler
        self._uses_priority = uses_priority(scheduler)
        self._waiting = Waiting(max_waiting, max_waiting_tokens, clock, max_picture_bytes)
        self._seed = seed
        self._clock = clock
        if replaces is None:
            self._stats = EngineStats(scheduler, runner.limits, clock)
            self._grammars = Grammars(model.vocab_size, model.eos_token_ids)
            self._numbers = itertools.count()
        else:
            self._stats, self._grammars, self._numbers = replaces._stats, replaces._grammars, replaces._numbers
        self._replaces = replaces is not None  # until it starts, the statistics are those of the other
        self._working = False  # observers know that there is work
        self._later = later
        self._on_close = on_close
        if replaces is None:
            self._watch_buckets()
        self._masks = RowMasks(lookup)
        self._template: ChatTemplate | None = None  # the model's own, compiled by the first chat
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._woken_by: list[Command] = []  # what ended a sleep, for the next turn
        self._live = LiveRequests(scheduler, self._waiting, self._stats, model.eos_token_ids)
        if replaces is not None:
            self._live.note_weights(replaces._live.version)
        # Orders "accepted" against "no more": nothing enters an inbox that has been emptied for the last time.
        self._gate = threading.Lock()
        self._launched: Launched | None = None
        self._committed: Committed | None = None
        # What the scheduler does not have yet, in its order: requests by id, of which the last is live, and changes.
        self._coming: dict[str | Change, Request | Change] = {}
        self._paused_s: float | None = None  # since when it has launched nothing, for that
        self._accepting = True
        self._asleep = False
        self._stop_now = threading.Event()
        self._hands_over = False  # requests that `stop` ends can go on elsewhere
        self._idle = threading.Event()
        self._idle.set()
        self._turned_s = clock()  # when the loop last came round, or got its first work after having none
        self._num_turns = 0
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()  # the thread does nothing more for anybody
        self.name = name
        self.red = self.lost = False
        self.may_be_fenced = may_be_fenced
        self._on_turn, self._on_rest = calls(observers, "begin_turn"), calls(observers, "rest")
        self._on_begin, self._on_end = calls(observers, "begin_work"), calls(observers, "end_work")
        self._on_step, self._closing = calls(observers, "note"), calls(observers, "close")
        self._allowing = calls(observers, "allowed_s")
        self._allow(None)
        for watch in calls(observers, "watch"):
            watch(WatchedLoop(scheduler, self._live, self._waiting, self._stats))
        self._watchdog: Watchdog | None = None
        # Held while clients are told anything. A loop that is `_fenced` tells nobody anything more, so what it computes
        # after its requests have moved is dropped.
        self._telling = threading.Lock()
        self._fenced = False
        self.waits = False
        self._waits_until_s = math.inf  # while it waits

    # ---- any thread ------------------------------------------------------------------------------------------------

    def prepare(self, prompt: Prompt, sampling: SamplingParams, options: RequestOptions = NO_OPTIONS) -> Request:
        """Encodes, checks, compiles a grammar, decodes an echo; takes as long as that takes.

        Raises the errors of `prepare_request`.
        """
        number = next(self._numbers)
        return prepare_request(
            prompt,
            sampling,
            options,
            request_id=f"req-{number}",
            model=self.model,
            tokenizer=self.tokenizer,
            seed=(self._seed + (number + 1) * _SEED_STEP) % 2**63,
            arrival_s=self._clock(),
            uses_priority=self._uses_priority,
            grammars=self._grammars,
        )

    def chat_template(self, source: str | None = None) -> ChatTemplate:
        """The model's own template, compiled once, or one of Jinja `source` with the model's special tokens.

        Raises InvalidRequest without a tokenizer, or when the template does not compile.
        """
        if self.tokenizer is None:
            raise InvalidRequest("a chat needs a tokenizer, and this engine was started without; send token ids")
        if source is not None:
            return ChatTemplate.of(self.tokenizer, source)
        if self._template is None:  # two threads may both compile it here, which only costs the time
            self._template = ChatTemplate.of(self.tokenizer)
        return self._template

    def submit(self, request: Request, sink: Sink, *, accepted: bool = False) -> None:
        """Hands the request to the loop. `sink` gets every update, the last one with `last` set.

        `accepted`: another replica took it before, so that a full queue does not refuse it any more. Raises QueueFull
        or EngineStopped; then nothing was accepted. What the scheduler refuses later arrives at the sink as an update
        with `error`.
        """
        with self._gate:
            if self._asleep:
                raise EngineStopped(ASLEEP)
            if not self.accepting:
                raise refusal_of(self.failure)
            self._waiting.enter(request, bounded=not accepted)
            if self._idle.is_set():
                self._turned_s = self._clock()
            self._idle.clear()
            self._inbox.put(Submit(request, sink, self._clock()))

    def check_room(self, num_sequences: int, owner: str, pending: Pending = NOTHING_PENDING) -> None:
        """Raises QueueFull when so many more sequences of an owner would be refused now: before anything is made of
        them. `pending`: sequences by owner that are about to be submitted, and count as if they waited."""
        self._waiting.check_room(num_sequences, owner, pending)

    def abort(self, *requests: str | Request) -> None:
        """Ends requests; their pages are free at the next step. Unknown ones are ignored (they may just have ended).

        By id, or by the request itself, which leaves another request of the same id alone.
        """
        if request_ids := tuple(each for each in requests if isinstance(each, str)):
            self._inbox.put(Abort(request_ids, None))
        for request in requests:
            if isinstance(request, Request):
                self._inbox.put(Abort((request.request_id,), request))

    def wake(self) -> None:
        """What the scheduler waited for may have come: a loop that sleeps looks again. Any thread."""
        self._inbox.put(Wake())

    def call(self, work: Callable[[Scheduler], T]) -> "concurrent.futures.Future[T]":
        """The loop calls `work` with its scheduler between two steps, in a drain too. Any thread.

        The result has the typed error that `work` raises; any other one ends the loop as well. A result that is
        cancelled in time is not worked for. Raises EngineStopped.
        """
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._gate:
            if self.failure is not None or self._stop_now.is_set():
                raise EngineStopped(f"the engine does nothing more: {reason_of(self.failure)}")
            self._inbox.put(Call(work, done))
        return done

    def change(
        self, work: Callable[[Runner, Scheduler], None], *, after_running: bool, version: str | None = None
    ) -> "concurrent.futures.Future[float]":
        """The loop calls `work` while no step is in flight; see `Change`. Any thread. Raises EngineStopped."""
        done: concurrent.futures.Future[float] = concurrent.futures.Future()
        with self._gate:
            if self.failure is not None or self._stop_now.is_set():
                raise EngineStopped(f"the engine does nothing more: {reason_of(self.failure)}")
            self._inbox.put(Change(work, after_running, version, done))
        return done

    @property
    def asleep(self) -> bool:
        """Its device is given back, or will be when the last request has ended: it takes none until it is woken up."""
        return self._asleep

    @property
    def is_operable(self) -> bool:
        """Its scheduler can forget pages of other weights; see `Operable`."""
        return isinstance(self._scheduler, Operable)

    def set_asleep(self, asleep: bool) -> None:
        """For `LiveWeights`, which changes the device as well. Any thread."""
        with self._gate:
            self._asleep = asleep

    def interrupt(self, error: BaseException) -> None:
        """Ends the loop with `error` at its next turn, asleep or not, as if its device had raised it. Any thread."""
        self._inbox.put(Interrupt(error))

    def watch_deliveries(self, tell: Callable[[], None]) -> None:
        """`tell` is called on the loop's thread once in each turn, after all sinks, and returns at once.

        So whoever collects updates can wake its readers once: a wake-up for each token costs more than the token.
        """
        with self._gate:
            self._live.on_delivered += (tell,)

    def unwatch_deliveries(self, tell: Callable[[], None]) -> None:
        """Ends what `watch_deliveries` began; the loop may be calling `tell` for the last time."""
        with self._gate:
            self._live.on_delivered = tuple(t for t in self._live.on_delivered if t != tell)

    @property
    def stats(self) -> tuple[EngineStats, ...]:
        """What the loop did, for observers."""
        return (self._stats,)

    @property
    def replicas(self) -> tuple["Engine", ...]:
        """Itself, see `AnyEngine.replicas`."""
        return (self,)

    @property
    def num_unstarted(self) -> int:
        """Requests that have no token yet, those in the inbox included. Exact between steps."""
        return self._waiting.num_requests

    @property
    def num_live(self) -> int:
        """Requests that the loop has taken and that have not ended."""
        return len(self._live.by_id)

    @property
    def load(self) -> Load:
        """See `Load`."""
        return self._waiting.load(self.num_live)

    @property
    def accepting(self) -> bool:
        """False once the engine drains, stops or has died, and while it sleeps."""
        return self._accepting and not self._asleep and self.failure is None

    @property
    def ready(self) -> bool:
        """Takes requests, and its steps advance or it has none."""
        return self.accepting and not self.red

    @property
    def has_deadlines(self) -> bool:
        """A watchdog has something to look at."""
        return bool(self._allowing)

    @property
    def turn(self) -> int | None:
        """The number of the turn that the loop's thread is in; None while it sleeps, and without a thread."""
        return None if self._thread is None or self._idle.is_set() or self.waits else self._num_turns

    @property
    def stalled_s(self) -> float:
        """Seconds for which the loop's thread has not come round although it has work to do; 0 without either."""
        if self.turn is None:
            return 0.0
        return max(0.0, self._clock() - self._turned_s)

    # ---- the loop --------------------------------------------------------------------------------------------------

    def step(self, *, launch: bool = True) -> bool:
        """One turn: launch the next step, then finish the one before. False when there is nothing to do.

        `launch` False: only finishes what is in flight. Never sleeps: whoever drives the loop by hand calls `pause`
        after a turn that was True.

        The tokens of a step reach their clients once the step after the next is launched, or at once when there is
        none to launch: a device that waits for a plan costs every client more than a token that waits for a launch.
        """
        live, scheduler, stats = self._live, self._scheduler, self._stats
        self._turned_s = self._clock()
        self._num_turns += 1
        self.waits = False
        self._set_working(True)
        self._take_commands()
        for begin_turn in self._on_turn:
            begin_turn(self._turned_s)
        while self._coming:
            key, first = next(iter(self._coming.items()))
            if isinstance(first, Change):
                if not self._make_change(first):
                    launch = launch and first.after_running  # else it waits for the step in flight, and no other
                    break
            else:
                with self._telling:
                    self._check_fence()
                    try:
                        if key in live.by_id:  # it may have been aborted
                            scheduler.add(first)
                    except JaxserveError as error:
                        live.refuse(first.request_id, error)
                    del self._coming[key]
        self._take_buckets()
        begun_s = stats.start_turn()
        plan = None
        if launch:
            self._masks.foresee(scheduler, self._runner.limits, live.by_id)
            plan = self._masks.put(scheduler.schedule(), live.by_id)
        previous, launched = self._launched, None
        self._allow(plan)
        self._check_fence()
        planned_s = stats.note_plan(plan, live.by_id)
        if plan is not None:
            handle = self._runner.dispatch(plan)
            self._check_fence()
            limits = self._runner.limits
            launched_s = stats.add_time("dispatch")
            launched = Launched(plan, limits, handle, begun_s, planned_s, launched_s)
        with self._telling:
            self._check_fence()
            self._launched = launched
            live.deliver()
            self._end_delivery()
        if previous is not None:
            asked_s = stats.mark_s
            result = previous.handle.result()
            self._check_fence()
            stats.note_result()
            events = scheduler.commit(previous.plan, result)
            with self._telling:
                self._check_fence()
                live.note_result(previous.plan, result)
                live.take(events)
                self._committed = Committed(previous, result, len(events), asked_s, stats.add_time("commit"))
                if launched is None:
                    live.deliver()
                    self._end_delivery()
        elif launched is None:
            self.waits = launch and scheduler.has_work()
            if self.waits:
                waits = isinstance(scheduler, MayWait) and scheduler.waits()
                assert isinstance(scheduler, MayWait) and waits, (
                    "nothing is in flight, work is left, and the scheduler neither plans nor waits"
                )
                self._waits_until_s = scheduler.waits_until_s()
            self._set_working(False)
            return self.waits
        return True

    def _take_commands(self) -> None:
        live, scheduler = self._live, self._scheduler
        while True:
            with self._telling:
                self._check_fence()
                command = self._next_command()
                if isinstance(command, Submit):
                    if (request := live.enter(command, self.tokenizer)) is not None:
                        self._coming.pop(request.request_id, None)
                        self._coming[request.request_id] = request
                elif isinstance(command, Abort):
                    live.abort(command)
                elif command is None:
                    live.end_late(self._turned_s)
                    return
            if isinstance(command, Call):
                command.carry_out(scheduler)
            elif isinstance(command, Change):
                self._coming[command] = command
            elif isinstance(command, Interrupt):
                raise command.error

    def _check_fence(self) -> None:
        if self._fenced:
            raise _Fenced

    def _allow(self, plan: StepPlan | None) -> None:
        """Sets the deadline of this turn, in which a step is launched and the one before is waited for."""
        running = None if self._launched is None else self._launched.plan
        self.allowed_s = min((allowed_s(plan, running) for allowed_s in self._allowing), default=math.inf)

    def pause(self, most_s: float = math.inf) -> None:
        """Sleeps if all work `waits`, until somebody wants something, a time or `most_s` seconds have passed.

        The time is the first deadline of a request, or the one until which the scheduler waits.

        For whoever calls `step`.
        """
        if not self.waits:
            return
        until_s = min(self._live.next_deadline_s, self._waits_until_s)
        left_s = min(most_s, until_s - self._clock(), threading.TIMEOUT_MAX)
        with contextlib.suppress(queue.Empty):  # the next turn ends what is late, or plans without what did not come
            self._woken_by.append(self._inbox.get(timeout=max(0.0, left_s)))

    def run_until_idle(self) -> None:
        """Drives the loop by hand until every request has ended (offline use, tests)."""
        assert self._thread is None, "the loop already has a thread"
        try:
            while self.step():
                self.pause()
        except BaseException as error:
            self.fail(error)
            raise

    def start(self) -> None:
        """Gives the loop a thread of its own, and a watchdog if its steps have deadlines."""
        self.start_loop()
        if self.has_deadlines:
            self._watchdog = Watchdog(lambda: (self,), clock=self._clock)
            self._watchdog.start()

    def start_loop(self) -> None:
        """Gives the loop a thread of its own. The caller has the watchdog, if there is one."""
        assert self._thread is None, "started twice"
        if self._replaces:
            self._stats.go_on(self._scheduler, self._runner.limits)
            self._watch_buckets()
        self._thread = threading.Thread(target=self._run, name="jaxserve-loop", daemon=True)
        self._thread.start()

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for the live ones. True when all ended in time."""
        with self._gate:
            self._accepting = False
        self._inbox.put(Wake())
        return self._idle.wait(timeout_s)

    def export(self, timeout_s: float) -> None:
        """Brings the pages that the device still has to the store, if there is one, for `timeout_s` seconds at most.

        After a `drain`, with a thread of its own: requests that are left stand still from now on, until `stop`.
        """
        if not isinstance(self._scheduler, Exports):
            return
        left, ended = [0], threading.Event()

        def note(num_left: int) -> None:
            left[0] = num_left
            ended.set()

        def begin(scheduler: Scheduler) -> None:
            assert isinstance(scheduler, Exports)
            scheduler.export(note)

        def end(scheduler: Scheduler) -> None:
            assert isinstance(scheduler, Exports)
            scheduler.end_export()

        begun_s = time.monotonic()
        with contextlib.suppress(EngineStopped):  # it has died, or is being stopped
            self.call(begin)
            while not ended.wait(_LOOK_S) and self.failure is None and not self._stop_now.is_set():
                if time.monotonic() - begun_s > timeout_s:
                    concurrent.futures.wait([self.call(end)], 10 * _LOOK_S)
                    break
        if left[0]:
            logger.warning("%d pages are not in the store after %.1f s, and will be computed again", left[0], timeout_s)

    def stop(self, *, hand_over: bool = False) -> None:
        """Refuses new requests, ends the live ones, and ends the thread.

        They end with ABORT. With `hand_over` they end with the error Draining: whoever reads them sends them to another
        engine, where they go on behind what has been read.
        """
        with self._gate:
            self._accepting = False
            self._hands_over = hand_over
            self._stop_now.set()
        self._inbox.put(Wake())
        if self._thread is not None:
            self._ended.wait()
            if not self._fenced:  # a thread that hangs is left to its device
                self._thread.join()
            self._thread = None
        else:
            self._end_live()
        if self._watchdog is not None:
            self._watchdog.stop()
        self.close()

    def _run(self) -> None:
        try:
            while not self._stop_now.is_set():
                if self.step():
                    # `stop` raises its flag before it wakes us, and the wake may have been taken by the step above.
                    if self.waits and not self._stop_now.is_set():
                        self.pause()
                    continue
                with self._gate:
                    if self._inbox.empty():
                        self._idle.set()
                if not self._stop_now.is_set():  # as above
                    self._woken_by.append(self._inbox.get())  # sleeps until somebody wants something
            self.step(launch=False)
            with self._telling:
                self._check_fence()
                self._end_live()
        except _Fenced:
            logger.warning("%s: the step that hung has ended; what it computed is dropped", self.name)
            self.fail(EngineStopped("the engine was given up"))
        except EngineStopped as error:  # says all there is to say
            logger.error("the engine loop ends: %s", error)
            self.fail(error)
        except BaseException as error:  # the boundary of the loop: whatever it is, no client may hang
            if not self._fenced:
                logger.exception("the engine loop died")
            self.fail(error)
        finally:
            self._ended.set()

    def fail(self, error: BaseException) -> None:
        """Declares the engine dead: every stream ends with EngineStopped, and nothing is accepted any more.

        For whoever drives the loop, when a step raised: the state of scheduler and device is then unknown. Once it is
        fenced, only a request that the loop had taken out of the inbox before is left to be ended.
        """
        with self._telling:
            self._die(error)
        self.close()

    def fence(self, turn: int, error: StepStalled) -> bool:
        """Declares the engine dead while its thread hangs in `turn`: as `fail`, from another thread.

        Returns False when the turn has ended after all. When not even the lock of the loop can be had, since it hangs
        where it tells its clients, the engine is `lost`: only the end of the process frees what waits for it. The
        memory and the threads of the engine stay until `close`.
        """
        if not self._telling.acquire(timeout=_FENCE_S):
            self.lost = self._fenced = True
            self.failure = error
            self._stats.note_death()
            self._ended.set()
            return True
        try:
            if self._num_turns != turn or self.failure is not None:
                return False
            self._fenced = True
            self._stats.num_fences += 1
            self._die(error)
        finally:
            self._telling.release()
        self._ended.set()
        self._inbox.put(Wake())  # a thread that has come back and found nothing to do sees that it is to end
        return True

    def _die(self, error: BaseException) -> None:
        if self.failure is None:
            with self._gate:
                self.failure = error
            self.red = False
            self._stats.note_death()
        failure = self.failure
        told = failure if isinstance(failure, EngineStopped) else EngineStopped(f"the engine has died: {failure!r}")
        self._end_all(told, FinishReason.ERROR)

    def _watch_buckets(self) -> None:
        if (later := self._later) is not None:
            self._stats.watch_buckets(lambda: later.counts)

    def _make_change(self, change: Change) -> bool:
        """Makes the first change if its time has come. False: it waits for what runs, or for the step in flight."""
        if change.after_running and self._scheduler.has_work():
            return False
        if self._paused_s is None:
            self._paused_s = self._clock()
        if self._launched is not None:
            return False
        del self._coming[change]
        self.allowed_s = math.inf  # weights of any size go to or from the host as long as it takes
        made = change.done.set_running_or_notify_cancel()
        if made:
            try:
                change.work(self._runner, self._scheduler)
            except JaxserveError as error:
                made = False
                change.done.set_exception(error)
            except BaseException as error:
                change.done.set_exception(error)
                raise
        self._turned_s = self._clock()
        with self._telling:
            self._check_fence()
            self._num_turns += 1  # else its time would count for the step that this turn may launch
            if made and change.version is not None:
                self._live.note_weights(change.version)
        if made:
            change.done.set_result(self._turned_s - self._paused_s)
        self._paused_s = None
        return True

    def _take_buckets(self) -> None:
        """Between two steps, so that no plan is made for a shape that the runner lacks.

        Not while it sleeps: a runner may time a shape before it takes it, for which it needs its weights.
        """
        if self._later is None or self._asleep or (limits := self._later.take()) is None:
            return
        self._stats.use_limits(limits)
        if isinstance(self._scheduler, TakesLimits):
            self._scheduler.use_limits(limits)

    def _end_delivery(self) -> None:
        """All sinks have their updates: wakes those who wait for them, and counts the step that they came from."""
        stats, begun_s = self._stats, self._stats.mark_s
        self._live.flush()
        if self._launched is not None:
            for rest in self._on_rest:
                rest()
        done, self._committed = self._committed, None
        if done is None:
            return
        step = done.step
        commit_s = done.committed_s - stats.now_s + stats.note_commit(step.plan, done.num_events) - begun_s
        if self._on_step:
            times = StepTimes(
                step.begun_s, step.planned_s, step.launched_s, done.asked_s, stats.now_s, stats.previous_s, commit_s
            )
            ended = EndedStep(step.plan, step.limits, done.result, times)
            for note in self._on_step:
                note(ended)

    def _set_working(self, working: bool) -> None:
        if self._working == working:
            return
        self._working = working
        if self._later is not None:
            self._later.note_work(working)
        for tell in self._on_begin if working else self._on_end:
            tell()

    def close(self) -> None:
        """Ends what works beside the loop, which has ended or was fenced. May be called again."""
        if self._later is not None:
            self._later.close()
        for close in self._closing:
            close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def _end_live(self) -> None:
        if self._hands_over:
            text = "the engine was shut down before the end of the request, which can go on at another one"
            self._end_all(Draining(text), FinishReason.ERROR)
        else:
            self._end_all(None, FinishReason.ABORT)

    def _end_all(self, error: JaxserveError | None, reason: FinishReason) -> None:
        try:
            if not self._fenced:  # else scheduler and device may be at work: other engines compute these tokens again
                self._live.deliver()
                self._end_delivery()
        except Exception:  # after a defect of the loop, perhaps the same one; all clients must still hear of the end
            logger.exception("the last tokens could not be delivered")
        self.waits = False
        unheard: list[Submit] = []
        for change in self._coming.values():
            if isinstance(change, Change):
                change.refuse(EngineStopped(f"the engine does nothing more: {reason_of(self.failure)}"))
        self._coming.clear()
        while (command := self._next_command()) is not None:
            if isinstance(command, Submit):
                unheard.append(command)
            elif isinstance(command, Call | Change):
                command.refuse(EngineStopped(f"the engine does nothing more: {reason_of(self.failure)}"))
        self._live.end_all(unheard, error, reason, in_order=self.failure is None)
        self._set_working(False)
        self._idle.set()

    def _next_command(self) -> Command | None:
        if self._woken_by:
            return self._woken_by.pop()
        if self._inbox.empty():  # nearly always, and much cheaper than an exception
            return None
        with contextlib.suppress(queue.Empty):  # a loop that was fenced, and the thread that fences, look both
            return self._inbox.get_nowait()
        return None
