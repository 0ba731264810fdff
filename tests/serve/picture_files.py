"""Files of pictures that cost more than they look like, and decoders that do what a test wants."""

import struct
import textwrap
from pathlib import Path

import pytest

from jaxserve.vision import decoding


def jpeg_of_scans(scans: int, side: int) -> bytes:
    """A progressive JPEG of `side` x `side` grey pixels. Each of its scans, of some bytes, passes over all pixels, and
    all but the first two say nothing."""
    blocks = (-(-side // 8)) ** 2
    bits = ("0" + "1" * 14) * -(-blocks // 32_767)  # runs of 32,767 blocks that have ended
    bits += "1" * (-len(bits) % 8)
    ended = int(bits, 2).to_bytes(len(bits) // 8).replace(b"\xff", b"\xff\0")

    def table(kind: bytes, symbol: bytes) -> bytes:
        return b"\xff\xc4" + struct.pack(">H", 20) + kind + b"\x01" + bytes(15) + symbol

    def scan(tail: bytes, coded: bytes) -> bytes:
        return b"\xff\xda\0\x08\x01\x01\0" + tail + coded

    frame = struct.pack(">HBHHB", 11, 8, side, side, 1) + b"\1\x11\0"
    head = b"\xff\xd8\xff\xdb\0\x43\0" + b"\1" * 64 + b"\xff\xc2" + frame
    tables = table(b"\0", b"\0") + table(b"\x10", b"\xe0")
    first = scan(bytes(3), bytes(blocks // 8 + 1)) + scan(b"\1\x3f\1", ended)
    return head + tables + first + scan(b"\1\x3f\x10", ended) * (scans - 2) + b"\xff\xd9"


def use_program(monkeypatch: pytest.MonkeyPatch, directory: Path, body: str) -> None:
    """Has decoders start a program that has read a file as `data`, with `seconds` for it, and does `body` then."""
    head = """
        import os, signal, struct, sys
        def fill(size):
            found = b""
            while len(found) < size:
                part = os.read(0, size - len(found))
                if not part:
                    sys.exit(0)
                found += part
            return found
        def answer(kind, seconds, one, two, content=b""):
            os.write(1, struct.pack("<BdII", kind, seconds, one, two) + content)
        while True:
            size, seconds = struct.unpack("<Qd", fill(16))
            data = fill(size)
    """
    program = directory / "program.py"
    program.write_text(textwrap.dedent(head) + textwrap.indent(textwrap.dedent(body), "    "))
    monkeypatch.setattr(decoding, "_PROGRAM", program)
