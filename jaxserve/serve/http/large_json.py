"""JSON of megabytes, read in pieces between which other threads have their turn.

A parser of C gives Python's interpreter to nobody until it has ended: a tenth of a second for a body of four megabytes,
in which the event loop stands still, on whatever thread the body is read. Here numpy looks for the brackets and commas
outside of texts, a block at a time, and the parser gets runs of items that are whole. Values and refusals are those of
the parser: what is not well-formed is so within one of the pieces.
"""

import re
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pydantic_core

PIECE_BYTES = 2**16  # of text that is parsed without a break: about a millisecond
_BLOCK_BYTES = 2**18  # that numpy looks at without a break, likewise
_MOST_DEPTH = 201  # that the parser takes
_OTHER, _QUOTE, _ESCAPE, _COMMA, _OPEN, _CLOSE = range(6)
_KINDS = np.zeros(256, np.uint8)
for _characters, _kind in ((b'"', _QUOTE), (b"\\", _ESCAPE), (b",", _COMMA), (b"[{", _OPEN), (b"]}", _CLOSE)):
    _KINDS[list(_characters)] = _kind
_STEPS = np.zeros(6, np.int32)
_STEPS[[_OPEN, _CLOSE]] = 1, -1
_BLANKS = b" \t\n\r"
_NAME = re.compile(rb'[ \t\n\r]*("[^"\\]*(?:\\.[^"\\]*)*")[ \t\n\r]*:', re.DOTALL)


def parse_json(text: bytes) -> Any:
    """What pydantic's parser makes of UTF-8 JSON without Infinity and NaN. Any thread. Raises ValueError."""
    if len(text) <= PIECE_BYTES:
        return _parse(text)
    marks = _find_marks(text)
    if marks.depths.size and int(marks.depths.max()) > _MOST_DEPTH:
        raise ValueError(f"it has lists or objects in each other more than {_MOST_DEPTH} deep")
    if marks.depths.size and (int(marks.depths.min()) < 0 or marks.depths[-1] != 0):
        raise ValueError("it has a bracket without its other half")
    return _value(text, 0, len(text), marks)


def _parse(text: bytes) -> Any:
    # The parser's table of texts that it has seen costs more than it saves where all of them differ: twice the time.
    return pydantic_core.from_json(text, allow_inf_nan=False, cache_strings="none")


class _Marks(NamedTuple):
    """The brackets and commas outside of texts, in their order: `places` in the text, `kinds`, and `depths`, how many
    brackets are open behind each. All [N]."""

    places: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.uint8]
    depths: npt.NDArray[np.int32]

    def between(self, start: int, end: int) -> "_Marks":
        """Those of a range of their numbers."""
        return _Marks(self.places[start:end], self.kinds[start:end], self.depths[start:end])


def _find_marks(text: bytes) -> _Marks:
    found: list[_Marks] = []
    in_text, is_escaped, depth = 0, False, 0  # at the beginning of a block
    for start in range(0, len(text), _BLOCK_BYTES):
        size = min(_BLOCK_BYTES, len(text) - start)
        kinds = _KINDS[np.frombuffer(text, np.uint8, size, start)]
        if is_escaped:
            kinds[0] = _OTHER
        places = np.flatnonzero(kinds)
        kinds = kinds[places]
        is_escaped = _drop_escaped(places, kinds, size)
        texts = np.cumsum(kinds == _QUOTE) + in_text
        outside = np.flatnonzero((kinds >= _COMMA) & (texts % 2 == 0))
        in_text = int(texts[-1]) % 2 if texts.size else in_text
        depths = np.cumsum(_STEPS[kinds[outside]], dtype=np.int32) + np.int32(depth)
        depth = int(depths[-1]) if depths.size else depth
        found.append(_Marks(places[outside] + start, kinds[outside], depths))
    return _Marks(*(np.concatenate(each) for each in zip(*found, strict=True)))


def _drop_escaped(places: npt.NDArray[np.int64], kinds: npt.NDArray[np.uint8], size: int) -> bool:
    """Takes quotes behind an escape out of `kinds`. Returns whether what follows the block is escaped."""
    escapes = np.flatnonzero(kinds == _ESCAPE)
    if not escapes.size:
        return False
    where = places[escapes]
    begins = np.maximum.accumulate(np.where(np.diff(where, prepend=-2) != 1, where, -1))
    active = (where - begins) % 2 == 0  # the second of two is itself escaped
    behind = np.minimum(escapes[active] + 1, places.size - 1)
    kinds[behind[(places[behind] == where[active] + 1) & (kinds[behind] == _QUOTE)]] = _OTHER
    return bool(active[-1]) and int(where[-1]) == size - 1


def _value(text: bytes, start: int, end: int, marks: _Marks) -> Any:
    """The value between two places. `marks`: those in it. Raises ValueError."""
    if end - start <= PIECE_BYTES or marks.places.size < 2:
        return _piece(text, start, end)
    first, last = int(marks.places[0]), int(marks.places[-1])
    inside = marks.depths[1:-1]
    depth = marks.depths[0]
    if (
        text[start:first].strip(_BLANKS)
        or text[last + 1 : end].strip(_BLANKS)
        or text[first : first + 1] + text[last : last + 1] not in (b"[]", b"{}")
        or bool((inside < depth).any())
    ):
        raise ValueError(f"it is not well-formed between the bytes {start} and {end}")
    commas = np.flatnonzero((marks.kinds[1:-1] == _COMMA) & (inside == depth)) + 1
    cuts = np.concatenate(([0], commas, [marks.places.size - 1]))  # numbers of the marks around the items
    places = marks.places[cuts]
    is_list = text[first : first + 1] == b"["
    items: list[Any] = []
    fields: dict[str, Any] = {}
    number, count = 0, cuts.size - 1
    while number < count:
        behind = int(np.searchsorted(places, places[number] + PIECE_BYTES, "right")) - 1
        behind = max(behind, number + 1)
        low, high = int(places[number]) + 1, int(places[behind])
        within = marks.between(int(cuts[number]) + 1, int(cuts[behind]))
        if behind == number + 1 and high - low > PIECE_BYTES:  # one that is large
            if is_list:
                items.append(_value(text, low, high, within))
            else:
                name = _NAME.match(text, low, high)
                if name is None:
                    raise ValueError(f"it has no name of a field at the byte {low}")
                fields[_parse(name[1])] = _value(text, name.end(), high, within)
        elif is_list:
            some = _piece(text, low, high, b"[", b"]")
            if len(some) != behind - number and not (count == 1 and not some):
                raise ValueError(f"it has a comma too many at the byte {low}")
            items += some
        else:
            some = _piece(text, low, high, b"{", b"}")
            if not some and count > 1:
                raise ValueError(f"it has a comma too many at the byte {low}")
            fields |= some
        number = behind
    return items if is_list else fields


def _piece(text: bytes, start: int, end: int, opening: bytes = b"", closing: bytes = b"") -> Any:
    try:
        return _parse(opening + text[start:end] + closing)
    except ValueError as error:
        what = str(error).partition(" at line ")[0]
        raise ValueError(f"{what} between the bytes {start} and {end}") from error
