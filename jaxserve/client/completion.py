"""`Completion`: a streamed answer as one value, for clients that do not want a stream."""

import dataclasses
from collections.abc import Sequence

from jaxserve.api import FinishReason, TokenLogprobs
from jaxserve.serve.convert import finish_reason_from_proto, logprobs_from_proto
from jaxserve.serve.gen import inference_pb2 as pb


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One of the n sequences.

    `stop_reason` is the stop string or stop token id that ended it; None for end-of-sequence and length. `logprobs`
    has one entry per token when asked for, and is empty otherwise.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The whole answer. `prompt_logprobs` has one entry per prompt token after the first, when asked for.

    Of the generated tokens, `num_accepted_tokens` had been drafted, with `num_drafted_tokens` drafts in all.
    """

    request_id: str
    outputs: tuple[Output, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_accepted_tokens: int
    num_drafted_tokens: int
    prompt_logprobs: tuple[TokenLogprobs, ...]

    @property
    def text(self) -> str:
        """The text of the first sequence."""
        return self.outputs[0].text


def collect_replies(replies: Sequence[pb.GenerateResponse]) -> Completion:
    """Joins all messages of one call, in the order in which they came."""
    assert replies, "a call that ends well has at least one message"
    last = replies[-1]
    by_index: dict[int, list[pb.GenerateResponse]] = {}
    for reply in replies:
        by_index.setdefault(reply.index, []).append(reply)
    return Completion(
        request_id=last.request_id,
        outputs=tuple(_join(index, of_index) for index, of_index in sorted(by_index.items())),
        num_prompt_tokens=last.usage.num_prompt_tokens,
        num_cached_tokens=last.usage.num_cached_tokens,
        num_generated_tokens=last.usage.num_generated_tokens,
        num_accepted_tokens=last.usage.num_accepted_tokens,
        num_drafted_tokens=last.usage.num_drafted_tokens,
        prompt_logprobs=logprobs_from_proto(replies[0].prompt.prompt_logprobs),
    )


def _join(index: int, replies: Sequence[pb.GenerateResponse]) -> Output:
    last = replies[-1]
    which = last.WhichOneof("stop_reason")
    return Output(
        index=index,
        text="".join(r.text for r in replies),
        token_ids=tuple(i for r in replies for i in r.token_ids),
        finish_reason=finish_reason_from_proto(last.finish_reason),
        stop_reason=getattr(last, which) if which is not None else None,
        logprobs=tuple(e for r in replies for e in logprobs_from_proto(r.logprobs)),
    )
