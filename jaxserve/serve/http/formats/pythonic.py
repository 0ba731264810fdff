"""Calls as Python writes them, the format of Llama 4: `[get_weather(city="Paris", days=3), get_time()]`.

The calls are the whole answer, between `<|python_start|>` and `<|python_end|>` or without them, or there are none:
the beginning decides. They are told when the list is whole.
"""

import ast
import re
import warnings
from typing import Any

from jaxserve.serve.http.formats.base import Functions, Piece, ToolFormat, write_json
from jaxserve.serve.http.formats.call_scanner import BracketScanner

_START, _END = "<|python_start|>", "<|python_end|>"
_CALL = re.compile(r"\[\s*(?:([A-Za-z_][\w.]{0,63})\s*(\()?)?")
_WORDS = {"true": True, "false": False, "null": None}


class PythonicParser:
    """Belongs to one sequence."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._where = "beginning"  # or list, behind, text
        self._held = ""
        self._before = ""  # the tag and white space, in case that no calls follow
        self._list: list[str] = []
        self._scanner = BracketScanner("()[]{}", "\"'")

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        left, self._held = self._held + text, ""
        while left:
            if self._where == "beginning":
                left = self._begin(left)
            elif self._where == "list":
                left = self._read(left, pieces)
            elif self._where == "behind":
                left = self._seek(left)
            else:
                pieces.append(Piece(left))
                left = ""
        return pieces

    def finish(self) -> list[Piece]:
        """A list that was cut is text."""
        text = self._before + "".join(self._list) if self._where == "list" else self._held
        return [Piece(text)] if text.strip() and self._where != "behind" else []

    def _begin(self, text: str) -> str:
        body = text.lstrip()
        if _START.startswith(body):
            self._held = text
            return ""
        body = body.removeprefix(_START).lstrip()
        head = _CALL.match(body)
        if not body or (head is not None and head.end() == len(body)):
            self._held = text  # the name may go on
            return ""
        if head is None or head[2] is None or head[1] not in self._functions:
            self._where = "text"
            return text
        self._where, self._before = "list", text[: len(text) - len(body)]
        return body

    def _read(self, text: str, pieces: list[Piece]) -> str:
        size = self._scanner.push(text)
        self._list.append(text[:size])
        if not self._scanner.is_whole:
            return ""
        calls = _calls("".join(self._list), self._functions)
        if calls is None:
            self._where = "text"
            return self._before + "".join(self._list) + text[size:]
        self._where = "behind"
        pieces += [Piece(name=name, arguments=arguments) for name, arguments in calls]
        return text[size:]

    def _seek(self, text: str) -> str:
        """Behind the list: text that follows, without the closing tag."""
        body = text.lstrip()
        if _END.startswith(body):
            self._held = text
            return ""
        self._where = "text"
        return body.removeprefix(_END)


def _calls(text: str, functions: Functions) -> list[tuple[str, str]] | None:
    """None when the text is no list of calls of these functions."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes in texts that Python does not know
            tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List):
            return None
        found = [_call(node) for node in tree.elts]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return found if found and all(name in functions for name, _ in found) else None


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
        raise ValueError("no call with named arguments")
    arguments = {str(word.arg): _value(word.value) for word in node.keywords}
    return ast.unparse(node.func), write_json(arguments)


def _value(node: ast.expr) -> Any:
    """A literal, in Python's words or in those of JSON."""
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {str(_value(k)): _value(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("no value of JSON")
    return value


FORMAT = ToolFormat(
    make=PythonicParser,
    tags=(_START, _END),
    is_taught=lambda template: _START in template or "[func_name1(" in template,
)
