"""Pictures of Qwen2-VL and Qwen2.5-VL: any size, in multiples of merged patches; tokens have three positions.

The reference is the processor of Hugging Face transformers that resizes with Pillow (Wang et al., 2024, section 2.1).
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from jaxserve.errors import InvalidRequest
from jaxserve.values.content import PlacedPicture
from jaxserve.vision.fields import Fields
from jaxserve.vision.processor import PictureLimits, PictureProcessor, Positions

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_ASPECT = 200


class Qwen2VLProcessor(PictureProcessor):
    """See `PictureProcessor`. Patches are in blocks of merge x merge, row by row; each block is one token."""

    takes: ClassVar = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast")

    def __init__(
        self,
        *,
        placeholder_id: int,
        limits: PictureLimits,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        min_pixels: int,
        max_pixels: int,
        patch_size: int = 14,
        merge_size: int = 2,
    ) -> None:
        """`min_pixels`, `max_pixels`: of the resized picture. `merge_size`: patches of a token, along each side."""
        super().__init__(limits)
        self.placeholder_id = placeholder_id
        self.mean = mean
        self.std = std
        self.min_pixels = min_pixels
        allowed = max_pixels if limits.max_pixels is None else min(max_pixels, limits.max_pixels)
        self.max_pixels = max(min_pixels, allowed)
        self.patch_size = patch_size
        self.merge_size = merge_size
        self.max_tokens = self._most_pixels() // self._token_side**2
        self.max_patches = self.max_tokens * merge_size**2

    @classmethod
    def create(
        cls, config: Mapping[str, Any], preprocessor: Mapping[str, Any], limits: PictureLimits, origin: str
    ) -> "Qwen2VLProcessor":
        """See `PictureProcessor.create`."""
        fields, model = Fields(preprocessor, origin), Fields(config, origin)
        fields.check_common(resample=3)  # bicubic
        size = fields.table("size")
        vision = model.table("vision_config")
        for name, value in (("patch_size", 14), ("temporal_patch_size", 2)):
            fields.require(name, value, vision.integer(name, value))
        fields.require("merge_size", vision.integer("spatial_merge_size", 2))
        return cls(
            placeholder_id=model.integer("image_token_id"),
            limits=limits,
            mean=fields.channels("image_mean"),
            std=fields.channels("image_std"),
            min_pixels=fields.integer("min_pixels", size.integer("shortest_edge", 56 * 56)),
            max_pixels=fields.integer("max_pixels", size.integer("longest_edge", 28 * 28 * 1280)),
            patch_size=vision.integer("patch_size", 14),
            merge_size=vision.integer("spatial_merge_size", 2),
        )

    @property
    def _token_side(self) -> int:
        return self.patch_size * self.merge_size

    def _most_pixels(self) -> int:
        """No resized picture has more: one within the limit, one whose short side is that of a token, or one scaled
        up, whose sides are rounded up."""
        side, longest = self._token_side, max(self.min_pixels, self.max_pixels)
        thin = side * (math.isqrt(_MAX_ASPECT * longest) + side)
        return max(self.max_pixels, thin, (math.isqrt(self.min_pixels) + side) ** 2)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of a picture once it is resized: multiples of a token's, within the limits of pixels where
        its shape permits, of nearly the same shape. Raises InvalidRequest for an aspect above 200."""
        if min(height, width) < 1 or max(height, width) > _MAX_ASPECT * min(height, width):
            raise InvalidRequest(
                f"a picture of {width} x {height} pixels is too thin: one side may be {_MAX_ASPECT} times the other"
            )
        side = self._token_side
        rows, columns = round(height / side) * side, round(width / side) * side
        if rows * columns > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(side, math.floor(height / shrink / side) * side)
            columns = max(side, math.floor(width / shrink / side) * side)
        elif rows * columns < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / side) * side, math.ceil(width * grow / side) * side
        return rows, columns

    def patches(self, picture: "Image") -> tuple[np.ndarray, tuple[int, int, int]]:
        """See `PictureProcessor.patches`. Values of a patch are [channels, rows, columns]."""
        from PIL.Image import Resampling

        rows, columns = self.resized(picture.height, picture.width)
        pixels = np.asarray(picture.resize((columns, rows), Resampling.BICUBIC))  # [rows, columns, 3]
        size, merge = self.patch_size, self.merge_size
        grid = (1, rows // size, columns // size)
        blocks = pixels.reshape(grid[1] // merge, merge, size, grid[2] // merge, merge, size, 3)
        return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(grid[1] * grid[2], -1), grid

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """See `PictureProcessor.num_tokens`."""
        return math.prod(grid) // self.merge_size**2

    def positions(self, num_tokens: int, placed: Sequence[PlacedPicture]) -> Positions:
        """See `PictureProcessor.positions`. Text is counted; a picture that begins at p has (p, p + row, p + column),
        and the text behind it begins at p + max(rows, columns)."""
        found = np.empty((3, num_tokens), np.int32)
        at = now = 0  # the token, and its position
        for picture, start in placed:
            found[:, at:start] = now + np.arange(start - at)
            now += start - at
            frames, rows, columns = picture.grid[0], *(size // self.merge_size for size in picture.grid[1:])
            at = start + picture.num_tokens
            found[:, start:at] = now + np.indices((frames, rows, columns)).reshape(3, -1)
            now += max(rows, columns)
        found[:, at:] = now + np.arange(num_tokens - at)
        return Positions(found, now - at)
