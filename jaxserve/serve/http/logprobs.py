"""Log-probabilities as each API writes them.

There are three forms: of completions, of chats, and vLLM's for prompts. Completions tell alternatives apart by name, so
that two tokens of one text, or two that are each a part of a character, need names of their own.
"""

from collections.abc import Sequence

from jaxserve.api import TokenLogprobs
from jaxserve.errors import UnsupportedOption
from jaxserve.serve.http.pieces import WrittenList
from jaxserve.serve.http.responses import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    TopLogprob,
)
from jaxserve.serve.turns import Turns
from jaxserve.text import Tokenizer
from jaxserve.text.detokenizer import Detokenizer

_LOWEST = -9999.0  # JSON has no infinity
_SLICE = 64  # tokens of a prompt at a time: with 20 alternatives each, a few milliseconds


class WrittenLogprobs:
    """`CompletionLogprobs` whose lists are written as they come."""

    def __init__(self) -> None:
        self._lists = {name: WrittenList() for name in CompletionLogprobs.model_fields}

    def add(self, part: CompletionLogprobs) -> None:
        """Writes the entries of further tokens."""
        for name, written in self._lists.items():
            written.add(getattr(part, name))

    def extend(self, other: "WrittenLogprobs") -> None:
        """Adds the entries of another."""
        for name, written in self._lists.items():
            written.extend(other._lists[name])

    @property
    def fields(self) -> dict[str, WrittenList]:
        """What stands in the answer."""
        return self._lists


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

    async def write_prompt(self, entries: Sequence[TokenLogprobs], count: int, turns: Turns) -> WrittenLogprobs:
        """An echoed prompt, which no other entries may precede: it is the same for all sequences, and written once.

        Its first token has no log-probability, and no entry in `entries`. A long one takes several turns.
        """
        written, detokenizer = WrittenLogprobs(), self._start(())
        written.add(self._build([self._prompt_ids[0]], count, detokenizer))
        for start in range(0, len(entries), _SLICE):
            if start:
                await turns.next()
            written.add(self._build(entries[start : start + _SLICE], count, detokenizer))
        return written

    def follow_prompt(self, num_chars: int) -> None:
        """The text of the answer begins with the prompt, which has so many characters."""
        self._offset = num_chars

    def skip(self, token_ids: Sequence[int]) -> None:
        """The client has the entries of these tokens."""
        self._written = self._start(self._prompt_ids)
        for token_id in token_ids:
            self._advance(token_id, self._written)

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


async def write_prompt_logprobs(
    tokenizer: Tokenizer | None, entries: Sequence[TokenLogprobs], turns: Turns
) -> WrittenList:
    """One entry per prompt token; the first has none. Those of a long prompt take several turns."""
    written = WrittenList()
    written.add([None])
    for start in range(0, len(entries), _SLICE):
        if start:
            await turns.next()
        written.add([_prompt_row(tokenizer, entry) for entry in entries[start : start + _SLICE]])
    return written


def _prompt_row(tokenizer: Tokenizer | None, entry: TokenLogprobs) -> dict[str, PromptLogprob]:
    row = {
        str(token_id): PromptLogprob(logprob=finite(value), rank=rank, decoded_token=token_text(tokenizer, token_id))
        for rank, (token_id, value) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1)
    }
    own = PromptLogprob(
        logprob=finite(entry.logprob), rank=entry.rank, decoded_token=token_text(tokenizer, entry.token_id)
    )
    return {str(entry.token_id): own, **{k: v for k, v in row.items() if k != str(entry.token_id)}}


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
