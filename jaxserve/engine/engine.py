"""The loop: drain the inbox, schedule, dispatch, commit the step before.

Owns the order of a step, the live requests and the loop thread. Refuses policy (the scheduler's), shapes (the
runner's) and protocols (serve's).
"""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from jaxserve.api import FinishReason, Request, SamplingParams, TokenEvent
from jaxserve.engine.inputs import ModelInfo, Prompt, check_echo, prepare_request
from jaxserve.engine.outputs import LiveRequest, Sink
from jaxserve.errors import EngineStopped, InvalidRequest, JaxserveError, QueueFull
from jaxserve.sched import uses_priority
from jaxserve.sched.base import InFlight, Runner, Scheduler
from jaxserve.sched.plan import StepPlan
from jaxserve.text.base import Tokenizer
from jaxserve.text.chat import ChatTemplate

logger = logging.getLogger(__name__)

_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so seeds of successive requests walk through all of 2**64


class _Submit(NamedTuple):
    request: Request
    sink: Sink
    echo: bool


class _Abort(NamedTuple):
    request_id: str
    request: Request | None  # None: whichever request has the id


class _Wake(NamedTuple):
    """Makes the loop look at its flags."""


class _Interrupt(NamedTuple):
    error: BaseException


class _Launched(NamedTuple):
    plan: StepPlan
    handle: InFlight


