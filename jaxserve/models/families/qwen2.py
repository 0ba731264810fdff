"""Qwen 2 and 2.5: Llama with biases on q, k and v, and sliding windows on the upper layers where switched on.

The weight table is Llama's.
"""

from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.families import llama
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig, read_layer_windows


def adapt(config: HfConfig) -> DecoderConfig:
    """From a Qwen2Config. The biases are part of the architecture, not a field."""
    config.require("attention_bias", None, True)
    config.require("mlp_bias", False, None)
    windows = read_layer_windows(config, config.integer("num_hidden_layers"))
    return llama.adapt(config, windows=windows, qkv_bias=True, out_bias=False)


FAMILY = Family(architecture="Qwen2ForCausalLM", adapt=adapt, weights=llama.WEIGHTS)
