"""The known tokens of a resumed sequence, followed through its text and its grammar as if they had just been drawn.

What the device needs of them, the scheduler brings: a resumed sequence is one that was preempted, on another engine.
"""

from typing import NamedTuple

from jaxserve.api import FinishReason, Request
from jaxserve.errors import InvalidRequest
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.values.structured_output import Matcher


class Followed(NamedTuple):
    """The text of known tokens that the client lacks; `finish_reason` None: the sequence goes on.

    `rest`: what the end of the sequence adds to its text.
    """

    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    rest: str = ""


def follow_known(
    request: Request,
    index: int,
    detokenizer: Detokenizer | None,
    matcher: Matcher | None,
    eos_token_ids: tuple[int, ...],
) -> Followed:
    """Brings the text and the grammar of an unfinished sequence to where its client is.

    Raises InvalidRequest for tokens that this request cannot have had, or that have less text than the client has.
    """
    known, sampling = request.known(index), request.sampling
    if not known.token_ids:
        _check_text(known.text_len, 0, index)
        return Followed()
    token_ids, last = known.token_ids, known.token_ids[-1]
    reason = _end_by_id(request, index, eos_token_ids if matcher is not None else ())
    stop_reason: int | str | None = None
    if reason is FinishReason.STOP and (sampling.ignore_eos or last not in eos_token_ids):
        stop_reason = last
    if matcher is not None:
        matcher.take_known(token_ids[:-1] if reason is FinishReason.STOP else token_ids)
    if detokenizer is None:
        return Followed("", reason, stop_reason)
    silent = reason is FinishReason.STOP and not sampling.include_stop_str_in_output
    shown = token_ids[:-1] if silent else token_ids
    text, rest = request.echo_text + detokenizer.push(shown), ""
    if detokenizer.stopped is not None:
        if detokenizer.num_tokens < len(token_ids):
            raise _beyond_end(index, detokenizer.num_tokens, repr(detokenizer.stopped))
        reason, stop_reason = FinishReason.STOP, detokenizer.stopped
    elif reason is not None:
        rest = detokenizer.flush()
    _check_text(known.text_len, len(text), index)
    return Followed(text[known.text_len :], reason, stop_reason, rest)


def _end_by_id(request: Request, index: int, ends_grammar: tuple[int, ...]) -> FinishReason | None:
    """Whether the last known token is the end, by its id or by their number. `ends_grammar`: they end in any case."""
    token_ids, min_tokens = request.known(index).token_ids, request.sampling.min_tokens
    for count, token_id in enumerate(token_ids, start=1):
        if token_id in ends_grammar or (token_id in request.stop_token_ids and count > min_tokens):
            if count < len(token_ids):
                raise _beyond_end(index, count, f"token {token_id}")
            return FinishReason.STOP
    return FinishReason.LENGTH if len(token_ids) == request.max_tokens else None


def _beyond_end(index: int, count: int, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"resume has tokens of sequence {index} behind its end, which was {what} after {count} tokens; "
        "send the options with which the request began"
    )


def _check_text(text_len: int, most: int, index: int) -> None:
    if text_len > most:
        raise InvalidRequest(
            f"resume says that the client has {text_len} characters of sequence {index}, but its tokens have {most}; "
            "resume on a server of the same model and version"
        )
