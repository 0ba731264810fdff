"""Mistral: Llama without biases, with one sliding window on every layer (or none, from v0.2 on).

The weight table is Llama's.
"""

from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.families import llama
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig


def adapt(config: HfConfig) -> DecoderConfig:
    """From a MistralConfig. An absent `sliding_window` means 4096 there; null means none."""
    config.require("attention_bias", False, None)
    config.require("mlp_bias", False, None)
    config.require("layer_types", None)  # that is the Ministral architecture
    window = None if config.is_null("sliding_window") else config.integer("sliding_window", 4096)
    return llama.adapt(config, windows=(window,) * config.integer("num_hidden_layers"))


FAMILY = Family(architecture="MistralForCausalLM", adapt=adapt, weights=llama.WEIGHTS)
