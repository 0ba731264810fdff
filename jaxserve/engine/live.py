"""The requests that the loop has taken and that have not ended.

Each request is here from its acceptance to its last update: its text, its deadline, its place among waiting requests.
When a request ends by anything but a token (a stop string, an abort, a deadline), the scheduler is told from here.

The tokens of a step come in twice. `take` has them before the next step is planned, and reads at once only what may
change that plan: requests with stop strings, which may end, and with grammars, whose next mask follows. `deliver` has
the rest, when the device is busy with the next step: text and streams are most of what a step costs the host.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Sequence

from jaxserve.api import FinishReason, Request, TokenEvent, shown_id
from jaxserve.engine.commands import Abort, Submit
from jaxserve.engine.outputs import LiveRequest, Update
from jaxserve.engine.stats import EngineStats, RequestTimes
from jaxserve.engine.waiting import Waiting, deadline_error
from jaxserve.errors import InvalidRequest, JaxserveError
from jaxserve.sched.base import Scheduler, TakesEnds
from jaxserve.sched.plan import StepPlan, StepResult
from jaxserve.text.base import Tokenizer
from jaxserve.text.detokenizer import PieceTexts

logger = logging.getLogger(__name__)


class LiveRequests:
    """Mutated by the loop thread alone.

    Attributes:
      by_id: all of them.
      next_deadline_s: none of them has an earlier one.
      version: of the weights; empty: those of the start.
      on_delivered: called when all updates of a turn have been given to their sinks. Replaced by any thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        waiting: Waiting,
        stats: EngineStats,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.by_id: dict[str, LiveRequest] = {}
        self.next_deadline_s = math.inf
        self.on_delivered: tuple[Callable[[], None], ...] = ()
        self._read: list[tuple[LiveRequest, Update]] = []  # updates that wait for `deliver`
        self._unread: list[TokenEvent] = []
        self._num_affecting_plans = 0  # live requests whose tokens must be read before the next plan
        self._pieces: PieceTexts | None = None  # of the one tokenizer
        self._owners: dict[int, tuple[str, int]] = {}  # request and sequence of each row, in the step that came last
        self._scheduler = scheduler
        self._finish = scheduler.finish if isinstance(scheduler, TakesEnds) else scheduler.abort
        self._waiting = waiting
        self._stats = stats
        self._eos_token_ids = eos_token_ids
        self.version = ""

    def enter(self, command: Submit, tokenizer: Tokenizer | None) -> Request | None:
        """Takes a request. Returns it for the scheduler, or None when it has ended: its client has been told why.

        Called before the scheduler gets it: should that break, this client is told, too, that the loop has died.
        """
        self._waiting.take()
        request_id = command.request.request_id
        known: list[Update] = []
        try:
            live = self._make(command, tokenizer)
            if command.request.resume is not None:
                known = live.resume()
        except InvalidRequest as error:
            self._decline(command, error)
            return None
        except Exception as error:  # a defect of the tokenizer costs the request that met it
            logger.exception("request %r failed", shown_id(request_id))
            self._decline(command, JaxserveError(f"the prompt could not be decoded: {error!r}"))
            return None
        if request_id in self.by_id:
            if command.request.resume is None:
                error = InvalidRequest(f"a request with id {shown_id(request_id)!r} is live already; choose another")
                self._decline(command, error)
                return None
            self._end(self.by_id[request_id], None, FinishReason.ABORT)  # itself, on a connection that has been lost
        if self.version:
            live.note_weights(self.version)
        self.by_id[request_id] = live
        self._num_affecting_plans += live.affects_plans
        self.next_deadline_s = min(self.next_deadline_s, command.request.deadline_s)
        return command.request if command.request.resume is None else self._begin_resumed(live, known)

    def _begin_resumed(self, live: LiveRequest, known: Sequence[Update]) -> Request | None:
        """Tells what the client lacks of the known tokens. Returns the request without sequences that end with them."""
        request = live.request
        assert request.resume is not None, request
        self._stats.note_resumed(request.resume)
        num_ended = len(request.open_indices) - live.num_waiting
        if num_ended:
            self._waiting.leave(request, num_ended, first=live.done)
        if live.done:
            self._forget(live)
        try:
            for update in known:
                live.sink(update)
        except Exception as error:  # a defect of one sink must not end the others
            self._break(live, error)
            return None
        if live.done:
            return None
        ended = {update.index for update in known if update.finish_reason is not None}
        sequences = tuple(
            one._replace(finished=one.finished or index in ended) for index, one in enumerate(request.resume.sequences)
        )
        return dataclasses.replace(request, resume=dataclasses.replace(request.resume, sequences=sequences))

    def refuse(self, request_id: str, error: JaxserveError) -> None:
        """The scheduler does not take a request that has been entered: tells its client why."""
        live = self.by_id[request_id]
        self._remove(live)
        live.fail(error)

    def _decline(self, command: Submit, error: JaxserveError) -> None:
        self._waiting.leave(command.request, len(command.request.open_indices), first=True)
        self._make_silent(command).fail(error)

    def note_result(self, plan: StepPlan, result: StepResult) -> None:
        """The result of a step is here, and `take` will have its tokens: counts its drafts, for each request."""
        for setup in plan.setups:
            self._owners[setup.row] = (setup.request_id, setup.index)
        if result.counts is not None:
            self._stats.note_drawn(result.counts)
        if result.drafts is None:
            return
        self._stats.note_drafts(plan, result.drafts)
        for row, rounds in zip(plan.sampled_rows, result.drafts, strict=True):
            request_id, index = self._owners[row]
            live = self.by_id.get(request_id)
            if live is not None:
                live.add_drafts(index, rounds)

    def note_weights(self, version: str) -> None:
        """All tokens from now on are drawn by these weights; those before have been delivered."""
        assert not self._read and not self._unread
        self.version = version
        for live in self.by_id.values():
            live.note_weights(version)

    def take(self, events: list[TokenEvent]) -> None:
        """Takes the tokens of a step; `deliver` must have handed out those of the step before."""
        assert not self._read and not self._unread, "tokens of the step before have not been delivered"
        by_id = self.by_id
        if not self._num_affecting_plans:
            self._unread = events
            return
        for event in events:
            live = by_id.get(event.request_id)
            if live is None or not live.affects_plans:
                self._unread.append(event)
            elif (update := self._push(live, event)) is not None:
                self._read.append((live, update))

    def deliver(self) -> None:
        """Turns the tokens that were taken into updates, and gives all updates to their sinks."""
        for live, update in self._updates():
            try:
                live.sink(update)
            except Exception as error:  # a defect of one sink must not end the others
                self._break(live, error)

    def _updates(self) -> Iterator[tuple[LiveRequest, Update]]:
        """Each is made when those before it have been given away: a sink that breaks ends its request."""
        read, self._read = self._read, []
        yield from read
        unread, self._unread = self._unread, []
        by_id = self.by_id
        for event in unread:
            live = by_id.get(event.request_id)
            if live is None:
                self._stats.dropped += 1
            elif (update := self._push(live, event)) is not None:
                yield live, update

    def flush(self) -> None:
        """Tells whoever collects updates that those of this turn are complete."""
        for tell in self.on_delivered:
            try:
                tell()
            except Exception:  # what collects updates must not end what makes them
                logger.exception("a collector of updates failed")

    def _push(self, live: LiveRequest, event: TokenEvent) -> Update | None:
        """The update of a token; None when there is none to be told."""
        if event.prompt is not None:  # the first token of this sequence
            self._waiting.begin(live.request, first=not live.started)
            live.started = True
            live.num_waiting -= 1
        try:
            update = live.push(event)
        except Exception as error:  # a defect in one request's text must not end the others
            self._break(live, error)
            return None
        if update is None:
            self._stats.dropped += 1
            return None
        if update.finish_reason is not None:
            if event.finish_reason is None:  # the scheduler does not know yet
                end = self._finish if update.finish_reason is FinishReason.STOP else self._scheduler.abort
                end(event.request_id, event.index)
            if live.done:
                self._remove(live)
        return update

    def _break(self, live: LiveRequest, error: Exception) -> None:
        request_id = live.request.request_id
        logger.error("request %r failed", shown_id(request_id), exc_info=error)
        if self.by_id.get(request_id) is live:  # its last update may be what failed, and its id another's by now
            self._scheduler.abort(request_id)
            self._remove(live)
        live.fail(JaxserveError(f"the output could not be processed: {error!r}"))

    def _remove(self, live: LiveRequest) -> None:
        self._forget(live)
        if live.num_waiting:
            self._waiting.leave(live.request, live.num_waiting, first=not live.started)

    def _forget(self, live: LiveRequest) -> None:
        del self.by_id[live.request.request_id]
        self._num_affecting_plans -= live.affects_plans

    def abort(self, command: Abort) -> None:
        """Ends requests, those that are still there."""
        for request_id in command.request_ids:
            live = self.by_id.get(request_id)
            if live is not None and command.request in (None, live.request):
                self._end(live, None, FinishReason.ABORT)

    def longest_wait_s(self, now_s: float) -> float:
        """Seconds since the submission of the first request that has no token yet; 0 when none waits."""
        first = next((live for live in self.by_id.values() if not live.started), None)
        return 0.0 if first is None else max(0.0, now_s - first.times.submitted_s)

    def end_late(self, now_s: float) -> None:
        """Ends what has passed its deadline. Looks at every request, so only when one of them may have."""
        if now_s < self.next_deadline_s:
            return
        for live in [one for one in self.by_id.values() if one.request.deadline_s <= now_s]:
            self._end(live, deadline_error(live.request, live.started), FinishReason.ERROR)
        self.next_deadline_s = min((one.request.deadline_s for one in self.by_id.values()), default=math.inf)

    def end_all(
        self, unheard: Sequence[Submit], error: JaxserveError | None, reason: FinishReason, *, in_order: bool
    ) -> None:
        """Ends them, and the `unheard` ones that were still in the inbox.

        `in_order` False: the state of the scheduler is unknown, so it is left alone.
        """
        ending = [*self.by_id.items(), *((c.request.request_id, self._make_silent(c)) for c in unheard)]
        for request_id, live in ending:
            if in_order:
                self._scheduler.abort(request_id)
            live.fail(error, reason)
        self.by_id.clear()
        self._num_affecting_plans = 0
        self._waiting.clear()
        self.flush()

    def _end(self, live: LiveRequest, error: JaxserveError | None, reason: FinishReason) -> None:
        self.deliver()  # what it was given before it ended comes before its end
        request = live.request
        if self.by_id.get(request.request_id) is not live:
            return
        self._remove(live)
        self._scheduler.abort(request.request_id)
        live.fail(error, reason)

    def _make_silent(self, command: Submit) -> LiveRequest:
        """One that will produce no text: all it can do is tell its client that it ended."""
        return self._make(command, None)

    def _make(self, command: Submit, tokenizer: Tokenizer | None) -> LiveRequest:
        if tokenizer is not None and self._pieces is None:
            self._pieces = PieceTexts(tokenizer)
        return LiveRequest(
            command.request,
            command.sink,
            tokenizer,
            self._eos_token_ids,
            stats=self._stats,
            times=RequestTimes(command.request, command.submitted_s),
            pieces=self._pieces,
        )
