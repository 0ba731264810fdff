"""From the bytes of a picture file to its pixels, without trusting the bytes.

The header is read first: it says the format and the size, so that a file of some kilobytes that stands for gigabytes of
pixels is refused before anything is decoded.
"""

import functools
import importlib.util
import io
import warnings
from typing import TYPE_CHECKING

from jaxserve.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def is_installed() -> bool:
    """Whether Pillow is there, which reads all files."""
    return importlib.util.find_spec("PIL") is not None


def open_picture(source: "bytes | Image", max_source_pixels: int) -> "Image":
    """The picture upright, in RGB, as transformers loads it: transparency is dropped, of an animation the first frame
    counts.

    Args:
      source: a PNG, JPEG, WebP or GIF file, or a picture that is open.
      max_source_pixels: rows times columns that may be decoded.

    Raises InvalidRequest for other formats, broken files, and more pixels.
    """
    silence_pillow()
    from PIL import ImageOps

    picture = _read_header(source) if isinstance(source, bytes) else source
    width, height = picture.size
    if width * height > max_source_pixels:
        raise InvalidRequest(
            f"a picture of {width} x {height} pixels is more than the {max_source_pixels} pixels that this server "
            "decodes; send a smaller one"
        )
    try:
        picture.load()
        return ImageOps.exif_transpose(picture).convert("RGB")
    except Exception as error:  # decoders of bytes that somebody made up fail in any way
        raise _broken(error) from error


def _read_header(data: bytes) -> "Image":
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise InvalidRequest(
            f"a picture of {len(data)} bytes is of none of the formats {', '.join(FORMATS)}, or its header is broken"
        ) from error
    except Image.DecompressionBombError as error:
        raise InvalidRequest(f"a picture has too many pixels: {error}; send a smaller one") from error
    except Exception as error:  # as above
        raise _broken(error) from error


@functools.cache
def silence_pillow() -> None:
    """Once for the process, since filters of warnings are no matter of a thread: Pillow would warn of sizes, whose
    limit is the caller's, and of transparency, which is dropped."""
    from PIL import Image

    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
    warnings.filterwarnings("ignore", "Palette images with Transparency", category=UserWarning)


def _broken(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"a picture cannot be decoded: {error}; is the file whole?")
