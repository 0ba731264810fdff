"""From the bytes of a picture file to its pixels, without trusting the bytes.

What can be refused by the header of a file, or by counting, is refused before it is decoded (`decoder_program`).
"""

import functools
import importlib.util
import warnings
from typing import TYPE_CHECKING

from jaxserve.errors import InvalidRequest
from jaxserve.vision.decoder_program import Refused, check_pixels, decode, upright

if TYPE_CHECKING:
    from PIL.Image import Image


def is_installed() -> bool:
    """Whether Pillow is there, which reads all files."""
    return importlib.util.find_spec("PIL") is not None


def open_picture(source: "bytes | Image", max_source_pixels: int, max_scans: int) -> "Image":
    """The picture upright, in RGB, as transformers loads it: transparency is dropped, of an animation the first frame
    counts.

    Args:
      source: a PNG, JPEG, WebP or GIF file, or a picture that is open.
      max_source_pixels: rows times columns that may be decoded.
      max_scans: of a JPEG.

    Raises InvalidRequest for other formats, broken files, and what is beyond the limits.
    """
    silence_pillow()
    try:
        if isinstance(source, bytes):
            return decode(source, max_source_pixels, max_scans)
        check_pixels(source, max_source_pixels)
        return upright(source)
    except Refused as error:
        raise InvalidRequest(str(error)) from error


@functools.cache
def silence_pillow() -> None:
    """Once for the process, since filters of warnings are no matter of a thread: Pillow would warn of sizes, whose
    limit is the caller's, and of transparency, which is dropped."""
    from PIL import Image

    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
    warnings.filterwarnings("ignore", "Palette images with Transparency", category=UserWarning)
