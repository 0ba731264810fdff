"""Harmony, in which gpt-oss writes: messages on channels, for thoughts, for calls and for the answer.

    <|channel|>analysis<|message|>The user asks ...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
    <|start|>assistant<|channel|>final<|message|>It is sunny.<|return|>

The prompt has the first `<|start|>assistant`. A message of the channel `commentary` without a recipient is text that
the user is to see before a call. See https://cookbook.openai.com/articles/openai-harmony.
"""

import re

from jaxserve.serve.http.formats.base import Functions, Piece, ToolFormat, first_of, may_begin

_START, _MESSAGE, _CHANNEL = "<|start|>", "<|message|>", "<|channel|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START, _CHANNEL)  # an end may be forgotten before the next message
_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_FUNCTIONS = "functions."


class HarmonyParser:
    """Belongs to one sequence. Output that is constrained has no channels: it is text as it is."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._held = ""
        self._where = "beginning"  # or header, text, thought, call, between
        self._header = ""
        self._has_arguments = False
        self._told: set[str] = set()  # kinds of text that have been told: the next message of one begins a line

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        left, self._held = self._held + text, ""
        while left:
            if self._where == "beginning":
                left = self._begin(left)
            elif self._where == "header":
                left = self._read_header(left, pieces)
            elif self._where == "between":
                left = self._seek(left)
            else:
                left = self._read_message(left, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._where == "beginning":
            return [Piece(held)] if held.strip() else []
        if self._where in ("header", "between"):
            return []
        return [*self._tell(held), *self._end()]

    def _begin(self, text: str) -> str:
        body = text.lstrip()
        if any(word.startswith(body) for word in ("to=", _CHANNEL, _START)):
            self._held = text
            return ""
        is_header = any(body.startswith(word) for word in ("to=", _CHANNEL, _START))
        self._where = "header" if is_header else "text"
        return text

    def _seek(self, text: str) -> str:
        """Between two messages."""
        place, tag = first_of(text, (_START, _CHANNEL))
        if place < 0:
            self._held = text[len(text) - may_begin(text, (_START, _CHANNEL)) :]
            return ""
        self._where, self._header = "header", ""
        return text[place + len(tag) if tag == _START else place :]

    def _read_header(self, text: str, pieces: list[Piece]) -> str:
        place = text.find(_MESSAGE)
        if place < 0:
            self._held = text
            return ""
        header = text[:place]
        channel, recipient = _NAME.search(header), _RECIPIENT.search(header)
        name = "" if recipient is None else recipient[1].removeprefix(_FUNCTIONS)
        if name in self._functions:
            self._where, self._has_arguments = "call", False
            pieces.append(Piece(name=name))
        else:
            self._where = "thought" if channel is not None and channel[1] == "analysis" else "text"
            if self._where in self._told:
                pieces += self._tell("\n")
        return text[place + len(_MESSAGE) :]

    def _read_message(self, text: str, pieces: list[Piece]) -> str:
        place, tag = first_of(text, _ENDS)
        if place < 0:
            size = may_begin(text, _ENDS)
            pieces += self._tell(text[: len(text) - size])
            self._held = text[len(text) - size :]
            return ""
        pieces += [*self._tell(text[:place]), *self._end()]
        self._where = "between"
        return text[place if tag in (_START, _CHANNEL) else place + len(tag) :]

    def _tell(self, text: str) -> list[Piece]:
        if not text:
            return []
        if self._where == "call":
            self._has_arguments = True
            return [Piece(arguments=text)]
        self._told.add(self._where)
        return [Piece(reasoning=text) if self._where == "thought" else Piece(text)]

    def _end(self) -> list[Piece]:
        """A message ends. A call always has an object of arguments."""
        if self._where != "call":
            return []
        return [] if self._has_arguments else [Piece(arguments="{}")]


FORMAT = ToolFormat(
    make=HarmonyParser,
    tags=(_MESSAGE, _CHANNEL, "<|constrain|>", *_ENDS),
    is_taught=lambda template: _CHANNEL in template and _MESSAGE in template,
    has_channels=True,
)
