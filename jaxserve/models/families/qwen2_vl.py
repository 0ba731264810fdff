"""Qwen2-VL: Qwen2 whose tokens have three positions, and a tower of full attention over pictures of any size.

Wang et al., 2024. Pixels, placeholders and positions are in `vision.qwen2_vl`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Array, DTypeLike, Float, UInt8

from jaxserve.models.decoder_config import DecoderConfig, MlpSpec, NormKind, NormSpec, RopeConfig
from jaxserve.models.families import llama
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig, read_layer_windows, rope_of
from jaxserve.models.vision_tower import (
    Merger,
    TowerConfig,
    TowerFamily,
    VisionTower,
    axial_table,
    full_attention,
    grid_positions,
)
from jaxserve.models.weight_rules import Rule

_BLOCK, _TARGET = "visual.blocks.{layer}", "blocks.{layer}"
PATCHES = Rule("visual.patch_embed.proj.weight", "patches.kernel", "embed channel frame row column")
ATTENTION = (
    Rule(f"{_BLOCK}.norm1.weight", f"{_TARGET}.attention_norm.weight", "embed"),
    Rule(f"{_BLOCK}.norm2.weight", f"{_TARGET}.mlp_norm.weight", "embed"),
    Rule(f"{_BLOCK}.attn.qkv.weight", f"{_TARGET}.qkv.kernel", "(qkv heads head_dim) embed"),
    Rule(f"{_BLOCK}.attn.qkv.bias", f"{_TARGET}.qkv.bias", "(qkv heads head_dim)"),
    Rule(f"{_BLOCK}.attn.proj.weight", f"{_TARGET}.out.kernel", "embed (heads head_dim)"),
    Rule(f"{_BLOCK}.attn.proj.bias", f"{_TARGET}.out.bias", "embed"),
)
MERGER = (
    Rule("visual.merger.ln_q.weight", "merger.norm.weight", "embed"),
    Rule("visual.merger.mlp.0.weight", "merger.up.kernel", "mlp merged"),
    Rule("visual.merger.mlp.0.bias", "merger.up.bias", "mlp"),
    Rule("visual.merger.mlp.2.weight", "merger.down.kernel", "out mlp"),
    Rule("visual.merger.mlp.2.bias", "merger.down.bias", "out"),
)
_WEIGHTS = (
    PATCHES,
    *ATTENTION,
    Rule(f"{_BLOCK}.norm1.bias", f"{_TARGET}.attention_norm.bias", "embed"),
    Rule(f"{_BLOCK}.norm2.bias", f"{_TARGET}.mlp_norm.bias", "embed"),
    Rule(f"{_BLOCK}.mlp.fc1.weight", f"{_TARGET}.mlp.up.kernel", "mlp embed"),
    Rule(f"{_BLOCK}.mlp.fc1.bias", f"{_TARGET}.mlp.up.bias", "mlp"),
    Rule(f"{_BLOCK}.mlp.fc2.weight", f"{_TARGET}.mlp.down.kernel", "embed mlp"),
    Rule(f"{_BLOCK}.mlp.fc2.bias", f"{_TARGET}.mlp.down.bias", "embed"),
    Rule("visual.merger.ln_q.bias", "merger.norm.bias", "embed"),
    *MERGER,
)
OWNS = r"visual\..*"
# As transformers names them in memory, which some published files have kept.
SPELLINGS = ((r"model\.visual\.", "visual."), (r"model\.language_model\.", "model."))
INERT = ("vision_start_token_id", "vision_end_token_id", "vision_token_id", "image_token_id", "video_token_id")
VISION_INERT = ("spatial_patch_size", "tokens_per_second")  # the second is of films


class Qwen2VLTower(VisionTower):
    """See `VisionTower`."""

    def __init__(self, config: TowerConfig, mean: Sequence[float], std: Sequence[float], dtype: DTypeLike) -> None:
        super().__init__(config, mean, std, dtype)
        self.merger = Merger(config, dtype)

    @staticmethod
    def inputs(config: TowerConfig, grid: tuple[int, int, int], bucket: int) -> Mapping[str, np.ndarray]:
        """See `VisionTower.inputs`."""
        return {"positions": grid_positions(config, grid, bucket), "count": np.asarray(math.prod(grid), np.int32)}

    def __call__(self, pixels: UInt8[Array, "P V"], inputs: Mapping[str, Array]) -> Float[Array, "M D"]:
        """See `VisionTower.__call__`."""
        x, attend = self.patches(pixels), full_attention(inputs["count"])
        table = axial_table(self.config, inputs["positions"])
        for index, block in enumerate(self.blocks):
            with jax.named_scope(f"block_{index}"):
                x = block(x, table, attend)
        return self.merger(x)


def adapt(config: HfConfig) -> DecoderConfig:
    """From a Qwen2VLConfig, with the fields of the text in a table of their own or beside the others (older)."""
    text = config.table("text_config")
    if text is None:
        text = config
    windows = read_layer_windows(text, text.integer("num_hidden_layers"))
    rope = _read_rope(text, text.heads().head_dim)
    decoder = llama.adapt(text, windows=windows, rope=rope, qkv_bias=True, out_bias=False)
    tied = config.flag("tie_word_embeddings", False) or decoder.tied_embeddings
    return dataclasses.replace(decoder, tied_embeddings=tied)


def _read_rope(text: HfConfig, head_dim: int) -> RopeConfig:
    given = dict(text.get("rope_scaling") or text.get("rope_parameters") or {})
    sections = given.pop("mrope_section", None)
    kind = next((name for name in ("type", "rope_type") if given.get(name) == "mrope"), None)
    if kind is not None:
        given |= dict.fromkeys(("type", "rope_type"), "default")
    rope = rope_of(text, given, head_dim, 1e6)
    if (
        not isinstance(sections, list)
        or len(sections) != 3
        or not all(isinstance(n, int) and n >= 0 for n in sections)
        or sum(sections) != head_dim // 2
    ):
        text.fail(f"mrope_section is {sections!r:.80}, but must be three whole numbers that add up to {head_dim // 2}")
    return dataclasses.replace(rope, sections=tuple(sections))


def adapt_tower(config: HfConfig) -> TowerConfig:
    """From the `vision_config` of a Qwen2VLConfig."""
    vision = read_vision(config)
    width, heads = vision.integer("embed_dim", 1280), vision.integer("num_heads", 16)
    return TowerConfig(
        width=width,
        num_heads=check_heads(vision, width, heads),
        num_layers=vision.integer("depth", 32),
        mlp=MlpSpec(
            size=int(width * vision.number("mlp_ratio", 4)),
            gated=False,
            activation=vision.activation(default="quick_gelu"),
            bias=True,
        ),
        norm=NormSpec(kind=NormKind.LAYER, eps=1e-6, bias=True),
        patch_size=vision.integer("patch_size", 14),
        frames=vision.integer("temporal_patch_size", 2),
        merge=vision.integer("spatial_merge_size", 2),
        out_size=vision.integer("hidden_size", 3584),
        rope_theta=read_theta(vision),
        module=Qwen2VLTower,
    )


def read_vision(config: HfConfig) -> HfConfig:
    """The table of the tower."""
    vision = config.table("vision_config", inert=VISION_INERT)
    if vision is None:
        config.fail("field 'vision_config' is missing")
    vision.require("in_channels", 3, vision.get("in_chans", 3))
    vision.require("in_chans", 3)
    return vision


def check_heads(vision: HfConfig, width: int, heads: int) -> int:
    """`heads`, if rows and columns can turn the same number of pairs of each."""
    if width % (4 * heads):
        vision.fail(f"the width {width} is no multiple of 4 times the {heads} heads")
    return heads


def read_theta(vision: HfConfig) -> float:
    """The base of the frequencies of rows and columns."""
    given = vision.get("rope_parameters") or {}
    if set(given) - {"rope_type", "rope_theta"} or given.get("rope_type", "axial") != "axial":
        vision.fail(f"rope_parameters of the tower are {given!r:.80}, but only the axial type is supported")
    return vision.check_number("rope_theta", given.get("rope_theta", 10_000.0))


FAMILY = Family(
    architecture="Qwen2VLForConditionalGeneration",
    adapt=adapt,
    weights=llama.WEIGHTS,
    ignored=(OWNS,),
    spellings=SPELLINGS,
    inert=INERT,
    tower=TowerFamily(adapt=adapt_tower, weights=_WEIGHTS, owns=OWNS),
)
