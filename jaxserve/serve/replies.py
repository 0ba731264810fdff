"""From updates of the engine to the messages of one `Generate` call: their order, and the tokens of each.

No message waits for further tokens once it is ready. Messages are made as they are sent: long lists in slices, each in
a turn of its own, since to serialise megabytes at once would hold up every other stream.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

from jaxserve.api import Request, TokenLogprobs, shown_id
from jaxserve.engine import Update
from jaxserve.serve.convert import FINISH_REASONS, logprobs_to_proto, prompt_info_to_proto
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.turns import Turns

# Log-probabilities that are written at a time, about 1 ms of work. All those of a prompt of 100,000 tokens would hold
# every other stream up for half a second.
_SLICE = 256


class Chunks:
    """Joins updates of one sequence until there are enough tokens. Used by the handler of one call alone.

    The first token of a sequence never waits, since users watch for it, and neither does the end.
    """

    def __init__(self, least_tokens: int) -> None:
        self._least = least_tokens
        self._held: dict[int, list[Update]] = {}  # sequences that have begun -> updates that wait
        self._num_held: dict[int, int] = {}  # the same -> tokens of these updates

    def take(self, update: Update) -> Update | None:
        """The update that is ready to be sent, or None."""
        if self._least <= 1:
            return update
        held = self._held.get(update.index)
        if held is not None:
            held.append(update)
            self._num_held[update.index] += len(update.token_ids)
            if update.finish_reason is None and self._num_held[update.index] < self._least:
                return None
        self._held[update.index] = []
        self._num_held[update.index] = 0
        return _join(held) if held is not None else update

    def take_rest(self) -> list[Update]:
        """The updates that still wait, for a call that ends with an error and so without an update."""
        rest = [_join(held) for held in self._held.values() if held]
        self._held.clear()
        return rest


def _join(updates: Sequence[Update]) -> Update:
    """Joins updates. None is the first of its sequence, so only the last has more than tokens and text."""
    logprobs = tuple(entry for u in updates for entry in u.logprobs or ())
    return updates[-1]._replace(
        token_ids=tuple(i for u in updates for i in u.token_ids),
        text="".join(u.text for u in updates),
        logprobs=logprobs or None,
    )


class Replies:
    """Builds the messages of one call, in order. Used by its handler alone."""

    def __init__(self, request: Request, echo: bool, turns: Turns) -> None:
        """`turns`: of what is made in pieces on this event loop."""
        self._turns = turns
        self._request = request
        self._echo = echo
        self._first = True
        self._num_cached_tokens = 0
        known = [request.known(index) for index in range(request.sampling.n)]
        self._offsets = [(len(one.token_ids), one.text_len) for one in known]
        self._num_generated_tokens = sum(len(one.token_ids) for one in known)
        self._num_accepted_tokens = self._num_drafted_tokens = 0

    async def build(self, update: Update) -> bytes:
        """The next message, a `GenerateResponse` as it is sent. Lets other calls go on meanwhile when it is large."""
        num_tokens, num_chars = self._offsets[update.index]
        self._offsets[update.index] = (num_tokens + len(update.token_ids), num_chars + len(update.text))
        reply = pb.GenerateResponse(
            request_id=shown_id(update.request_id),
            index=update.index,
            text=update.text,
            token_ids=update.token_ids,
            token_offset=num_tokens,
            text_offset=num_chars,
        )
        self._num_generated_tokens += len(update.token_ids)
        of_prompt: Sequence[TokenLogprobs] = ()
        if self._first:
            self._first = False
            self._num_cached_tokens = update.prompt.num_cached_tokens if update.prompt is not None else 0
            reply.prompt.CopyFrom(prompt_info_to_proto(self._request.prompt_token_ids, update.prompt, self._echo))
            of_prompt = (update.prompt.logprobs if update.prompt is not None else None) or ()
        if update.finish_reason is not None:
            reply.finish_reason = FINISH_REASONS[update.finish_reason]
        if isinstance(update.stop_reason, str):
            reply.stop_text = update.stop_reason
        elif update.stop_reason is not None:
            reply.stop_token_id = update.stop_reason
        if update.drafts is not None:
            self._num_drafted_tokens += update.drafts.drafted
            self._num_accepted_tokens += update.drafts.accepted
        if update.last:
            reply.usage.num_accepted_tokens = self._num_accepted_tokens
            reply.usage.num_drafted_tokens = self._num_drafted_tokens
            reply.usage.num_prompt_tokens = len(self._request.prompt_token_ids)
            reply.usage.num_cached_tokens = self._num_cached_tokens
            reply.usage.num_generated_tokens = self._num_generated_tokens
        parts = [reply.SerializeToString()]
        for part in itertools.chain(
            _in_slices(of_prompt, lambda some: pb.GenerateResponse(prompt=pb.PromptInfo(prompt_logprobs=some))),
            _in_slices(update.logprobs or (), lambda some: pb.GenerateResponse(logprobs=some)),
        ):
            if len(parts) > 1:
                await self._turns.next()
            parts.append(part)
        return b"".join(parts)


def _in_slices(
    entries: Sequence[TokenLogprobs], message: Callable[[Sequence[pb.TokenLogprobs]], pb.GenerateResponse]
) -> Iterator[bytes]:
    """Messages that have only some of the entries each. Behind one another they are one message, which has all: the
    wire format has fields in any order, and adds up lists that come in parts."""
    for start in range(0, len(entries), _SLICE):
        yield message(logprobs_to_proto(entries[start : start + _SLICE])).SerializeToString()
