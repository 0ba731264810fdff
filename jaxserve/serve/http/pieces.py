"""Large answers, made and sent in pieces, so that the event loop is never held for long.

Python's interpreter runs one thread at a time, and serialises a text of JSON without a break: to write an answer of
fifty megabytes at once is a second in which no other client is served, on a thread as well. So the long lists of an
answer are written while they come (`WrittenList`), which also takes a tenth of the memory of their objects; the rest of
it is written in parts, between which others have their turn; and parts are sent as the client takes them.
"""

import asyncio
import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pydantic
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jaxserve.engine.shared_room import SharedRoom
from jaxserve.serve.http.errors import HttpRefusal
from jaxserve.serve.turns import Turns

ANSWERS = "jaxserve.answers"  # in the scope of a call: its `AnswersRoom`
PART_BYTES = 2**16  # a fraction of a millisecond of writing, and as much as a connection holds for its client
_ITEMS = 4096  # of a list of numbers or short texts, written at a time
_ANY: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(Any)


class WrittenList:
    """A list of an answer, whose items have been written as JSON. It stands where the list itself would."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # each of one item or more

    def add(self, items: Sequence[Any]) -> None:
        """Writes further items: of models the fields that were set."""
        if items:
            self._parts.append(_ANY.dump_json(items, exclude_unset=True)[1:-1])

    def extend(self, other: "WrittenList") -> None:
        """Adds the items of another list, whose text the two then share."""
        self._parts += other._parts

    def pieces(self) -> Iterator[bytes]:
        """Its JSON."""
        yield b"["
        for number, part in enumerate(self._parts):
            yield b"," + part if number else part
        yield b"]"


def json_pieces(value: Any) -> Iterator[bytes]:
    """JSON of an answer in pieces: byte for byte as pydantic writes it, of models the fields that were set."""
    if isinstance(value, WrittenList):
        yield from value.pieces()
    elif isinstance(value, pydantic.BaseModel):
        fields = value.model_fields_set
        yield from _object({name: getattr(value, name) for name in type(value).model_fields if name in fields})
    elif isinstance(value, Mapping):
        yield from _object(value)
    elif isinstance(value, list) and value and isinstance(value[0], pydantic.BaseModel | Mapping | list):
        for number, item in enumerate(value):
            yield b"," if number else b"["
            yield from json_pieces(item)
        yield b"]"
    elif isinstance(value, list) and len(value) > _ITEMS:
        for start in range(0, len(value), _ITEMS):
            yield b"," if start else b"["
            yield _ANY.dump_json(value[start : start + _ITEMS], exclude_unset=True)[1:-1]
        yield b"]"
    else:
        yield _ANY.dump_json(value, exclude_unset=True)


def _object(fields: Mapping[str, Any]) -> Iterator[bytes]:
    before = b"{"
    for name, value in fields.items():
        yield before + _ANY.dump_json(name) + b":"
        yield from json_pieces(value)
        before = b","
    yield b"}" if fields else b"{}"


def in_parts(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes, in parts of about `PART_BYTES`."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= PART_BYTES:
            yield b"".join(held)
            held.clear()
            size = 0
    if held:
        yield b"".join(held)


async def write_parts(turns: Turns, pieces: Iterable[bytes]) -> list[bytes]:
    """Has the parts of an answer made, each but the first in a turn of its own."""
    parts: list[bytes] = []
    making = in_parts(pieces)
    while (part := next(making, None)) is not None:
        parts.append(part)
        if len(part) >= PART_BYTES:
            await turns.next()
    return parts


async def json_answer(turns: Turns, body: Any, headers: Mapping[str, str] | None = None) -> Response:
    """An answer of JSON that may be large. `body`: as `json_pieces` takes it."""
    parts = await write_parts(turns, json_pieces(body))
    return PartsResponse(parts, {"content-type": "application/json", **(headers or {})})


class AnswersRoom:
    """The room that one caller has for answers that were made and that clients have not taken yet."""

    def __init__(self, room: SharedRoom[str], owner: str) -> None:
        self._room = room
        self._owner = owner

    def enter(self, size: int) -> None:
        """Takes room for an answer or an event. One alone always has it. Raises HttpRefusal."""
        if not self._room.enter(self._owner, size, at_any_rate=self._room.total == 0):
            raise HttpRefusal(
                503,
                f"there is no room for this answer of {size} bytes: answers that clients have not read may have "
                f"{self._room.most} bytes together (serve.http.max_answers_bytes) and yours have "
                f"{self._room.held(self._owner)}, of which {self._room.part(self._owner)} always have room; read "
                "those, and try again",
            )

    def leave(self, size: int) -> None:
        """Gives room back."""
        self._room.leave(self._owner, size)


async def send_parts(scope: Scope, parts: Sequence[bytes], send: Send, *, more: bool) -> None:
    """Sends the parts of an answer as its client takes them, and lets each go. `more`: others follow.

    The first part is sent at once; the others have their room until they are sent (`AnswersRoom`), if this call has
    come through the guard. Raises HttpRefusal before anything is sent.
    """
    left = collections.deque(parts)
    room: AnswersRoom | None = scope.get(ANSWERS) if len(parts) > 1 else None
    size = sum(map(len, parts))
    if room is not None:
        room.enter(size)
    try:
        while left:
            part = left.popleft()
            await send({"type": "http.response.body", "body": part, "more_body": more or bool(left)})
            if room is not None:
                room.leave(len(part))
                size -= len(part)
            if left:
                await asyncio.sleep(0)
    finally:
        if room is not None:
            room.leave(size)


class PartsResponse(Response):
    """An answer whose parts are sent one by one, and are let go when they have been sent."""

    def __init__(self, parts: list[bytes], headers: Mapping[str, str]) -> None:
        super().__init__(headers=headers)
        self.headers["content-length"] = str(sum(map(len, parts)))
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message | None = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}

        async def started_send(message: Message) -> None:
            nonlocal start
            if start is not None:
                first, start = start, None
                await send(first)
            await send(message)

        parts, self._parts = self._parts, []
        await send_parts(scope, parts, started_send, more=False)
