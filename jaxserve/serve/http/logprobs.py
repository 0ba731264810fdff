"""Log-probabilities as each API writes them.

Owns the three shapes: completions', chats', and vLLM's for prompts. Refuses to compute: the engine did.
"""

from collections.abc import Sequence

from jaxserve.api import TokenLogprobs
from jaxserve.serve.http.responses import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    TopLogprob,
)
from jaxserve.text import Tokenizer

_LOWEST = -9999.0  # JSON has no infinity


class CompletionLogprobsBuilder:
    """Keeps the offset in the text from piece to piece. Used by one sequence's stream alone."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def build(self, entries: Sequence[TokenLogprobs | int], count: int) -> CompletionLogprobs:
        """`entries`: an int is a token that has no log-probability. `count`: alternatives asked for."""
        built = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for entry in entries:
            text = token_text(self._tokenizer, entry if isinstance(entry, int) else entry.token_id)
            built.tokens.append(text)
            built.text_offset.append(self._offset)
            self._offset += len(text)
            if isinstance(entry, int):
                built.token_logprobs.append(None)
                built.top_logprobs.append(None)
                continue
            built.token_logprobs.append(finite(entry.logprob))
            top = {token_text(self._tokenizer, i): finite(value) for i, value in _top(entry, count)}
            top.setdefault(text, finite(entry.logprob))  # the drawn token always stands among them, as OpenAI has it
            built.top_logprobs.append(top)
        return built


def chat_logprobs(tokenizer: Tokenizer | None, entries: Sequence[TokenLogprobs], count: int) -> ChatLogprobs:
    content = []
    for entry in entries:
        text = token_text(tokenizer, entry.token_id)
        top = [
            TopLogprob(token=t, logprob=finite(value), bytes=list(t.encode()))
            for t, value in ((token_text(tokenizer, i), value) for i, value in _top(entry, count))
        ]
        content.append(
            ChatLogprob(token=text, logprob=finite(entry.logprob), bytes=list(text.encode()), top_logprobs=top)
        )
    return ChatLogprobs(content=content)


def prompt_logprobs(
    tokenizer: Tokenizer | None, entries: Sequence[TokenLogprobs]
) -> list[dict[str, PromptLogprob] | None]:
    """One entry per prompt token; the first has none."""
    listed: list[dict[str, PromptLogprob] | None] = [None]
    for entry in entries:
        row = {
            str(token_id): PromptLogprob(
                logprob=finite(value), rank=rank, decoded_token=token_text(tokenizer, token_id)
            )
            for rank, (token_id, value) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1)
        }
        own = PromptLogprob(
            logprob=finite(entry.logprob), rank=entry.rank, decoded_token=token_text(tokenizer, entry.token_id)
        )
        listed.append({str(entry.token_id): own, **{k: v for k, v in row.items() if k != str(entry.token_id)}})
    return listed


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """The text of one id; vLLM's spelling of an id where no tokenizer is."""
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_text(token_id)


def finite(value: float) -> float:
    return max(value, _LOWEST)


def _top(entry: TokenLogprobs, count: int) -> list[tuple[int, float]]:
    return list(zip(entry.top_ids, entry.top_logprobs, strict=True))[:count]
