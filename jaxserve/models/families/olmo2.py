"""OLMo 2: Llama with each sub-block normalised after it and not before, and queries and keys of a token normalised over
all heads together.

The norms multiply by their weight before they round, unlike Llama's.
"""

import dataclasses

from jaxserve.models.decoder_config import DecoderConfig, NormPlace, NormSpec, QkNorm
from jaxserve.models.families import llama
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig
from jaxserve.models.weight_rules import Rule

_LAYER = "model.layers.{layer}"
_ATTENTION = "layers.{layer}.attention"
NORMS_AFTER = (
    Rule(f"{_LAYER}.post_attention_layernorm.weight", "layers.{layer}.attention_after.weight", "embed"),
    Rule(f"{_LAYER}.post_feedforward_layernorm.weight", "layers.{layer}.mlp_after.weight", "embed"),
)
WEIGHTS = (
    *llama.EMBEDDINGS,
    *NORMS_AFTER,
    *llama.ATTENTION,
    *llama.MLP,
    Rule(f"{_LAYER}.self_attn.q_norm.weight", f"{_ATTENTION}.q_norm.weight", "(heads head_dim)"),
    Rule(f"{_LAYER}.self_attn.k_norm.weight", f"{_ATTENTION}.k_norm.weight", "(kv_heads head_dim)"),
)


def adapt(config: HfConfig) -> DecoderConfig:
    """From an Olmo2Config."""
    config.require("mlp_bias", False, None)
    decoder = llama.adapt(config, norms=(NormPlace.AFTER,), qk_norm=QkNorm.JOINT)
    return dataclasses.replace(decoder, norm=NormSpec(eps=config.number("rms_norm_eps", 1e-5)))


FAMILY = Family(architecture="Olmo2ForCausalLM", adapt=adapt, weights=WEIGHTS)
