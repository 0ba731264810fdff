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
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from jaxserve.api import NO_OPTIONS, FinishReason, Request, RequestOptions, SamplingParams
from jaxserve.engine.base import Load, reason_of
from jaxserve.engine.commands import Abort, Call, Command, Interrupt, Submit, Wake
from jaxserve.engine.inputs import ModelInfo, Prompt, prepare_request
from jaxserve.engine.interpreter import Interpreter
from jaxserve.engine.live import LiveRequests
from jaxserve.engine.lookup import LookupOptions
from jaxserve.engine.outputs import Sink
from jaxserve.engine.stats import EngineStats
from jaxserve.engine.step_log import StepLogWriter, StepMarks
from jaxserve.engine.structured import Grammars, RowMasks
from jaxserve.engine.waiting import Waiting
from jaxserve.errors import EngineStopped, InvalidRequest, JaxserveError
from jaxserve.sched import uses_priority
from jaxserve.sched.base import InFlight, LaterBuckets, MayWait, Runner, Scheduler, TakesLimits
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

_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so seeds of successive requests walk through all of 2**64


class Engine:
    """Runs requests to their end.

    Mutable state belongs to whoever calls `step`: the thread of `start`, or the caller itself when it drives the loop
    by hand (offline use). `submit`, `abort`, `wake`, `call`, `prepare`, `chat_template` and the read-only properties
    may be used from any thread.

    Attributes:
      waits: the last turn found nothing in flight and only work that waits for something outside (`MayWait`).
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
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        step_log: StepLogWriter | None = None,
        interpreter: Interpreter | None = None,
        later: LaterBuckets | None = None,
        on_close: Callable[[], None] | None = None,
        lookup: LookupOptions = LookupOptions(),  # noqa: B008 (frozen)
    ) -> None:
        """`step_log` gets a record of each step, on `clock`; it is closed when the engine stops or dies.

        `interpreter` decides how Python runs while there is work: when it collects garbage, say; None leaves it alone.
        `later` brings step shapes that `runner` does not have yet; it has been started, or will be. `on_close` is
        called once the loop has ended. `lookup`: how drafts of rows with a grammar are found, where the grammar does
        not say them.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.failure: BaseException | None = None
        self._runner = runner
        self._scheduler = scheduler
        self._uses_priority = uses_priority(scheduler)
        self._waiting = Waiting(max_waiting, max_waiting_tokens, clock)
        self._seed = seed
        self._clock = clock
        self._stats = EngineStats(scheduler, runner.limits, clock)
        self._step_log = step_log
        self._interpreter = interpreter
        self._working = False  # the interpreter knows that there is work
        self._later = later
        self._on_close = on_close
        if later is not None:
            self._stats.watch_buckets(lambda: later.counts)
        self._grammars = Grammars(model.vocab_size, model.eos_token_ids)
        self._masks = RowMasks(lookup)
        self._template: ChatTemplate | None = None  # the model's own, compiled by the first chat
        self._numbers = itertools.count()
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._woken_by: list[Command] = []  # what ended a sleep, for the next turn
        self._live = LiveRequests(scheduler, self._waiting, self._stats, model.eos_token_ids)
        # Orders "accepted" against "no more": nothing enters an inbox that has been emptied for the last time.
        self._gate = threading.Lock()
        self._launched: Launched | None = None
        self._committed: Committed | None = None
        self._accepting = True
        self._stop_now = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._turned_s = clock()  # when the loop last came round, or got its first work after having none
        self._thread: threading.Thread | None = None
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
            if not self.accepting:
                raise EngineStopped(f"the engine takes no more requests: {reason_of(self.failure)}")
            self._waiting.enter(request, bounded=not accepted)
            if self._idle.is_set():
                self._turned_s = self._clock()
            self._idle.clear()
            self._inbox.put(Submit(request, sink, self._clock()))

    def check_room(self, num_sequences: int) -> None:
        """Raises QueueFull when so many more sequences would be refused now: before anything is made of them."""
        self._waiting.check_room(num_sequences)

    def abort(self, request: str | Request) -> None:
        """Ends a request; its pages are free at the next step. Unknown ones are ignored (it may just have ended).

        By id, or by the request itself, which leaves another request of the same id alone.
        """
        if isinstance(request, Request):
            self._inbox.put(Abort(request.request_id, request))
        else:
            self._inbox.put(Abort(request, None))

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
        """False once the engine drains, stops or has died."""
        return self._accepting and self.failure is None

    @property
    def stalled_s(self) -> float:
        """Seconds for which the loop's thread has not come round although it has work to do; 0 without either."""
        if self._thread is None or self._idle.is_set() or self.waits:
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
        self.waits = False
        self._set_working(True)
        while (command := self._next_command()) is not None:
            if isinstance(command, Submit):
                if (request := live.enter(command, self.tokenizer)) is not None:
                    try:
                        scheduler.add(request)
                    except JaxserveError as error:
                        live.refuse(request.request_id, error)
            elif isinstance(command, Abort):
                live.abort(command)
            elif isinstance(command, Call):
                command.carry_out(scheduler)
            elif isinstance(command, Interrupt):
                raise command.error
        live.end_late(self._turned_s)
        self._take_buckets()
        begun_s = stats.start_turn()
        plan = None
        if launch:
            self._masks.foresee(scheduler, self._runner.limits, live.by_id)
            plan = self._masks.put(scheduler.schedule(), live.by_id)
        planned_s = stats.note_plan(plan, live.by_id)
        launched = None
        if plan is not None:
            handle = self._runner.dispatch(plan)
            limits = self._runner.limits
            launched = Launched(plan, limits, handle, begun_s, planned_s, stats.add_time("dispatch"))
        previous, self._launched = self._launched, launched
        live.deliver()
        self._end_delivery()
        if previous is not None:
            asked_s = stats.mark_s
            result = previous.handle.result()
            stats.note_result()
            events = scheduler.commit(previous.plan, result)
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
        """Gives the loop a thread of its own."""
        assert self._thread is None, "started twice"
        self._thread = threading.Thread(target=self._run, name="jaxserve-loop", daemon=True)
        self._thread.start()

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for the live ones. True when all ended in time."""
        with self._gate:
            self._accepting = False
        self._inbox.put(Wake())
        return self._idle.wait(timeout_s)

    def stop(self) -> None:
        """Refuses new requests, ends the live ones with ABORT, and ends the thread."""
        with self._gate:
            self._accepting = False
            self._stop_now.set()
        self._inbox.put(Wake())
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        else:
            self._end_all(None, FinishReason.ABORT)
        self._close()

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
            self._end_all(None, FinishReason.ABORT)
        except EngineStopped as error:  # says all there is to say
            logger.error("the engine loop ends: %s", error)
            self.fail(error)
        except BaseException as error:  # the boundary of the loop: whatever it is, no client may hang
            logger.exception("the engine loop died")
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Declares the engine dead: every stream ends with EngineStopped, and nothing is accepted any more.

        For whoever drives the loop, when a step raised: the state of scheduler and device is then unknown.
        """
        with self._gate:
            self.failure = error
        self._stats.note_death()
        told = error if isinstance(error, EngineStopped) else EngineStopped(f"the engine has died: {error!r}")
        self._end_all(told, FinishReason.ERROR)
        self._close()

    def _take_buckets(self) -> None:
        """Between two steps, so that no plan is made for a shape that the runner lacks."""
        if self._later is None or (limits := self._later.take()) is None:
            return
        self._stats.use_limits(limits)
        if isinstance(self._scheduler, TakesLimits):
            self._scheduler.use_limits(limits)

    def _end_delivery(self) -> None:
        """All sinks have their updates: wakes those who wait for them, and counts the step that they came from."""
        stats, begun_s = self._stats, self._stats.mark_s
        self._live.flush()
        if self._launched is not None and self._interpreter is not None:
            self._interpreter.rest()
        done, self._committed = self._committed, None
        if done is None:
            return
        step = done.step
        commit_s = done.committed_s - stats.now_s + stats.note_commit(step.plan, done.num_events) - begun_s
        if self._step_log is not None:
            times = StepMarks(
                step.begun_s, step.planned_s, step.launched_s, done.asked_s, stats.now_s, stats.previous_s, commit_s
            )
            self._step_log.add(step.plan, done.result, times, limits=step.limits)

    def _set_working(self, working: bool) -> None:
        if self._interpreter is None or self._working == working:
            return
        self._working = working
        self._interpreter.begin() if working else self._interpreter.end()

    def _close(self) -> None:
        if self._later is not None:
            self._later.close()
        if self._step_log is not None:
            self._step_log.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def _end_all(self, error: JaxserveError | None, reason: FinishReason) -> None:
        try:
            self._live.deliver()
            self._end_delivery()
        except Exception:  # after a defect of the loop, perhaps the same one; all clients must still hear of the end
            logger.exception("the last tokens could not be delivered")
        self.waits = False
        unheard: list[Submit] = []
        while (command := self._next_command()) is not None:
            if isinstance(command, Submit):
                unheard.append(command)
            elif isinstance(command, Call):
                command.refuse(EngineStopped(f"the engine does nothing more: {reason_of(self.failure)}"))
        self._live.end_all(unheard, error, reason, in_order=self.failure is None)
        self._set_working(False)
        self._idle.set()

    def _next_command(self) -> Command | None:
        if self._woken_by:
            return self._woken_by.pop()
        return None if self._inbox.empty() else self._inbox.get()
