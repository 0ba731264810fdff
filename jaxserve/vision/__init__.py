"""Pictures of a request: checked, decoded and cut into patches; their placeholders and positions in a prompt. No JAX.

A front end (a thread of a door, `LLM`) asks the processor of its model for each request:

    pictures = [processor.process(data) for data in files]          # milliseconds of a thread each
    token_ids, placed = processor.expand(token_ids, pictures)       # placeholders repeated, and where pictures lie
    positions = processor.positions(len(token_ids), placed)         # [3, S] and delta; None: they follow each other

Keys of blocks take `PlacedPicture.span`. The scheduler knows digests and numbers; `runtime.towers` makes embeddings of
the pixels; `models.decoder.PictureInputs` says what a step takes of both.
"""

from jaxserve.vision.decoding import is_installed
from jaxserve.vision.processor import (
    PICTURE_PROCESSORS,
    PictureLimits,
    PictureProcessor,
    Positions,
    find_processor,
    read_preprocessor,
    takes_pictures,
)

__all__ = [
    "PICTURE_PROCESSORS",
    "PictureLimits",
    "PictureProcessor",
    "Positions",
    "find_processor",
    "is_installed",
    "read_preprocessor",
    "takes_pictures",
]
