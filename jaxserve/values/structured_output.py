"""`StructuredOutput`, the form that a generated text must have, and the protocols of its compiled form.

A schema is compiled, and found good or bad, in `text.grammar`, which knows a vocabulary.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypedDict

from jaxserve.errors import InvalidRequest, UnsupportedOption

MAX_STRUCTURED_CHARS = 2**17  # of a schema, a regex or a grammar; of all choices together
_TEXTS = ("json_schema", "regex", "grammar")


class StructuredFields(TypedDict, total=False):
    """A `StructuredOutput` as a mapping, for type checkers."""

    json_schema: str | Mapping[str, Any]
    json_object: bool
    regex: str
    choice: Sequence[str]
    grammar: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """The generated text is held to one of these; exactly one is given.

    Attributes:
      json_schema: a JSON Schema as text (a mapping is written down as text). White space is allowed where JSON has it.
      json_object: True: any JSON object.
      regex: the whole text matches it; Rust's syntax, without look-around. `\\d` is a digit of any script.
      choice: the text is one of these.
      grammar: a context-free grammar as llguidance reads them: Lark's syntax, or GBNF with its `::=`.

    Raises InvalidRequest when none or several are given, UnsupportedOption for more than MAX_STRUCTURED_CHARS.
    """

    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # the value is frozen from the end of __post_init__ on
        if isinstance(self.json_schema, Mapping):
            set_field(self, "json_schema", _schema_text(self.json_schema))
        if isinstance(self.choice, str) or not isinstance(self.choice, Sequence):
            raise InvalidRequest(f"structured.choice must be a list of strings, got {self.choice!r:.80}")
        set_field(self, "choice", tuple(self.choice))
        if not isinstance(self.json_object, bool):
            raise InvalidRequest(f"structured.json_object must be true or false, got {self.json_object!r:.80}")
        self._check_texts()
        given = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) not in (None, False, ())]
        if len(given) != 1:
            names = ", ".join(field.name for field in dataclasses.fields(self))
            raise InvalidRequest(f"structured needs exactly one of {names}, got {', '.join(given) or 'none'}")

    def _check_texts(self) -> None:
        texts = {name: getattr(self, name) for name in _TEXTS if getattr(self, name) is not None}
        for number, text in enumerate(self.choice):
            texts[f"choice[{number}]"] = text
        for name, text in texts.items():
            if not isinstance(text, str) or not text:
                raise InvalidRequest(f"structured.{name} must be a text that is not empty, got {text!r:.80}")
            try:
                text.encode()
            except UnicodeEncodeError as error:  # a lone surrogate, from JSON escapes
                raise InvalidRequest(f"structured.{name} is not valid Unicode at character {error.start}") from error
        if len(set(self.choice)) != len(self.choice):
            raise InvalidRequest("structured.choice has a text twice; give each once")
        if (size := sum(map(len, texts.values()))) > MAX_STRUCTURED_CHARS:
            raise UnsupportedOption(
                f"structured has {size} characters; at most {MAX_STRUCTURED_CHARS} work. Give a smaller one."
            )

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> "StructuredOutput":
        """Builds from names of a wire format. An unknown name is refused, never ignored."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise UnsupportedOption(f"structured.{name} is not supported; known: {', '.join(known)}")
        return cls(**{name: value for name, value in options.items() if value is not None})


def _schema_text(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"structured.json_schema cannot be written as JSON: {error}") from error


class Matcher(Protocol):
    """The position of one sequence in its grammar. Mutated by the engine's loop.

    Attributes:
      mask: the tokens that may come next, one bit each, lowest first; whole 32-bit words. When the text is complete it
        has the end-of-sequence tokens alone.
      tokens: taken so far.
    """

    mask: bytes
    tokens: list[int]

    def accept(self, token_id: int) -> None:
        """Takes a token that `mask` allowed. Raises InvalidRequest when the grammar cannot go on."""
        ...

    def take_known(self, token_ids: Sequence[int]) -> None:
        """Takes tokens that were generated elsewhere under the same grammar. Raises InvalidRequest if they were not."""
        ...

    def foresee(self, most: int, follow: Callable[[Sequence[int]], Sequence[int]]) -> list[int]:
        """Up to `most` tokens that the grammar allows one after the other: those that it leaves no choice about, and
        where there are none, as many of `follow(tokens before)` as it allows. Takes nothing.

        The end of the text is none of them: nothing is drawn behind it.
        """
        ...

    def masks_after(self, token_ids: Sequence[int]) -> list[bytes]:
        """The `mask` behind each of these tokens, as if it and those before had been taken. Takes nothing.

        There are fewer where a token is not allowed, or the grammar could not go on behind it.
        """
        ...


class Grammar(Protocol):
    """A compiled grammar. Immutable, and safe to use from several threads."""

    def start(self) -> Matcher:
        """A matcher at the beginning. Cheap."""
        ...
