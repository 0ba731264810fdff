"""The requests that the loop has taken and that have not ended.

Owns each of them from its acceptance to its last update: the text, the deadline, the place among those that wait, and
the word to the scheduler when something else than a token ends it. Refuses threads and the order of a step (`engine`).

The tokens of a step come in twice. `take` has them before the next step is planned, and reads at once only what may
change that plan: requests with stop strings, which may end, and with grammars, whose next mask follows. `deliver` has
the rest, when the device is busy with the next step: text and streams are most of what a step costs the host.
"""

import logging
import math
from collections.abc import Callable, Sequence

from jaxserve.api import FinishReason, TokenEvent
from jaxserve.engine.commands import Abort, Submit
from jaxserve.engine.outputs import LiveRequest, Update
from jaxserve.engine.stats import EngineStats
from jaxserve.engine.stats_values import RequestTimes
from jaxserve.engine.waiting import Waiting, deadline_error
from jaxserve.errors import InvalidRequest, JaxserveError
from jaxserve.sched.base import Scheduler
from jaxserve.text.base import Tokenizer
from jaxserve.text.detokenizer import PieceTexts

logger = logging.getLogger(__name__)


class LiveRequests:
    """Mutated by the loop thread alone.

    Attributes:
      by_id: all of them.
      next_deadline_s: none of them has an earlier one.
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
        self._num_steering = 0  # live requests whose tokens must be read before the next plan
        self._pieces: PieceTexts | None = None  # of the one tokenizer
        self._scheduler = scheduler
        self._waiting = waiting
        self._stats = stats
        self._eos_token_ids = eos_token_ids

    def add(self, command: Submit, tokenizer: Tokenizer | None) -> None:
        """Hands a request to the scheduler, or tells its client why not."""
        refused = self._try_add(command, tokenizer)
        self._waiting.take()
        if refused is not None:
            self._waiting.leave(command.request, started=False)
            self._make_silent(command).fail(refused)

    def take(self, events: list[TokenEvent]) -> None:
        """Takes the tokens of a step; `deliver` must have handed out those of the step before."""
        assert not self._read and not self._unread, "tokens of the step before have not been delivered"
        by_id = self.by_id
        if not self._num_steering:
            self._unread = events
            return
        for event in events:
            live = by_id.get(event.request_id)
            if live is None or not live.steers:
                self._unread.append(event)
            elif (update := self._push(live, event)) is not None:
                self._read.append((live, update))

    def deliver(self) -> None:
        """Turns the tokens that were taken into updates, and gives all updates to their sinks."""
        read, self._read = self._read, []
        for live, update in read:
            self._tell(live, update)
        unread, self._unread = self._unread, []
        by_id = self.by_id
        for event in unread:
            live = by_id.get(event.request_id)
            if live is None:
                self._stats.dropped += 1
            elif (update := self._push(live, event)) is not None:
                self._tell(live, update)

    def flush(self) -> None:
        """Tells whoever collects updates that those of this turn are complete."""
        for tell in self.on_delivered:
            try:
                tell()
            except Exception:  # what collects updates must not end what makes them
                logger.exception("a collector of updates failed")

    def _push(self, live: LiveRequest, event: TokenEvent) -> Update | None:
        """The update of a token; None when there is none to be told."""
        if not live.started:
            live.started = True
            self._waiting.leave(live.request, started=True)
        try:
            update = live.push(event)
        except Exception as error:  # a defect in one request's text must not end the others
            self._break(live, error)
            return None
        if update is None:
            self._stats.dropped += 1
            return None
        if update.finish_reason is not None:
            if event.finish_reason is None:
                self._scheduler.abort(event.request_id, event.index)
            if live.done:
                self._remove(live)
        return update

    def _tell(self, live: LiveRequest, update: Update) -> None:
        try:
            live.sink(update)
        except Exception as error:  # neither must a defect of its sink
            self._break(live, error)

    def _break(self, live: LiveRequest, error: Exception) -> None:
        request_id = live.request.request_id
        logger.error("request %r failed", request_id, exc_info=error)
        if self.by_id.get(request_id) is live:  # its last update may be what failed, and its id another's by now
            self._scheduler.abort(request_id)
            self._remove(live)
        live.fail(JaxserveError(f"the output could not be processed: {error!r}"))

    def _remove(self, live: LiveRequest) -> None:
        del self.by_id[live.request.request_id]
        self._num_steering -= live.steers

    def abort(self, command: Abort) -> None:
        """Ends a request, if it is still there."""
        live = self.by_id.get(command.request_id)
        if live is not None and command.request in (None, live.request):
            self._end(live, None, FinishReason.ABORT)

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
        self._num_steering = 0
        self._waiting.clear()
        self.flush()

    def _end(self, live: LiveRequest, error: JaxserveError | None, reason: FinishReason) -> None:
        self.deliver()  # what it was given before it ended comes before its end
        request = live.request
        if self.by_id.get(request.request_id) is not live:
            return
        self._remove(live)
        self._scheduler.abort(request.request_id)
        if not live.started:
            self._waiting.leave(request, started=False)
        live.fail(error, reason)

    def _make_silent(self, command: Submit) -> LiveRequest:
        """One that will produce no text: all it can do is tell its client that it ended."""
        return self._make(command, None, False)

    def _make(self, command: Submit, tokenizer: Tokenizer | None, echo: bool) -> LiveRequest:
        if tokenizer is not None and self._pieces is None:
            self._pieces = PieceTexts(tokenizer)
        return LiveRequest(
            command.request,
            command.sink,
            tokenizer,
            self._eos_token_ids,
            echo,
            stats=self._stats,
            times=RequestTimes(command.request, command.submitted_s),
            pieces=self._pieces,
        )

    def _try_add(self, command: Submit, tokenizer: Tokenizer | None) -> JaxserveError | None:
        """None when the scheduler has taken it, else why not."""
        request_id = command.request.request_id
        try:
            live = self._make(command, tokenizer, command.echo)
        except Exception as error:  # a defect of the tokenizer costs the request that met it
            logger.exception("request %r failed", request_id)
            return JaxserveError(f"the prompt could not be decoded: {error!r}")
        if request_id in self.by_id:
            return InvalidRequest(f"a request with id {request_id!r} is live already; choose another")
        self.by_id[request_id] = live  # before: if the scheduler breaks, this one too is told that the loop has died
        self._num_steering += live.steers
        try:
            self._scheduler.add(command.request)
        except JaxserveError as error:
            self._remove(live)
            return error
        self.next_deadline_s = min(self.next_deadline_s, command.request.deadline_s)
        return None
