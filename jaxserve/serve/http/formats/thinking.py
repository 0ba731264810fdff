"""Thoughts between two tags at the beginning of an answer, before whatever format the calls behind them have.

Most templates write the opening tag into the prompt, so that the answer begins within the thought; the end of the
prompt says so. White space around the tags belongs to neither.
"""

from jaxserve.serve.http.formats.base import AnswerParser, Piece, ThinkingFormat


class ThinkingParser:
    """Belongs to one sequence. `inner` reads what follows the thought. `has_begun`: the answer begins within it."""

    def __init__(self, thinking: ThinkingFormat, inner: AnswerParser, *, has_begun: bool) -> None:
        self._format = thinking
        self._inner = inner
        self._has_begun = has_begun
        self._where = "before"  # or inside, behind, after
        self._held = ""
        self._told = False

    def push(self, text: str) -> list[Piece]:
        if self._where == "after":
            return self._inner.push(text)
        text, self._held = self._held + text, ""
        pieces: list[Piece] = []
        if self._where == "before":
            text = self._begin(text)
        if self._where == "inside":
            text = self._think(text, pieces)
        if self._where == "behind":
            text = text.lstrip()
            if not text:
                return pieces
            self._where = "after"
        if self._where == "after":
            pieces += self._inner.push(text)
        return pieces

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._where == "inside" or (self._where == "before" and self._has_begun):
            return [Piece(reasoning=held)] if held.strip() else []
        return [*(self._inner.push(held) if held else []), *self._inner.finish()]

    def _begin(self, text: str) -> str:
        body = text.lstrip()
        if self._format.open.startswith(body) and body != self._format.open:
            self._held = text
            return ""
        if body.startswith(self._format.open):
            self._where = "inside"
            return body[len(self._format.open) :]
        self._where = "inside" if self._has_begun else "after"
        return text

    def _think(self, text: str, pieces: list[Piece]) -> str:
        close = self._format.close
        place = text.find(close)
        if place >= 0:
            self._tell(text[:place].rstrip(), pieces)
            self._where = "behind"
            return text[place + len(close) :]
        size = next((n for n in range(len(close) - 1, 0, -1) if text.endswith(close[:n])), 0)
        shown = text[: len(text) - size].rstrip()
        self._held = text[len(shown) :]
        self._tell(shown, pieces)
        return ""

    def _tell(self, text: str, pieces: list[Piece]) -> None:
        if not self._told:
            text = text.lstrip()
        if text:
            self._told = True
            pieces.append(Piece(reasoning=text))


QWEN3 = ThinkingFormat(open="<think>", close="</think>", is_taught=lambda template: "</think>" in template)
# Its template opens the thought in some versions and leaves that to the model in others; it always thinks.
DEEPSEEK_R1 = ThinkingFormat(
    open="<think>",
    close="</think>",
    is_taught=lambda template: "</think>" in template and "<｜Assistant｜>" in template,  # noqa: RUF001  (so they are)
    always=True,
)
MISTRAL = ThinkingFormat(open="[THINK]", close="[/THINK]", is_taught=lambda template: "[THINK]" in template)
