"""The program of the processes that decode pictures: it reads files that somebody made up, and may crash.

Decoders are native code, which no thread can interrupt, and which have had faults that the right bytes meet. So the
server gives each file to a process that has so much memory and so much time, and no more (`vision.decoding`). The
script imports the standard library and Pillow alone, so that it starts quickly.

A question is the length of a file and the seconds of processor time that it may take, then the file. An answer is a
kind, the seconds that were taken, and two numbers: of PIXELS the columns and rows, then the pixels, row by row, three
bytes each; of REFUSED the length of a text and 0, then the text; of FULL, where memory was short, 0 and 0.
"""

import importlib
import io
import json
import os
import re
import resource
import signal
import struct
import sys
import time
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
QUESTION = struct.Struct("<Qd")
ANSWER = struct.Struct("<BdII")
PIXELS, REFUSED, FULL = range(3)

_SHORTEST_S = 0.001  # a timer of 0 seconds would be none

# A marker of JPEG anywhere behind some place: the zero behind FF is of coded data, and FF fills up.
_MARKER = re.compile(rb"\xff([^\x00\xff])")
_ALONE = {0x01, *range(0xD0, 0xD9)}  # markers without a length: of arithmetic coding, of restarts, and of the beginning
_END, _SCAN = 0xD9, 0xDA


class Refused(Exception):
    """The file is not decoded; the text says why."""


def decode(data: bytes, max_pixels: int, max_scans: int) -> "Image":
    """The picture of a file, upright and in RGB.

    The header is read first: it says the format and the size, so that a file of some kilobytes that stands for
    gigabytes of pixels is refused before anything is decoded.

    Args:
      data: a PNG, JPEG, WebP or GIF file.
      max_pixels: rows times columns that may be decoded.
      max_scans: of a JPEG, each of which may pass over all of its pixels.

    Raises Refused for other formats, broken files, and what is beyond the limits. MemoryError passes through.
    """
    picture = _read_header(data)
    check_pixels(picture, max_pixels)
    if picture.format in ("JPEG", "MPO") and has_more_scans(data, max_scans):  # MPO: several of them in one file
        raise Refused(
            f"a picture is a JPEG of more than {max_scans} scans, which is the most that this server decodes "
            "(vision.max_scans); save it again, as other programs do"
        )
    return upright(picture)


def check_pixels(picture: "Image", max_pixels: int) -> None:
    """Raises Refused for a larger one."""
    width, height = picture.size
    if width * height > max_pixels:
        raise Refused(
            f"a picture of {width} x {height} pixels is more than the {max_pixels} pixels that this server decodes "
            "(vision.max_source_pixels); send a smaller one"
        )


def upright(picture: "Image") -> "Image":
    """As transformers loads it: turned as it says, in RGB; transparency is dropped, of an animation the first frame
    counts. Raises Refused for a broken one."""
    from PIL import ImageOps

    try:
        picture.load()
        turned = ImageOps.exif_transpose(picture)
        if turned.mode == "P" and isinstance(turned.info.get("transparency"), bytes):
            turned = turned.convert("RGBA")  # the same colours, of which Pillow warns on the direct way
        return turned.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:  # decoders of bytes that somebody made up fail in any way
        raise _broken(error) from error


def has_more_scans(data: bytes, limit: int) -> bool:
    """Whether a JPEG has more than `limit` scans, found as libjpeg finds them: it passes over what no marker begins,
    and over segments by their length."""
    at = scans = 0
    while (found := _MARKER.search(data, at)) is not None:
        at, marker = found.end(), found[1][0]
        if marker == _END:
            return False
        if marker in _ALONE:
            continue
        scans += marker == _SCAN
        if scans > limit:
            return True
        at += max(2, int.from_bytes(data[at : at + 2]))
    return False


def _read_header(data: bytes) -> "Image":
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise Refused(
            f"a picture of {len(data)} bytes is of none of the formats {', '.join(FORMATS)}, or its header is broken"
        ) from error
    except Image.DecompressionBombError as error:
        raise Refused(f"a picture has too many pixels: {error}; send a smaller one") from error
    except MemoryError:
        raise
    except Exception as error:  # as above
        raise _broken(error) from error


def _broken(error: Exception) -> Refused:
    return Refused(f"a picture cannot be decoded: {error}; is the file whole?")


def main(paths: list[str], memory_bytes: int, max_pixels: int, max_scans: int) -> None:
    """Serves until its input ends. `paths`: where Pillow is found. `memory_bytes`: of address space."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # elsewhere the limit is refused or ignored
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        bounded = memory_bytes if most == resource.RLIM_INFINITY else min(memory_bytes, most)
        resource.setrlimit(resource.RLIMIT_AS, (bounded, most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also in the middle of native code
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # for the server, which drains, and then ends this
        signal.signal(number, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # of sizes, which are limited here
    answers = os.dup(1)
    os.dup2(2, 1)  # text that a library prints is no answer
    sys.path[:] = paths
    for name in ("ImageOps", "PngImagePlugin", "JpegImagePlugin", "WebPImagePlugin", "GifImagePlugin"):
        importlib.import_module(f"PIL.{name}")  # not in the time of the first file
    header = bytearray(QUESTION.size)
    while _fill(memoryview(header)):
        size, seconds = QUESTION.unpack(header)
        signal.setitimer(signal.ITIMER_PROF, max(seconds, _SHORTEST_S))
        begin_s = time.process_time()
        kind, columns, rows, content = _answer(size, max_pixels, max_scans)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for part in (ANSWER.pack(kind, time.process_time() - begin_s, columns, rows), content):
            left = memoryview(part)
            while left:
                left = left[os.write(answers, left) :]
        del content, part, left  # the next file may need the memory


def _answer(size: int, max_pixels: int, max_scans: int) -> tuple[int, int, int, bytes]:
    """Its kind, its two numbers and its bytes. In any case all bytes of the file have been read."""
    unread = size
    try:
        data = bytearray(size)
        unread = 0
        if not _fill(memoryview(data)):
            sys.exit(0)  # the server has ended
        picture = decode(bytes(data), max_pixels, max_scans)
        return PIXELS, *picture.size, picture.tobytes()
    except Refused as error:
        text = str(error).encode(errors="replace")
        return REFUSED, len(text), 0, text
    except MemoryError:
        while unread:
            part = bytearray(min(unread, 1 << 16))
            if not _fill(memoryview(part)):
                sys.exit(0)
            unread -= len(part)
        return FULL, 0, 0, b""


def _fill(target: memoryview) -> bool:
    """Reads all of `target` from the input; false when that has ended before."""
    while target:
        count = os.readv(0, [target])
        if not count:
            return False
        target = target[count:]
    return True


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), *map(int, sys.argv[2:]))
