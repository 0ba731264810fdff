"""LLaVA-1.5: Llama, and CLIP's tower without its last block, over pictures of one size; two products join them.

Liu et al., 2024. The tower's first hidden state belongs to no patch, and no token is made of it.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, UInt8

from jaxserve.kernels.activations import ACTIVATIONS
from jaxserve.models.decoder_config import DecoderConfig, MlpSpec, NormKind, NormSpec
from jaxserve.models.families import llama
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig
from jaxserve.models.layers import Norm, Projection
from jaxserve.models.sharding import param
from jaxserve.models.vision_tower import TowerConfig, TowerFamily, VisionTower, full_attention
from jaxserve.models.weight_rules import Rule

_CLIP = "vision_tower.vision_model"
_BLOCK, _TARGET = f"{_CLIP}.encoder.layers.{{layer}}", "blocks.{layer}"
_HEADS = "(heads head_dim)"
_WEIGHTS = (
    Rule(f"{_CLIP}.embeddings.class_embedding", "first", "embed"),
    Rule(f"{_CLIP}.embeddings.patch_embedding.weight", "patches.kernel", "embed channel row column"),
    Rule(f"{_CLIP}.embeddings.position_embedding.weight", "positions", "position embed"),
    Rule(f"{_CLIP}.pre_layrnorm.weight", "norm.weight", "embed"),
    Rule(f"{_CLIP}.pre_layrnorm.bias", "norm.bias", "embed"),
    *(
        Rule(f"{_BLOCK}.{source}.{kind}", f"{_TARGET}.{target}.{kind}", "embed")
        for source, target in (("layer_norm1", "attention_norm"), ("layer_norm2", "mlp_norm"))
        for kind in ("weight", "bias")
    ),
    *(
        Rule(f"{_BLOCK}.self_attn.{name}_proj.{kind}", f"{_TARGET}.qkv.{target}", axes, f"tower_{name}")
        for name in ("q", "k", "v")
        for kind, target, axes in (("weight", "kernel", f"{_HEADS} embed"), ("bias", "bias", _HEADS))
    ),
    Rule(f"{_BLOCK}.self_attn.out_proj.weight", f"{_TARGET}.out.kernel", f"embed {_HEADS}"),
    Rule(f"{_BLOCK}.self_attn.out_proj.bias", f"{_TARGET}.out.bias", "embed"),
    Rule(f"{_BLOCK}.mlp.fc1.weight", f"{_TARGET}.mlp.up.kernel", "mlp embed"),
    Rule(f"{_BLOCK}.mlp.fc1.bias", f"{_TARGET}.mlp.up.bias", "mlp"),
    Rule(f"{_BLOCK}.mlp.fc2.weight", f"{_TARGET}.mlp.down.kernel", "embed mlp"),
    Rule(f"{_BLOCK}.mlp.fc2.bias", f"{_TARGET}.mlp.down.bias", "embed"),
    Rule("multi_modal_projector.linear_1.weight", "up.kernel", "mlp embed"),
    Rule("multi_modal_projector.linear_1.bias", "up.bias", "mlp"),
    Rule("multi_modal_projector.linear_2.weight", "down.kernel", "out mlp"),
    Rule("multi_modal_projector.linear_2.bias", "down.bias", "out"),
)
# The blocks behind the one whose output counts, the norm behind all, and the numbers of positions.
_UNUSED = rf"{_CLIP}\.(encoder\.layers\.\d+\..*|post_layernorm\.\w+|embeddings\.position_ids)"
# Published files leave out what is as in Llama 7B.
_TEXT = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_VISION_INERT = ("projection_dim", "vocab_size", "initializer_factor")


class LlavaTower(VisionTower):
    """See `VisionTower`. One hidden state is before those of the patches."""

    def __init__(self, config: TowerConfig, mean: Sequence[float], std: Sequence[float], dtype: DTypeLike) -> None:
        super().__init__(config, mean, std, dtype)
        assert config.grid is not None
        width, out, num_patches = config.width, config.out_size, config.grid[0] * config.grid[1]
        self.first = param(jnp.zeros(width, dtype), ("embed",))
        self.positions = param(jnp.zeros((1 + num_patches, width), dtype), ("position", "embed"))
        self.norm = Norm((width,), ("embed",), config.norm, dtype)
        self.up = Projection((width,), (out,), ("mlp", "embed"), True, dtype)
        self.down = Projection((out,), (out,), ("out", "mlp"), True, dtype)

    @staticmethod
    def inputs(config: TowerConfig, grid: tuple[int, int, int], bucket: int) -> Mapping[str, np.ndarray]:
        """See `VisionTower.inputs`."""
        assert config.grid == grid[1:] and bucket == grid[1] * grid[2], (config.grid, grid, bucket)
        return {}

    def __call__(self, pixels: UInt8[Array, "P V"], inputs: Mapping[str, Array]) -> Float[Array, "M D"]:
        """See `VisionTower.__call__`."""
        del inputs
        x = jnp.concatenate([self.first[...][None], self.patches(pixels)])
        x = self.norm(x + self.positions[...])
        attend = full_attention(jnp.int32(x.shape[0]))
        for index, block in enumerate(self.blocks):
            with jax.named_scope(f"block_{index}"):
                x = block(x, None, attend)
        with jax.named_scope("projector"):
            return self.down(ACTIVATIONS["gelu"](self.up(x[1:])))


def adapt(config: HfConfig) -> DecoderConfig:
    """From a LlavaConfig, whose text is a Llama."""
    text = config.table("text_config", inert=("pretraining_tp",), defaults=_TEXT)
    if text is None:
        config.fail("field 'text_config' is missing")
    if text.get("model_type", "llama") != "llama":
        config.fail(f"the model_type of text_config is {text.get('model_type')!r}, but only llama is supported")
    decoder = llama.adapt(text)
    tied = config.flag("tie_word_embeddings", False) or decoder.tied_embeddings
    return dataclasses.replace(decoder, tied_embeddings=tied)


def adapt_tower(config: HfConfig) -> TowerConfig:
    """From the `vision_config` of a LlavaConfig: a CLIPVisionConfig."""
    vision = config.table("vision_config", inert=_VISION_INERT)
    if vision is None:
        config.fail("field 'vision_config' is missing")
    if vision.get("model_type") != "clip_vision_model":
        config.fail(f"the model_type of vision_config is {vision.get('model_type')!r}; only clip_vision_model is known")
    vision.require("num_channels", 3)
    config.require("vision_feature_select_strategy", "default")
    config.require("projector_hidden_act", "gelu")
    config.require("multimodal_projector_bias", True)
    layers, layer = vision.integer("num_hidden_layers", 12), config.get("vision_feature_layer", -2)
    if not isinstance(layer, int) or not -layers <= layer <= layers:
        config.fail(f"vision_feature_layer is {layer!r:.80}, but must be a number from {-layers} to {layers}")
    text = config.table("text_config")
    assert text is not None, "adapt has checked it"
    size, patch_size = vision.integer("image_size", 224), vision.integer("patch_size", 32)
    width, heads = vision.integer("hidden_size", 768), vision.integer("num_attention_heads", 12)
    return TowerConfig(
        width=width,
        num_heads=width // vision.head_dim(width, heads),
        num_layers=layer if layer >= 0 else layers + 1 + layer,  # hidden states are counted from the embeddings on
        mlp=MlpSpec(
            size=vision.integer("intermediate_size", 3072),
            gated=False,
            activation=vision.activation(default="quick_gelu"),
            bias=True,
        ),
        norm=NormSpec(kind=NormKind.LAYER, eps=vision.number("layer_norm_eps", 1e-5), bias=True),
        patch_size=patch_size,
        out_size=text.integer("hidden_size"),
        grid=(size // patch_size, size // patch_size),
        module=LlavaTower,
    )


FAMILY = Family(
    architecture="LlavaForConditionalGeneration",
    adapt=adapt,
    weights=tuple(dataclasses.replace(rule, source=f"language_model.{rule.source}") for rule in llama.WEIGHTS),
    ignored=(r"(vision_tower|multi_modal_projector)\..*",),
    spellings=((r"vision_tower\.(?!vision_model\.)", f"{_CLIP}."),),
    # Sizes that follow from others; the last is of training.
    inert=("image_token_index", "image_token_id", "image_seq_length", "ignore_index", "vocab_size", "pad_token_id"),
    tower=TowerFamily(
        adapt=adapt_tower, weights=_WEIGHTS, owns=r"(vision_tower|multi_modal_projector)\..*", ignored=(_UNUSED,)
    ),
)
