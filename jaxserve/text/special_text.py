"""Text of callers that spells a special token, and the prompts in which it stays text.

A prompt is written by a template and encoded as one string, and there every text that spells a special token becomes
that token: a user could close their own turn and write a system message. So the values of callers are marked before
they go into a template: two characters that occur in none of them stand around each special token, and one at the edge
of a text that could be half of a token, to which the next text is the other half. After the template has run, the marks
say which stretches are plain text; they never reach the model, and where none is needed the prompt is encoded as if
there had been none.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.errors import InvalidRequest, PromptTooLong
from jaxserve.text.base import Tokenizer
from jaxserve.text.long_text import check_text_fits

# Unicode's noncharacters, which are for use within a program and never for interchange. Two are taken for a prompt.
MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
_ANCHOR = "\n"


class Piece(NamedTuple):
    """A stretch of a prompt. `is_plain`: special tokens in it are text."""

    text: str
    is_plain: bool


class PromptText(NamedTuple):
    """A prompt in pieces, of which none may be joined with the next before it is encoded."""

    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        """All of it, for display."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def is_whole(self) -> bool:
        """Whether encoding `text` gives the prompt."""
        return all(not piece.is_plain for piece in self.pieces) and len(self.pieces) < 2

    def for_engine(self, tokenizer: Tokenizer | None, max_tokens: int | None = None) -> str | list[int]:
        """What an engine takes as the prompt: the text, or ids where that would become others. `max_tokens` as of
        `encode`, whose errors this raises."""
        return self.text if self.is_whole or tokenizer is None else self.encode(tokenizer, max_tokens)

    def encode(self, tokenizer: Tokenizer, max_tokens: int | None = None) -> list[int]:
        """Ids of the prompt. Raises InvalidRequest for a special token that this vocabulary cannot write as text, and
        PromptTooLong once it is clear that there are more than `max_tokens`; None: any number."""
        ids: list[int] = []
        for number, piece in enumerate(self.pieces):
            if max_tokens is not None:
                _check_count(len(ids), max_tokens, number, len(self.pieces))
                check_text_fits(tokenizer, piece.text, max_tokens)
            encode = _encode_plain if piece.is_plain else _encode
            ids += encode(tokenizer, piece.text) if not number else _encode_inner(tokenizer, piece)
        return ids


class Marks(NamedTuple):
    """The two characters of one prompt, and the texts that hold them: without marks, and with."""

    open: str
    close: str
    marked: Mapping[str, str]


