"""Texts to measure a model on, from a file: plain text, or JSONL as the engine answers it.

They should be of the kind that the model will read: chats as its template writes them, where it is one for chats.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import IO

from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.offline.jsonl import Entry, read_entries
from jaxserve.quantise.quality import Text
from jaxserve.text import ChatTemplate, Tokenizer, encode_chat

_INPUTS = ("text", "prompt", "prompt_token_ids", "messages")


def read_texts(tokenizer: Tokenizer, data: Path, vocab_size: int) -> list[Text]:
    """Each text of a file that has any tokens. A chat whose last message is the assistant's has that as its answer.

    `data` is text, or JSONL (by its name) with "text", "prompt", "prompt_token_ids" or "messages" in each line.
    Raises ConfigError, also for a token that a model of `vocab_size` does not have.
    """
    try:
        with data.open("rb") as file:
            read = _read_lines(tokenizer, file, data) if data.suffix == ".jsonl" else _read_text(tokenizer, file, data)
            found = [text for text in read if text.ids]
    except OSError as error:
        raise ConfigError(f"cannot read {data}: {error.strerror}") from error
    if not found:
        raise ConfigError(f"{data} holds no text; give a file of some thousand words that the model is meant to read")
    unknown = max(max(text.ids) for text in found)
    if unknown >= vocab_size:
        raise ConfigError(
            f"{data} has token {unknown}, but the model has {vocab_size} of them; is the tokenizer (model.tokenizer) "
            "that of the model?"
        )
    return found


def _read_text(tokenizer: Tokenizer, file: IO[bytes], data: Path) -> Iterator[Text]:
    try:
        text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{data} is not valid UTF-8 at byte {error.start}; convert it") from error
    if text.strip():
        yield Text(ids=tokenizer.encode(text))


def _read_lines(tokenizer: Tokenizer, file: IO[bytes], data: Path) -> Iterator[Text]:
    template = ChatTemplate.of(tokenizer)
    for entry, problem in read_entries(file):
        try:
            if problem is not None:
                raise problem
            yield _text_of(tokenizer, template, entry)
        except InvalidRequest as error:
            raise ConfigError(f"{data}:{entry.line}: {error}") from error


def _text_of(tokenizer: Tokenizer, template: ChatTemplate, entry: Entry) -> Text:
    given = [name for name in _INPUTS if entry.fields.get(name) is not None]
    if len(given) != 1:
        raise InvalidRequest(f"a line has exactly one of {', '.join(_INPUTS)}; this one has {sorted(entry.fields)}")
    value = entry.fields[given[0]]
    if given[0] == "messages":
        ids = encode_chat(tokenizer, template, value, add_generation_prompt=False)
        if len(value) < 2 or value[-1].get("role") != "assistant":
            return Text(ids=ids)
        question = encode_chat(tokenizer, template, value[:-1])
        return Text(ids=ids, begin=len(question) if ids[: len(question)] == question else None)
    if given[0] != "prompt_token_ids" and isinstance(value, str):
        return Text(ids=tokenizer.encode(value))
    is_ids = isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
    if given[0] == "text" or not is_ids:
        raise InvalidRequest(f"{given[0]} is {value!r:.80}, but must be text or a list of token ids")
    return Text(ids=value)
