"""Decoding when every id stands for a fixed run of bytes.

It is not left to the tokenizer libraries: both turn a whole run of byte pieces into U+FFFD when its end is incomplete,
which takes back characters that a stream has already shown. Here only the incomplete end is replaced (the
"maximal subpart" practice of the Unicode Standard, section 3.9), so that decoding a prefix is a prefix of the decoding.
"""

import dataclasses
import re
from collections.abc import Sequence

SPACE_MARK = "\u2581"  # sentencepiece's character for a space
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def piece_bytes(piece: str) -> bytes:
    """Bytes of one sentencepiece-style piece: `<0x0A>` is one byte, U+2581 is a space."""
    if piece.startswith("<0x") and (match := _BYTE_PIECE.match(piece)):
        return bytes([int(match[1], 16)])
    return piece.replace(SPACE_MARK, " ").encode("utf-8")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PieceTable:
    """Bytes by id; an id outside the table has no text.

    `strip_leading_space` undoes the space that encoding puts before the first word.
    """

    pieces: tuple[bytes, ...]
    special_ids: frozenset[int]
    strip_leading_space: bool

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        pieces, size, skipped = self.pieces, len(self.pieces), self.special_ids if skip_special_tokens else frozenset()
        data = b"".join([pieces[i] for i in ids if i not in skipped and 0 <= i < size])
        text = data.decode("utf-8", errors="replace")
        return text[1:] if self.strip_leading_space and text.startswith(" ") else text

    def token_text(self, token_id: int) -> str:
        if not 0 <= token_id < len(self.pieces):
            return ""
        return self.pieces[token_id].decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""
