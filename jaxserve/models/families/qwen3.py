"""Qwen 3: Llama with a norm on each head of q and k, a head dimension of its own, and optional sliding windows.

The weight table is Llama's with two more rows.
"""

from jaxserve.models.decoder_config import DecoderConfig, QkNorm
from jaxserve.models.families import llama
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig, read_layer_windows
from jaxserve.models.weight_rules import Rule

_ATTENTION = "model.layers.{layer}.self_attn"
QK_NORMS = (
    Rule(f"{_ATTENTION}.q_norm.weight", "layers.{layer}.attention.q_norm.weight", "head_dim"),
    Rule(f"{_ATTENTION}.k_norm.weight", "layers.{layer}.attention.k_norm.weight", "head_dim"),
)
WEIGHTS = (*llama.WEIGHTS, *QK_NORMS)


def adapt(config: HfConfig) -> DecoderConfig:
    """From a Qwen3Config. An absent `head_dim` means 128 there."""
    config.require("mlp_bias", False, None)
    windows = read_layer_windows(config, config.integer("num_hidden_layers"))
    return llama.adapt(config, default_head_dim=128, windows=windows, qk_norm=QkNorm.HEAD)


FAMILY = Family(architecture="Qwen3ForCausalLM", adapt=adapt, weights=WEIGHTS)
