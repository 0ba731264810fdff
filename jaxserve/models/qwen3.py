"""Qwen 3: Llama with a norm on each head of q and k, a head dimension of its own, and optional sliding windows.

The weight table is Llama's with two more rows.
"""

import dataclasses

from jaxserve.models import llama
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.family import Family, Rule
from jaxserve.models.hf_config import HfConfig, read_layer_windows

_ATTENTION = "model.layers.{layer}.self_attn"
WEIGHTS = (
    *llama.WEIGHTS,
    Rule(f"{_ATTENTION}.q_norm.weight", "layers.{layer}.attention.q_norm.weight", "head_dim -> head_dim"),
    Rule(f"{_ATTENTION}.k_norm.weight", "layers.{layer}.attention.k_norm.weight", "head_dim -> head_dim"),
)


def adapt(config: HfConfig) -> DecoderConfig:
    """From a Qwen3Config. An absent `head_dim` means 128 there."""
    config.require("mlp_bias", False, None)
    base = llama.adapt(config, default_head_dim=128)
    return dataclasses.replace(base, qk_norm=True, windows=read_layer_windows(config, base.num_layers))


FAMILY = Family(architecture="Qwen3ForCausalLM", adapt=adapt, weights=WEIGHTS, ignored=llama.IGNORED)
