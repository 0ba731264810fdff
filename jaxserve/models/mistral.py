"""Mistral: Llama without biases, with one sliding window on every layer (or none, from v0.2 on).

The weight table is Llama's.
"""

import dataclasses

from jaxserve.models import llama
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig


def adapt(config: HfConfig) -> DecoderConfig:
    """From a MistralConfig. An absent `sliding_window` means 4096 there; null means none."""
    config.require("attention_bias", False, None)
    config.require("mlp_bias", False, None)
    config.require("layer_types", None)  # that is the Ministral architecture
    base = llama.adapt(config)
    if "sliding_window" in config.values and config.values["sliding_window"] is None:
        return base
    window = config.integer("sliding_window", 4096)
    return dataclasses.replace(base, windows=(window,) * base.num_layers)


FAMILY = Family(architecture="MistralForCausalLM", adapt=adapt, weights=llama.WEIGHTS, ignored=llama.IGNORED)
