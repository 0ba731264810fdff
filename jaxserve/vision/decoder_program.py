"""Decodes files of pictures, whose bytes somebody made up. The standard library and Pillow alone."""

import io
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")

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
        return ImageOps.exif_transpose(picture).convert("RGB")
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
