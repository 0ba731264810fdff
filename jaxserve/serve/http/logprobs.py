"""Log-probabilities as each API writes them.

There are three forms: of completions, of chats, and vLLM's for prompts. Completions tell alternatives apart by name, so
that two tokens of one text, or two that are each a part of a character, need names of their own.
"""

from collections.abc import Iterable, Sequence

from jaxserve.api import TokenLogprobs
from jaxserve.errors import UnsupportedOption
from jaxserve.serve.http.responses import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    TopLogprob,
)
from jaxserve.text import Tokenizer
from jaxserve.text.detokenizer import Detokenizer

_LOWEST = -9999.0  # JSON has no infinity


class CompletionLogprobsBuilder:
    """Keeps the offset in the text from piece to piece. Used by one sequence's stream alone."""

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], *, skip_special_tokens: bool, as_ids: bool
    ) -> None:
        """`as_ids`: tokens are named by their ids."""
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._skip = skip_special_tokens
        self._as_ids = as_ids
        self._offset = 0
        self._written: Detokenizer | None = None

    def build_prompt(self, entries: Sequence[TokenLogprobs], count: int) -> CompletionLogprobs:
        """An echoed prompt, before all else. Its first token has no log-probability, and no entry in `entries`."""
        built = self._build([self._prompt_ids[0], *entries], count, self._start(()))
        self._count_prompt()
        return built

    def skip(self, token_ids: Sequence[int], *, echo: bool) -> None:
        """The client has the entries of these tokens, and of the prompt with `echo`."""
        if echo:
            self._count_prompt()
        self._written = self._start(self._prompt_ids)
        for token_id in token_ids:
            self._advance(token_id, self._written)

    def _count_prompt(self) -> None:
        if self._tokenizer is not None:
            self._offset = len(self._tokenizer.decode(self._prompt_ids, skip_special_tokens=self._skip))

    def build(self, entries: Sequence[TokenLogprobs], count: int) -> CompletionLogprobs:
        """The entries of generated tokens. `count`: alternatives asked for."""
        if self._written is None:
            self._written = self._start(self._prompt_ids)
        return self._build(entries, count, self._written)

    def _start(self, prompt_ids: Sequence[int]) -> Detokenizer | None:
        return None if self._tokenizer is None else Detokenizer(self._tokenizer, prompt_ids, self._skip)

    def _build(
        self, entries: Sequence[TokenLogprobs | int], count: int, detokenizer: Detokenizer | None
    ) -> CompletionLogprobs:
        built = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for entry in entries:
            token_id = entry if isinstance(entry, int) else entry.token_id
            built.text_offset.append(self._advance(token_id, detokenizer))
            top = [] if isinstance(entry, int) else _top(entry, count)
            names = _names(self._tokenizer, [token_id, *(i for i, _ in top)], self._as_ids)
            built.tokens.append(names[token_id])
            if isinstance(entry, int):
                built.token_logprobs.append(None)
                built.top_logprobs.append(None)
                continue
            built.token_logprobs.append(finite(entry.logprob))
            named = {names[i]: finite(value) for i, value in top}
            named.setdefault(names[token_id], finite(entry.logprob))  # always among them, as OpenAI has it
            built.top_logprobs.append(named)
        return built

    def _advance(self, token_id: int, detokenizer: Detokenizer | None) -> int:
        """The offset of the token in the text. A part of a character begins where the character does."""
        if detokenizer is None or self._tokenizer is None:
            return 0
        before = self._offset
        self._offset += len(detokenizer.push((token_id,)))
        # Bytes that form no character are shown together with the text of the next token.
        return max(before, self._offset - len(self._tokenizer.token_text(token_id)))


def join_logprobs(parts: Iterable[CompletionLogprobs]) -> CompletionLogprobs:
    """Joins the pieces, in order."""
    joined = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for part in parts:
        joined.tokens += part.tokens
        joined.token_logprobs += part.token_logprobs
        joined.top_logprobs += part.top_logprobs
        joined.text_offset += part.text_offset
    return joined


def chat_logprobs(
    tokenizer: Tokenizer | None, entries: Sequence[TokenLogprobs], count: int, *, as_ids: bool
) -> ChatLogprobs:
    """`as_ids`: tokens are named by their ids. `bytes` are the token's own, so that clients can join characters."""

    def called(token_id: int) -> tuple[str, list[int] | None]:
        name = _id_name(token_id) if as_ids else token_text(tokenizer, token_id)
        found = _bytes(tokenizer, token_id)
        return name, None if found is None else list(found)

    content = []
    for entry in entries:
        top = []
        for token_id, value in _top(entry, count):
            name, spelled = called(token_id)
            top.append(TopLogprob(token=name, logprob=finite(value), bytes=spelled))
        name, spelled = called(entry.token_id)
        content.append(ChatLogprob(token=name, logprob=finite(entry.logprob), bytes=spelled, top_logprobs=top))
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
    return _id_name(token_id) if tokenizer is None else tokenizer.token_text(token_id)


def finite(value: float) -> float:
    return max(value, _LOWEST)


def _top(entry: TokenLogprobs, count: int) -> list[tuple[int, float]]:
    return list(zip(entry.top_ids, entry.top_logprobs, strict=True))[:count]


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _bytes(tokenizer: Tokenizer | None, token_id: int) -> bytes | None:
    """The bytes of a token; None where tokens have no bytes of their own."""
    if tokenizer is None:
        return None
    try:
        return tokenizer.token_bytes(token_id)
    except UnsupportedOption:
        return None


def _names(tokenizer: Tokenizer | None, token_ids: Sequence[int], as_ids: bool) -> dict[int, str]:
    """Distinct names of tokens; of tokens with the same text the first keeps it."""
    names: dict[int, str] = {}
    for token_id in token_ids:
        name = _id_name(token_id) if as_ids else _spelled(tokenizer, token_id)
        names.setdefault(token_id, _id_name(token_id) if name in names.values() else name)
    return names


def _spelled(tokenizer: Tokenizer | None, token_id: int) -> str:
    """The text of a token, or as OpenAI has it `bytes:\\xe6` for what is no text alone."""
    text = token_text(tokenizer, token_id)
    if "\ufffd" not in text:
        return text
    found = _bytes(tokenizer, token_id)
    return text if found in (None, text.encode()) else f"bytes:{repr(found)[2:-1]}"
