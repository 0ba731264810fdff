"""What travels between the processes: one small frame, in bytes.

Owns the kinds, the layout and the checksum of frames. Refuses sockets and meaning. Why a checksum where TCP has one:
TCP's is sixteen bits and does not cover the memory of the hosts, and a plan with one wrong page id is a wrong answer
for somebody else.
"""

import enum
import json
import struct
import zlib
from typing import Any, NamedTuple

from jaxserve.errors import PlanCorrupt

_HEADER = struct.Struct("<BqI")  # kind, seq, CRC-32 of kind, seq and payload


class Kind(enum.IntEnum):
    """What a frame says. L: sent by process 0, F: sent by the others."""

    HELLO = 1  # F: who I am; seq is the process number
    MEET = 2  # F: I have come to a stage of the start, with these facts and numbers
    WELCOME = 3  # L: all have come, the facts agree, these are the numbers
    REFUSED = 4  # L: the processes do not fit together, or you are not wanted; text
    PLAN = 5  # L: step plan number seq
    REPORT = 6  # F: the digest of all steps up to seq
    BEAT = 7  # both: I am alive
    BYE = 8  # L: plan seq was the last
    FAILED = 9  # both: I give up; text


class Frame(NamedTuple):
    kind: Kind
    seq: int = 0
    payload: bytes = b""

    @property
    def text(self) -> str:
        """The payload of REFUSED and FAILED."""
        return self.payload.decode(errors="replace")

    @property
    def fields(self) -> dict[str, Any]:
        """The payload of HELLO, MEET and WELCOME."""
        return json.loads(self.payload)


def make_frame(kind: Kind, content: str | dict[str, Any], seq: int = 0) -> Frame:
    """A frame of text or of JSON fields."""
    text = content if isinstance(content, str) else json.dumps(content)
    return Frame(kind, seq, text.encode())


def encode(frame: Frame) -> bytes:
    """The bytes of a frame."""
    return _HEADER.pack(frame.kind, frame.seq, _checksum(*frame)) + frame.payload


def decode(raw: bytes) -> Frame:
    """The frame of these bytes. Raises PlanCorrupt when they are not what `encode` made."""
    if len(raw) < _HEADER.size:
        raise PlanCorrupt(f"a frame of {len(raw)} bytes arrived, too short for any; the network damages data")
    kind, seq, checksum = _HEADER.unpack_from(raw)
    payload = raw[_HEADER.size :]
    if _checksum(kind, seq, payload) != checksum:
        raise PlanCorrupt(f"frame {seq} of kind {kind} arrived damaged (CRC-32); the network or a memory is faulty")
    return Frame(Kind(kind), seq, payload)


def _checksum(kind: int, seq: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(struct.pack("<Bq", kind, seq)))
