"""The requests that the loop has taken and that have not ended.

Owns each of them from its acceptance to its last update: the text, the deadline, the place among those that wait, and
the word to the scheduler when something else than a token ends it. Refuses threads and the order of a step (`engine`).
"""

import logging
import math
from collections.abc import Sequence

from jaxserve.api import FinishReason, TokenEvent
from jaxserve.engine.commands import Abort, Submit
from jaxserve.engine.outputs import LiveRequest
from jaxserve.engine.stats import EngineStats, RequestTimes
from jaxserve.engine.waiting import Waiting, deadline_error
from jaxserve.errors import InvalidRequest, JaxserveError
from jaxserve.sched.base import Scheduler
from jaxserve.text.base import Tokenizer

logger = logging.getLogger(__name__)


class LiveRequests:
    """Mutated by the loop thread alone.

    Attributes:
      by_id: all of them.
      next_deadline_s: none of them has an earlier one.
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

    def emit(self, events: list[TokenEvent]) -> None:
        """Turns tokens into updates, and gives those to the sinks."""
        for event in events:
            live = self.by_id.get(event.request_id)
            if live is None:
                self._stats.dropped += 1
                continue
            if not live.started:
                live.started = True
                self._waiting.leave(live.request, started=True)
            try:
                update = live.push(event)
                if update is None:
                    self._stats.dropped += 1
                    continue
                if update.finish_reason is not None and event.finish_reason is None:
                    self._scheduler.abort(event.request_id, event.index)
                live.sink(update)
            except Exception as error:  # a defect in one request's text or sink must not end the others
                logger.exception("request %r failed", event.request_id)
                self._scheduler.abort(event.request_id)
                live.fail(JaxserveError(f"the output could not be processed: {error!r}"))
            if live.done:
                del self.by_id[event.request_id]

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
        self._waiting.clear()

    def _end(self, live: LiveRequest, error: JaxserveError | None, reason: FinishReason) -> None:
        request = live.request
        del self.by_id[request.request_id]
        self._scheduler.abort(request.request_id)
        if not live.started:
            self._waiting.leave(request, started=False)
        live.fail(error, reason)

    def _make_silent(self, command: Submit) -> LiveRequest:
        """One that will produce no text: all it can do is tell its client that it ended."""
        return self._make(command, None, False)

    def _make(self, command: Submit, tokenizer: Tokenizer | None, echo: bool) -> LiveRequest:
        request, times = command.request, RequestTimes(command.request, command.submitted_s)
        return LiveRequest(request, command.sink, tokenizer, self._eos_token_ids, echo, stats=self._stats, times=times)

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
        try:
            self._scheduler.add(command.request)
        except JaxserveError as error:
            del self.by_id[request_id]
            return error
        self.next_deadline_s = min(self.next_deadline_s, command.request.deadline_s)
        return None
