"""Pictures of LLaVA-1.5: the middle square of a picture, at the one size that CLIP's tower takes.

The reference is the processor of Hugging Face transformers that resizes with Pillow.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.vision.fields import Fields
from jaxserve.vision.processor import PictureLimits, PictureProcessor

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_ASPECT = 200  # the long side is scaled with the short one before it is cut off


class LlavaProcessor(PictureProcessor):
    """See `PictureProcessor`. Patches are row by row, each of them a token."""

    takes: ClassVar = ("CLIPImageProcessor", "CLIPImageProcessorFast")

    def __init__(
        self,
        *,
        placeholder_id: int,
        limits: PictureLimits,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        size: int,
        patch_size: int,
    ) -> None:
        """`size`: rows and columns of pixels of every resized picture."""
        super().__init__(limits)
        self.placeholder_id = placeholder_id
        self.mean = mean
        self.std = std
        self.size = size
        self.patch_size = patch_size
        self.max_tokens = self.max_patches = (size // patch_size) ** 2

    @classmethod
    def create(
        cls, config: Mapping[str, Any], preprocessor: Mapping[str, Any], limits: PictureLimits, origin: str
    ) -> "LlavaProcessor":
        """See `PictureProcessor.create`. `image_token_index` is the older name of `image_token_id`."""
        fields, model = Fields(preprocessor, origin), Fields(config, origin)
        vision = model.table("vision_config")
        size, patch_size = vision.integer("image_size", 224), vision.integer("patch_size", 32)
        fields.check_common(resample=3)  # bicubic
        fields.require("do_center_crop", True)
        fields.require("size", {"shortest_edge": size})
        fields.require("crop_size", {"height": size, "width": size})
        if limits.max_pixels is not None and limits.max_pixels < size**2:
            raise CheckpointError(
                f"{origin}: pictures have {size} x {size} pixels, more than the limit of {limits.max_pixels}; raise it"
            )
        return cls(
            placeholder_id=model.integer("image_token_index", model.integer("image_token_id", 32_000)),
            limits=limits,
            mean=fields.channels("image_mean"),
            std=fields.channels("image_std"),
            size=size,
            patch_size=patch_size,
        )

    def patches(self, picture: "Image") -> tuple[np.ndarray, tuple[int, int, int]]:
        """See `PictureProcessor.patches`. Values of a patch are [channels, rows, columns]."""
        from PIL.Image import Resampling

        width, height = picture.size
        if min(height, width) < 1 or max(height, width) > _MAX_ASPECT * min(height, width):
            raise InvalidRequest(
                f"a picture of {width} x {height} pixels is too thin: one side may be {_MAX_ASPECT} times the other"
            )
        long = int(self.size * max(height, width) / min(height, width))
        rows, columns = (long, self.size) if width <= height else (self.size, long)
        top, left = (rows - self.size) // 2, (columns - self.size) // 2
        resized = picture.resize((columns, rows), Resampling.BICUBIC)
        pixels = np.asarray(resized.crop((left, top, left + self.size, top + self.size)))
        side, count = self.patch_size, self.size // self.patch_size
        pixels = pixels[: count * side, : count * side].reshape(count, side, count, side, 3)
        return pixels.transpose(0, 2, 4, 1, 3).reshape(count * count, -1), (1, count, count)

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """See `PictureProcessor.num_tokens`."""
        return math.prod(grid)
