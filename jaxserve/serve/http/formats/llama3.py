"""The format of Llama 3.1 and later: `{"name": "f", "parameters": {...}}` as a whole answer, more after ";" or ","."""

from jaxserve.serve.http.formats.base import Functions, Piece, ToolFormat
from jaxserve.serve.http.formats.call_scanner import Calls, State

_PYTHON_TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;,"


class Llama3Parser:
    """Calls are the whole answer, or there are none: decided by its first character."""

    def __init__(self, functions: Functions) -> None:
        self._calls = Calls(functions)
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._is_text:
                pieces.append(Piece(text))
                break
            if self._calls.reading:
                state, text = self._calls.push(text, pieces)
                self._is_text = state is State.TEXT
                continue
            text, self._held = self._held + text, ""
            text = self._begin(text)
        return pieces

    def _begin(self, text: str) -> str:
        body = text.lstrip(_BETWEEN)
        if _PYTHON_TAG.startswith(body) and body != _PYTHON_TAG:
            self._held = text
            return ""
        body = body.removeprefix(_PYTHON_TAG).lstrip()
        if not body:
            self._held = text
            return ""
        if body[0] == "{":
            self._calls.begin()
            return body
        self._is_text = True
        return text

    def finish(self) -> list[Piece]:
        pieces = self._calls.finish()
        if self._held.strip(_BETWEEN):
            pieces.append(Piece(self._held))
        self._held = ""
        return pieces


FORMAT = ToolFormat(
    make=Llama3Parser,
    tags=(_PYTHON_TAG,),
    is_taught=lambda template: _PYTHON_TAG in template or '"parameters"' in template,
)