class SpecialText:
    """The special tokens of one vocabulary, as they are found in text. Immutable after construction."""

    def __init__(self, specials: Iterable[str]) -> None:
        self._specials = sorted({text for text in specials if text}, key=lambda text: (-len(text), text))
        self._found = re.compile(_alternatives(self._specials) or "(?!)")
        self._longest = max(map(len, self._specials), default=0)
        self._heads = frozenset(text[:end] for text in self._specials for end in range(1, len(text)))
        self._tails = frozenset(text[start:] for text in self._specials for start in range(1, len(text)))
        firsts, lasts = {text[0] for text in self._specials}, {text[-1] for text in self._specials}
        self._starts, self._ends, self._near = map(_any_of, (firsts, lasts, firsts | lasts))

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "SpecialText":
        return cls(tokenizer.token_text(token_id) for token_id in tokenizer.special_ids)

    def check(self, named: Mapping[str, Any]) -> None:
        """Raises InvalidRequest when a text in a JSON value spells a special token. Errors use the values' names."""
        for where, value in named.items():
            for text in _texts(value):
                if match := self._found.search(text):
                    raise InvalidRequest(f"{where} contains the special token {match[0]!r}; take it out")

    def marks_for(self, values: Any) -> Marks | None:
        """The marks for JSON values of a caller; None: they need none."""
        if not self._specials:
            return None
        texts = set(_texts(values))
        unsafe = [text for text in texts if self._is_unsafe(text)]
        if not unsafe:
            return None
        everything = "\0".join(texts)
        free = [mark for mark in MARKS if mark not in everything]
        if len(free) < 2:
            raise InvalidRequest(
                "the messages hold special tokens and all of Unicode's noncharacters from U+FDD0 on, of which two are "
                "needed to tell the tokens from text; take the noncharacters out"
            )
        marks = Marks(free[0], free[1], {})
        return marks._replace(marked={text: self._marked_text(text, marks) for text in unsafe})

    def marked(self, value: Any, marks: Marks) -> Any:
        """A copy of a JSON value with marks in its texts, the keys of objects included."""
        if isinstance(value, str):
            return marks.marked.get(value, value)
        if isinstance(value, dict):
            return {marks.marked.get(key, key): self.marked(inner, marks) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.marked(inner, marks) for inner in value]
        return value

    def read(self, rendered: str, marks: Marks) -> PromptText:
        """A prompt whose marked values have been written by a template."""
        inner = rf"{marks.open}({self._found.pattern}){marks.close}"
        pieces: list[Piece] = []
        at = 0
        for match in re.finditer(inner, rendered):
            pieces += self._cut(rendered[at : match.start()], marks)
            pieces.append(Piece(match[1], True))
            at = match.end()
        pieces += self._cut(rendered[at:], marks)
        return PromptText(tuple(piece for piece in pieces if piece.text))

    def _cut(self, rendered: str, marks: Marks) -> Iterator[Piece]:
        """A stretch without plain pieces, cut where the edge of a text, or of a token that the template has taken
        apart, keeps two parts of a special token apart."""
        stretches = re.split(f"[{marks.open}{marks.close}]", rendered)
        text, start, edge = "".join(stretches), 0, 0
        for stretch in stretches:
            if self._is_across(text, edge):
                yield Piece(text[start:edge], False)
                start = edge
            edge += len(stretch)
        yield Piece(text[start:], False)

    def _marked_text(self, text: str, marks: Marks) -> str:
        marked = self._found.sub(lambda match: f"{marks.open}{match[0]}{marks.close}", text)
        if self._opens(text):
            marked += marks.close
        return marks.close + marked if self._closes(text) else marked

    def _is_unsafe(self, text: str) -> bool:
        """Whether a special token is in a text, or a part of one at its edge."""
        if not self._near.search(text):
            return False
        return self._found.search(text) is not None or self._opens(text) or self._closes(text)

    def _opens(self, text: str) -> bool:
        """Whether a text ends with the first part of a special token."""
        end = text[-self._longest :]
        return any(end[match.start() :] in self._heads for match in self._starts.finditer(end))

    def _closes(self, text: str) -> bool:
        """Whether a text begins with the last part of a special token."""
        begin = text[: self._longest]
        return any(begin[: match.end()] in self._tails for match in self._ends.finditer(begin))

    def _is_across(self, text: str, edge: int) -> bool:
        """Whether a special token has some of its characters before `edge` and the others behind it."""
        for start in self._starts.finditer(text, max(0, edge - self._longest), edge):
            match = self._found.match(text, start.start())
            if match is not None and match.end() > edge:
                return True
        return False


def _check_count(count: int, max_tokens: int, number: int, num_pieces: int) -> None:
    if count > max_tokens:
        raise PromptTooLong(
            f"the first {number} of {num_pieces} pieces of the prompt, between which are special tokens as text, have "
            f"{count} tokens; a sequence holds {max_tokens}, prompt and output together; shorten it"
        )


def _any_of(characters: Iterable[str]) -> re.Pattern[str]:
    found = "".join(map(re.escape, sorted(characters)))
    return re.compile(f"[{found}]" if found else "(?!)")


def _alternatives(words: Sequence[str]) -> str:
    """A pattern that finds the longest of the words. Those with the same beginning share it, so that a vocabulary of
    hundreds of tokens costs about what one does."""
    if len(words) < 2:
        return "".join(map(re.escape, words))
    groups: dict[str, list[str]] = {}
    for word in words:
        groups.setdefault(word[:1], []).append(word[1:])
    ends = groups.pop("", None) is not None
    branches = [re.escape(first) + _alternatives(rest) for first, rest in groups.items()]
    pattern = branches[0] if len(branches) == 1 and not ends else f"(?:{'|'.join(branches)})"
    return pattern + "?" if ends else pattern


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys of objects included. Without recursion: arguments of calls may be deep."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict):
            yield from part
            left += part.values()
        elif isinstance(part, list | tuple):
            left += part


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _encode_plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_plain(text)


def _encode_inner(tokenizer: Tokenizer, piece: Piece) -> list[int]:
    """Ids of a piece behind others. Some vocabularies put a space before a text, but none after a line break, which is
    put before the piece and taken away again."""
    encode = _encode_plain if piece.is_plain else _encode
    before, both = _encode(tokenizer, _ANCHOR), encode(tokenizer, _ANCHOR + piece.text)
    ids = both[len(before) :] if both[: len(before)] == before else encode(tokenizer, piece.text)
    if piece.is_plain and not tokenizer.special_ids.isdisjoint(ids):
        # A vocabulary may find such a token by its plain rules, too; it finds none in single characters.
        ids = [
            token_id for character in piece.text for token_id in encode(tokenizer, _ANCHOR + character)[len(before) :]
        ]
        if not tokenizer.special_ids.isdisjoint(ids):
            raise InvalidRequest(
                f"the text {piece.text!r} is a special token that cannot be written as text; take it out"
            )
    return ids
