"""Qwen2.5-VL: Qwen2-VL with a tower whose blocks attend in windows, but for a few, and have RMS norms and gates.

Bai et al., 2025. Patches go through the tower in the order of their windows.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, UInt8

from jaxserve.models.decoder_config import MlpSpec, NormSpec
from jaxserve.models.families import llama
from jaxserve.models.families.qwen2_vl import (
    ATTENTION,
    INERT,
    MERGER,
    OWNS,
    PATCHES,
    SPELLINGS,
    adapt,
    check_heads,
    read_theta,
    read_vision,
)
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig
from jaxserve.models.vision_tower import (
    Merger,
    TowerConfig,
    TowerFamily,
    VisionTower,
    axial_table,
    full_attention,
    grid_positions,
    window_attention,
)
from jaxserve.models.weight_rules import Rule

_BLOCK, _MLP = "visual.blocks.{layer}", "blocks.{layer}.mlp"
_WEIGHTS = (
    PATCHES,
    *ATTENTION,
    Rule(f"{_BLOCK}.mlp.gate_proj.weight", f"{_MLP}.gate_up.kernel", "mlp embed", "gate"),
    Rule(f"{_BLOCK}.mlp.up_proj.weight", f"{_MLP}.gate_up.kernel", "mlp embed", "up"),
    Rule(f"{_BLOCK}.mlp.gate_proj.bias", f"{_MLP}.gate_up.bias", "mlp", "gate"),
    Rule(f"{_BLOCK}.mlp.up_proj.bias", f"{_MLP}.gate_up.bias", "mlp", "up"),
    Rule(f"{_BLOCK}.mlp.down_proj.weight", f"{_MLP}.down.kernel", "embed mlp"),
    Rule(f"{_BLOCK}.mlp.down_proj.bias", f"{_MLP}.down.bias", "embed"),
    *MERGER,
)


class Qwen25VLTower(VisionTower):
    """See `VisionTower`."""

    def __init__(self, config: TowerConfig, mean: Sequence[float], std: Sequence[float], dtype: DTypeLike) -> None:
        super().__init__(config, mean, std, dtype)
        self.merger = Merger(config, dtype)

    @staticmethod
    def inputs(config: TowerConfig, grid: tuple[int, int, int], bucket: int) -> Mapping[str, np.ndarray]:
        """See `VisionTower.inputs`. `order`: the patch that is at each place; `restore`: the place of each token."""
        frames, rows, columns = grid
        rows, columns = rows // config.merge, columns // config.merge
        assert config.window is not None
        side = config.window // config.merge // config.patch_size  # tokens
        row, column = np.indices((rows, columns)).reshape(2, -1)
        of_frame = (row // side) * -(-columns // side) + column // side  # the window of each token
        window = np.concatenate([of_frame + frame * (of_frame.max() + 1) for frame in range(frames)])
        order = np.argsort(window, kind="stable")
        per_token = config.merge**2
        num_patches, num_tokens = len(order) * per_token, bucket // per_token
        places = np.arange(bucket, dtype=np.int32)
        places[:num_patches] = (order[:, None] * per_token + np.arange(per_token)).reshape(-1)
        windows = np.full(bucket, -1, np.int32)
        windows[:num_patches] = np.repeat(window[order], per_token)
        restore = np.arange(num_tokens, dtype=np.int32)
        restore[order] = np.arange(len(order))
        return {
            "positions": grid_positions(config, grid, bucket)[places],
            "order": places,
            "windows": windows,
            "restore": restore,
            "count": np.asarray(num_patches, np.int32),
        }

    def __call__(self, pixels: UInt8[Array, "P V"], inputs: Mapping[str, Array]) -> Float[Array, "M D"]:
        """See `VisionTower.__call__`."""
        x = self.patches(jnp.take(pixels, inputs["order"], axis=0))
        full = full_attention(inputs["count"])
        windowed = window_attention(inputs["windows"], self.config.window_patches)
        table = axial_table(self.config, inputs["positions"])
        for index, block in enumerate(self.blocks):
            with jax.named_scope(f"block_{index}"):
                x = block(x, table, full if index in self.config.full_layers else windowed)
        return jnp.take(self.merger(x), inputs["restore"], axis=0)


def adapt_tower(config: HfConfig) -> TowerConfig:
    """From the `vision_config` of a Qwen2_5_VLConfig."""
    vision = read_vision(config)
    width, heads = vision.integer("hidden_size", 1280), vision.integer("num_heads", 16)
    patch_size, merge = vision.integer("patch_size", 14), vision.integer("spatial_merge_size", 2)
    window, layers = vision.integer("window_size", 112), vision.integer("depth", 32)
    if window % (patch_size * merge):
        vision.fail(f"window_size {window} is no multiple of the {patch_size * merge} pixels of a token")
    full = vision.get("fullatt_block_indexes", [7, 15, 23, 31])
    if not isinstance(full, list) or not all(isinstance(layer, int) and 0 <= layer < layers for layer in full):
        vision.fail(f"fullatt_block_indexes is {full!r:.80}, but must be a list of numbers from 0 to {layers - 1}")
    return TowerConfig(
        width=width,
        num_heads=check_heads(vision, width, heads),
        num_layers=layers,
        mlp=MlpSpec(size=vision.integer("intermediate_size", 3420), activation=vision.activation(), bias=True),
        norm=NormSpec(eps=1e-6, round_first=True),
        patch_size=patch_size,
        frames=vision.integer("temporal_patch_size", 2),
        merge=merge,
        out_size=vision.integer("out_hidden_size", 3584),
        rope_theta=read_theta(vision),
        window=window,
        full_layers=tuple(full),
        module=Qwen25VLTower,
    )


FAMILY = Family(
    architecture="Qwen2_5_VLForConditionalGeneration",
    adapt=adapt,
    weights=llama.WEIGHTS,
    ignored=(OWNS,),
    spellings=SPELLINGS,
    inert=INERT,
    tower=TowerFamily(adapt=adapt_tower, weights=_WEIGHTS, owns=OWNS),
)