class Engine:
    """Runs requests to their end.

    Mutable state belongs to whoever calls `step`: the thread of `start`, or the caller itself when it drives the loop
    by hand (offline use). `submit`, `abort`, `prepare`, `chat_template` and the read-only properties may be used from
    any thread.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        model: ModelInfo,
        max_waiting: int = 4096,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.failure: BaseException | None = None
        self._runner = runner
        self._scheduler = scheduler
        self._uses_priority = uses_priority(scheduler)
        self._max_waiting = max_waiting
        self._seed = seed
        self._clock = clock
        self._template: ChatTemplate | None = None  # the model's own, compiled by the first chat
        self._numbers = itertools.count()
        self._inbox: queue.SimpleQueue[_Submit | _Abort | _Wake | _Interrupt] = queue.SimpleQueue()
        self._live: dict[str, LiveRequest] = {}
        self._num_unstarted = 0
        self._num_submitted = 0  # in the inbox, not yet taken
        # Orders "accepted" against "no more": nothing enters an inbox that has been emptied for the last time.
        self._gate = threading.Lock()
        self._launched: _Launched | None = None
        self._accepting = True
        self._stop_now = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._turned_s = clock()  # when the loop last came round, or got its first work after having none
        self._thread: threading.Thread | None = None

    # ---- any thread ------------------------------------------------------------------------------------------------

    def prepare(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        add_special_tokens: bool = True,
    ) -> Request:
        """Encodes and checks; takes as long as encoding takes. Raises the errors of `prepare_request`."""
        number = next(self._numbers)
        return prepare_request(
            prompt,
            sampling,
            request_id=request_id if request_id is not None else f"req-{number}",
            model=self.model,
            tokenizer=self.tokenizer,
            seed=(self._seed + (number + 1) * _SEED_STEP) % 2**63,
            arrival_s=self._clock(),
            priority=priority,
            uses_priority=self._uses_priority,
            cache_salt=cache_salt,
            tenant=tenant,
            add_special_tokens=add_special_tokens,
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

    def submit(self, request: Request, sink: Sink, *, echo: bool = False, accepted: bool = False) -> None:
        """Hands the request to the loop. `sink` gets every update, the last one with `last` set.

        `accepted`: another replica took it before, so that a full queue does not refuse it any more. Raises QueueFull,
        EngineStopped, or UnsupportedOption for an `echo` of what is no text; then nothing was accepted. What the
        scheduler refuses later arrives at the sink as an update with `error`.
        """
        if echo:
            check_echo(request, self.tokenizer)
        with self._gate:
            if not self.accepting:
                raise EngineStopped(f"the engine takes no more requests: {self.failure or 'it is shutting down'}")
            waiting = self.num_unstarted
            if waiting >= self._max_waiting and not accepted:
                raise QueueFull(
                    f"{waiting} requests are waiting; sched.max_waiting is {self._max_waiting}; try again later"
                )
            self._num_submitted += 1
            if self._idle.is_set():
                self._turned_s = self._clock()
            self._idle.clear()
            self._inbox.put(_Submit(request, sink, echo))

    def abort(self, request: str | Request) -> None:
        """Ends a request; its pages are free at the next step. Unknown ones are ignored (it may just have ended).

        By id, or by the request itself, which leaves another request of the same id alone.
        """
        if isinstance(request, Request):
            self._inbox.put(_Abort(request.request_id, request))
        else:
            self._inbox.put(_Abort(request, None))

    def interrupt(self, error: BaseException) -> None:
        """Ends the loop with `error` at its next turn, asleep or not, as if its device had raised it. Any thread."""
        self._inbox.put(_Interrupt(error))

    @property
    def num_unstarted(self) -> int:
        """Requests that have no token yet, those in the inbox included. Exact between steps."""
        return self._num_unstarted + self._num_submitted

    @property
    def num_live(self) -> int:
        """Requests that the loop has taken and that have not ended."""
        return len(self._live)

    @property
    def accepting(self) -> bool:
        """False once the engine drains, stops or has died."""
        return self._accepting and self.failure is None

    @property
    def stalled_s(self) -> float:
        """Seconds for which the loop's thread has not come round although it has work; 0 without either."""
        if self._thread is None or self._idle.is_set():
            return 0.0
        return max(0.0, self._clock() - self._turned_s)

    # ---- the loop --------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One turn: launch the next step, then finish the one before. False when there is nothing to do."""
        self._turned_s = self._clock()
        self._drain_inbox()
        plan = self._scheduler.schedule()
        launched = _Launched(plan, self._runner.dispatch(plan)) if plan is not None else None
        previous, self._launched = self._launched, launched
        if previous is not None:
            self._emit(self._scheduler.commit(previous.plan, previous.handle.result()))
        elif launched is None:
            assert not self._scheduler.has_work(), "nothing is in flight, work is left, and the scheduler plans nothing"
            return False
        return True

    def run_until_idle(self) -> None:
        """Drives the loop by hand until every request has ended (offline use, tests)."""
        assert self._thread is None, "the loop already has a thread"
        try:
            while self.step():
                pass
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
        self._inbox.put(_Wake())
        return self._idle.wait(timeout_s)

    def stop(self) -> None:
        """Refuses new requests, ends the live ones with ABORT, and ends the thread."""
        with self._gate:
            self._accepting = False
        self._stop_now.set()
        self._inbox.put(_Wake())
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        else:
            self._end_all(None, FinishReason.ABORT)

    def _run(self) -> None:
        try:
            while not self._stop_now.is_set():
                if self.step():
                    continue
                with self._gate:
                    if self._inbox.empty():
                        self._idle.set()
                # `stop` raises its flag before it wakes us, and the wake may have been taken by the step above.
                if not self._stop_now.is_set():
                    self._take(self._inbox.get())  # sleeps until somebody wants something
            self._finish_flight()
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
        told = error if isinstance(error, EngineStopped) else EngineStopped(f"the engine has died: {error!r}")
        self._end_all(told, FinishReason.ERROR)

    def _finish_flight(self) -> None:
        previous, self._launched = self._launched, None
        if previous is not None:
            self._emit(self._scheduler.commit(previous.plan, previous.handle.result()))

    def _end_all(self, error: JaxserveError | None, reason: FinishReason) -> None:
        ending = list(self._live.items())
        while not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, _Submit):
                ending.append((command.request.request_id, self._make_silent(command)))
        for request_id, live in ending:
            if self.failure is None:
                self._scheduler.abort(request_id)
            _tell(live.fail, error, reason)
        self._live.clear()
        self._num_unstarted = self._num_submitted = 0
        self._idle.set()

    def _drain_inbox(self) -> None:
        while not self._inbox.empty():
            self._take(self._inbox.get())

    def _take(self, command: "_Submit | _Abort | _Wake | _Interrupt") -> None:
        if isinstance(command, _Submit):
            self._add(command)
        elif isinstance(command, _Interrupt):
            raise command.error
        elif isinstance(command, _Abort):
            live = self._live.get(command.request_id)
            if live is not None and command.request in (None, live.request):
                del self._live[command.request_id]
                self._scheduler.abort(command.request_id)
                self._num_unstarted -= not live.started
                _tell(live.fail, None, FinishReason.ABORT)

    def _make_live(self, command: _Submit) -> LiveRequest:
        return LiveRequest(command.request, command.sink, self.tokenizer, self.model.eos_token_ids, command.echo)

    def _make_silent(self, command: _Submit) -> LiveRequest:
        """One that will produce no text: all it can do is tell its client that it ended."""
        return LiveRequest(command.request, command.sink, None, self.model.eos_token_ids, False)

    def _add(self, command: _Submit) -> None:
        with self._gate:
            self._num_submitted -= 1
        request_id = command.request.request_id
        try:
            live = self._make_live(command)
        except Exception as error:  # a defect of the tokenizer costs the request that met it
            logger.exception("request %s failed", request_id)
            reason = JaxserveError(f"the prompt could not be decoded: {error!r}")
            _tell(self._make_silent(command).fail, reason, FinishReason.ERROR)
            return
        if request_id in self._live:
            _tell(
                live.fail,
                InvalidRequest(f"a request with id {request_id!r} is live already; choose another"),
                FinishReason.ERROR,
            )
            return
        try:
            self._scheduler.add(command.request)
        except JaxserveError as error:
            _tell(live.fail, error, FinishReason.ERROR)
            return
        self._live[request_id] = live
        self._num_unstarted += 1

    def _emit(self, events: list[TokenEvent]) -> None:
        for event in events:
            live = self._live.get(event.request_id)
            if live is None:
                continue
            if not live.started:
                live.started = True
                self._num_unstarted -= 1
            try:
                update = live.push(event)
                if update is None:
                    continue
                if update.finish_reason is not None and event.finish_reason is None:
                    self._scheduler.abort(event.request_id, event.index)
                live.sink(update)
            except Exception as error:  # a defect in one request's text or sink must not end the others
                logger.exception("request %s failed", event.request_id)
                self._scheduler.abort(event.request_id)
                _tell(live.fail, JaxserveError(f"the output could not be processed: {error!r}"), FinishReason.ERROR)
            if live.done:
                del self._live[event.request_id]


def _tell(
    fail: Callable[[JaxserveError | None, FinishReason], None], error: JaxserveError | None, reason: FinishReason
):
    """Reports an end to a client whose sink may itself be broken (a closed event loop, say)."""
    try:
        fail(error, reason)
    except Exception:
        logger.exception("a client could not be told that its request ended")
