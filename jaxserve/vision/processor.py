"""`PictureProcessor`, what a family of vision models does to pictures and prompts; and the lookup of processors.

A processor of a family derives from it in a file beside this one, and has a line in the registry.
"""

import abc
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.values.content import Picture, PlacedPicture
from jaxserve.values.registry import Registry
from jaxserve.vision.decoding import Decoders, TimeAllowed

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")

_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PictureLimits:
    """What a request may ask for.

    Attributes:
      max_pixels: a larger picture is scaled down to that, where the family scales at all; None: the checkpoint's limit.
      max_source_pixels: rows times columns of a file that is decoded.
      max_scans: of a JPEG that is decoded.
      decode_s: processor time to decode all pictures of a request.
      decode_bytes: memory to decode one, as address space of its process.
      max_pictures: of a prompt.
    """

    max_pixels: int | None = None
    max_source_pixels: int = 25_000_000
    max_scans: int = 100
    decode_s: float = 5.0
    decode_bytes: int = 2**31
    max_pictures: int = 16


class Positions(NamedTuple):
    """What turns the queries and keys of a prompt: int32 [3, S] of (frame, row, column), and what to add to the number
    of a later token to have its position, which is three times the same."""

    of_tokens: np.ndarray
    delta: int


class PictureProcessor(abc.ABC):
    """Made once for a model; its methods may be called by several threads at once.

    Attributes:
      placeholder_id: the token that stands for a picture, once before `expand` and `num_tokens` times behind it.
      limits: as they were given.
      mean, std: of each channel, which the tower subtracts from and divides pixels by, once they are in 0..1.
      max_patches: of the largest picture that `process` can return.
      max_tokens: of the largest picture.
      takes: `image_processor_type` of preprocessor_config.json that mean what this class does.
    """

    takes: ClassVar[tuple[str, ...]] = ()

    placeholder_id: int
    limits: PictureLimits
    mean: tuple[float, ...]
    std: tuple[float, ...]
    max_patches: int
    max_tokens: int

    def __init__(self, limits: PictureLimits) -> None:
        """Starts nothing."""
        self.limits = limits
        self._decoders = Decoders(
            max_pixels=limits.max_source_pixels,
            max_scans=limits.max_scans,
            seconds=limits.decode_s,
            memory_bytes=limits.decode_bytes,
        )

    @classmethod
    @abc.abstractmethod
    def create(
        cls, config: Mapping[str, Any], preprocessor: Mapping[str, Any], limits: PictureLimits, origin: str
    ) -> "PictureProcessor":
        """Of parsed config.json and preprocessor_config.json. Raises CheckpointError for what is not implemented."""

    @abc.abstractmethod
    def patches(self, picture: "Image") -> tuple[np.ndarray, tuple[int, int, int]]:
        """Pixels in 0..255 of an RGB picture, resized and cut: uint8 [patches, values], and the grid."""

    @abc.abstractmethod
    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Placeholders of a picture with that grid of patches."""

    def check_count(self, num_pictures: int) -> None:
        """Raises InvalidRequest for more pictures than a request may have; to be asked before any is decoded."""
        if num_pictures > self.limits.max_pictures:
            raise InvalidRequest(
                f"the request has {num_pictures} pictures, but a request may have {self.limits.max_pictures} "
                "(vision.max_pictures); send fewer"
            )

    def for_caller(self, has_left: Callable[[], bool], work: Callable[[], T]) -> Callable[[], T]:
        """`work`, to be done on any thread, for a caller that may leave: then decoding in it raises CancelledError."""
        return self._decoders.for_caller(has_left, work)

    def begin(self) -> "Callable[[bytes | Image], Picture]":
        """`process` for the pictures of one request, which share the time that may be taken for them. It raises
        CancelledError when the caller has left."""
        return functools.partial(self._process, self._decoders.allow())

    def process(self, source: "bytes | Image") -> Picture:
        """The picture of a file (PNG, JPEG, WebP, GIF), or of an open one, as the only one of its request.

        Raises InvalidRequest for a file that is none, is broken, has an extreme shape, or is beyond the limits.
        """
        return self.begin()(source)

    def _process(self, allowed: TimeAllowed, source: "bytes | Image") -> Picture:
        pixels, grid = self.patches(self._decoders.open(source, allowed))
        assert len(pixels) <= self.max_patches, (grid, self.max_patches)
        data = np.ascontiguousarray(pixels).tobytes()
        # How pixels are read joins the digest, so that it means the same in every process that shares pages.
        facts = (type(self).__name__, self.mean, self.std, grid)
        digest = hashlib.sha256(repr(facts).encode() + b"\0" + data).digest()
        return Picture(digest=digest, grid=grid, num_tokens=self.num_tokens(grid), pixels=data)

    def expand(
        self, token_ids: Sequence[int], pictures: Sequence[Picture]
    ) -> tuple[list[int], tuple[PlacedPicture, ...]]:
        """The prompt with each placeholder repeated for all tokens of its picture, and where the pictures lie.

        To be called for every prompt of a model with pictures, also where there are none: a placeholder that somebody
        wrote as text would have no picture. Raises InvalidRequest unless there are as many placeholders as pictures.
        """
        self.check_count(len(pictures))
        found = sum(token == self.placeholder_id for token in token_ids)
        if found != len(pictures):
            raise InvalidRequest(
                f"the prompt has {found} placeholders of pictures (token {self.placeholder_id}), but the request has "
                f"{len(pictures)} pictures; the chat template writes one for each picture, and no text may hold one"
            )
        expanded: list[int] = []
        placed: list[PlacedPicture] = []
        for token in token_ids:
            if token != self.placeholder_id:
                expanded.append(token)
                continue
            picture = pictures[len(placed)]
            placed.append(PlacedPicture(picture, len(expanded)))
            expanded += [token] * picture.num_tokens
        return expanded, tuple(placed)

    def positions(self, num_tokens: int, placed: Sequence[PlacedPicture]) -> Positions | None:
        """Of a prompt of `num_tokens` as `expand` returns it; None in families whose tokens are simply counted."""
        del num_tokens, placed
        return None


PICTURE_PROCESSORS: Registry[type[PictureProcessor]] = Registry(
    "picture processor",
    "jaxserve.picture_processors",
    {
        "LlavaForConditionalGeneration": "jaxserve.vision.clip:LlavaProcessor",
        "Qwen2VLForConditionalGeneration": "jaxserve.vision.qwen2_vl:Qwen2VLProcessor",
        "Qwen2_5_VLForConditionalGeneration": "jaxserve.vision.qwen2_vl:Qwen2VLProcessor",
    },
)


def takes_pictures(config: Mapping[str, Any]) -> bool:
    """Whether the model of a parsed config.json has a processor here."""
    names = config.get("architectures")
    return isinstance(names, list) and bool(names) and names[0] in PICTURE_PROCESSORS


def find_processor(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], limits: PictureLimits, origin: str
) -> PictureProcessor | None:
    """That of a parsed config.json and preprocessor_config.json in the directory `origin`; None: the model takes no
    pictures.

    Raises CheckpointError for a processor or values that are not implemented. It needs no Pillow: `process` does.
    """
    if not takes_pictures(config):
        return None
    name = config["architectures"][0]
    found, kind = PICTURE_PROCESSORS.get(name), preprocessor.get("image_processor_type")
    if kind not in found.takes:
        raise CheckpointError(
            f"{origin}: image_processor_type is {kind!r}, which is not known for {name}; known: "
            f"{', '.join(found.takes)}"
        )
    return found.create(config, preprocessor, limits, origin)


def read_preprocessor(directory: Path) -> Mapping[str, Any]:
    """The fields of preprocessor_config.json, or those that a newer processor_config.json has for pictures.

    Raises CheckpointError where the directory has neither, or one that is no JSON object.
    """
    for name in _FILES:
        file = directory / name
        if not file.is_file():
            continue
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
        value = value.get("image_processor", value) if isinstance(value, dict) else value
        if not isinstance(value, dict):
            raise CheckpointError(f"{file} holds a {type(value).__name__}, but must hold a JSON object")
        return value
    raise CheckpointError(
        f"{directory} has no {' or '.join(_FILES)}; a model that takes pictures needs it to know their sizes"
    )
