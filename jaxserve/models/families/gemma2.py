"""Gemma 2: Gemma with norms before and after each sub-block, and with soft caps on scores and on logits.

Scores have a scale of their own, and every other layer a sliding window.
"""

import dataclasses

from jaxserve.models.decoder_config import DecoderConfig, NormPlace
from jaxserve.models.families import gemma, llama, olmo2
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig, read_layer_types
from jaxserve.models.weight_rules import Rule

_LAYER = "model.layers.{layer}"
NORMS = (
    Rule(f"{_LAYER}.input_layernorm.weight", "layers.{layer}.attention_norm.weight", "embed"),
    Rule(f"{_LAYER}.pre_feedforward_layernorm.weight", "layers.{layer}.mlp_norm.weight", "embed"),
    *olmo2.NORMS_AFTER,
)
WEIGHTS = (*llama.EMBEDDINGS, *NORMS, *llama.ATTENTION, *llama.MLP)
# transformers reads the other name, hidden_activation, and chooses a cache by itself.
INERT = ("hidden_act", "cache_implementation")


def adapt(config: HfConfig) -> DecoderConfig:
    """From a Gemma2Config. Without `layer_types` the first layer has a window, the second none, and so on."""
    num_layers, size = config.integer("num_hidden_layers"), config.integer("sliding_window", 4096)
    config.require("sliding_window_size", None, size)  # an older name, which files have beside the newer
    kinds = read_layer_types(config, num_layers) or ["sliding_attention", "full_attention"] * num_layers
    decoder = gemma.adapt_any(
        config,
        activation=config.activation("hidden_activation", "gelu_pytorch_tanh"),
        windows=[size if kind == "sliding_attention" else None for kind in kinds[:num_layers]],
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        soft_cap=config.number_or_off("attn_logit_softcapping", 50.0),
        norms=(NormPlace.BEFORE, NormPlace.AFTER),
    )
    return dataclasses.replace(decoder, logit_soft_cap=config.number_or_off("final_logit_softcapping", 30.0))


FAMILY = Family(architecture="Gemma2ForCausalLM", adapt=adapt, weights=WEIGHTS, inert=INERT)
