"""Frames, the messages between the processes: their kinds, their layout in bytes, and the limits of their sizes.

Frames of a connection that has been admitted are sealed (`handshake.Session`), which finds damage as well as forgery:
TCP's checksum is sixteen bits and does not cover the memory of the hosts, and a plan with one wrong page id is a wrong
answer for a user.
"""

import enum
import json
import struct
from typing import Any, NamedTuple

from jaxserve.errors import PlanCorrupt

_HEADER = struct.Struct("<Bq")  # kind, seq

MAX_GREETING_BYTES = 512  # of a frame before its sender has proved anything
MAX_REPORT_BYTES = 2**20  # of a frame to process 0: facts of the start are the longest, some kilobytes
_MAX_TEXT = 2**14  # characters of a reason


class Kind(enum.IntEnum):
    """The kind of a frame. L: sent by process 0, F: sent by the others."""

    HELLO = 1  # F: the sender's facts and a nonce; seq is the process number
    CHALLENGE = 2  # L: a nonce
    PROOF = 3  # F: proof of the secret
    ADMITTED = 4  # L: proof of the secret by process 0; all following frames are sealed
    MEET = 5  # F: the sender has reached a stage of the start, with these facts and numbers
    WELCOME = 6  # L: all processes have reached it, the facts agree, these are the numbers
    REFUSED = 7  # L: the processes do not fit together, or the receiver is not admitted; text
    PLAN = 8  # L: step plan number seq
    REPORT = 9  # F: the digest of all steps up to seq
    BEAT = 10  # both: the sender is alive
    BYE = 11  # L: plan seq was the last
    FAILED = 12  # both: the sender gives up; text
    ORDER = 13  # L: order number seq for the store of each process, see `store_orders`
    OUTCOME = 14  # F: what the sender has done of order seq


class Frame(NamedTuple):
    kind: Kind
    seq: int = 0
    payload: bytes = b""

    @property
    def text(self) -> str:
        """The payload of REFUSED and FAILED."""
        return self.payload.decode(errors="replace")

    def take(self, **types: type) -> list[Any]:
        """Values of the JSON object in the payload, by name and type. Raises PlanCorrupt when one is not there."""
        try:
            fields = json.loads(self.payload)
        except (ValueError, RecursionError) as error:
            raise PlanCorrupt(f"a frame of kind {self.kind.name} holds no JSON: {error}") from error
        if not isinstance(fields, dict):
            raise PlanCorrupt(f"a frame of kind {self.kind.name} holds no JSON object")
        for name, wanted in types.items():
            if type(fields.get(name)) is not wanted:
                raise PlanCorrupt(f"a frame of kind {self.kind.name} has no {name!r} of type {wanted.__name__}")
        return [fields[name] for name in types]


def make_frame(kind: Kind, content: str | dict[str, Any], seq: int = 0) -> Frame:
    """A frame of text or of JSON fields."""
    text = content[:_MAX_TEXT] if isinstance(content, str) else json.dumps(content)
    return Frame(kind, seq, text.encode())


def encode(frame: Frame) -> bytes:
    """The bytes of a frame."""
    return _HEADER.pack(frame.kind, frame.seq) + frame.payload


def decode(raw: bytes) -> Frame:
    """The frame of these bytes. Raises PlanCorrupt when they are none."""
    if len(raw) < _HEADER.size:
        raise PlanCorrupt(f"a frame of {len(raw)} bytes arrived, too short for any")
    kind, seq = _HEADER.unpack_from(raw)
    try:
        return Frame(Kind(kind), seq, raw[_HEADER.size :])
    except ValueError:
        raise PlanCorrupt(f"frame {seq} arrived with kind {kind}, which this version does not know") from None
