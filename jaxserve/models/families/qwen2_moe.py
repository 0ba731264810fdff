"""Qwen 1.5 and 2 with experts: Qwen 2, where some layers have experts, and one that all tokens go through.

Also the rules and the choice of layers that Qwen 3 with experts shares.
"""

import dataclasses

from jaxserve.models.decoder_config import DecoderConfig, ExpertSpec
from jaxserve.models.families import llama, mixtral
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig, read_layer_windows
from jaxserve.models.weight_rules import Rule

_HF, _MLP = "model.layers.{layer}.mlp", "layers.{layer}.mlp"
WEIGHTS = (
    *llama.WEIGHTS,
    Rule(f"{_HF}.gate.weight", f"{_MLP}.router", "router embed"),
    Rule(f"{_HF}.experts.{{expert}}.gate_proj.weight", f"{_MLP}.gate_up", "expert_mlp embed", "gate"),
    Rule(f"{_HF}.experts.{{expert}}.up_proj.weight", f"{_MLP}.gate_up", "expert_mlp embed", "up"),
    Rule(f"{_HF}.experts.{{expert}}.down_proj.weight", f"{_MLP}.down", "embed expert_mlp"),
    Rule(f"{_HF}.shared_expert.gate_proj.weight", f"{_MLP}.shared.gate_up", "mlp embed", "gate"),
    Rule(f"{_HF}.shared_expert.up_proj.weight", f"{_MLP}.shared.gate_up", "mlp embed", "up"),
    Rule(f"{_HF}.shared_expert.down_proj.weight", f"{_MLP}.shared.down", "embed mlp"),
    Rule(f"{_HF}.shared_expert_gate.weight", f"{_MLP}.shared.gate", "one embed"),
)
INERT = mixtral.INERT


def with_experts(config: HfConfig, dense: DecoderConfig, experts: ExpertSpec) -> DecoderConfig:
    """The same decoder with experts in each `decoder_sparse_step`th layer that `mlp_only_layers` does not name."""
    step = config.integer("decoder_sparse_step", 1)
    plain = config.get("mlp_only_layers", [])
    if not isinstance(plain, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in plain):
        config.fail(f"mlp_only_layers is {plain!r}, but must be a list of numbers of layers")
    layers = (
        layer if i in plain or (i + 1) % step else dataclasses.replace(layer, mlp=experts)
        for i, layer in enumerate(dense.layers)
    )
    return dataclasses.replace(dense, layers=tuple(layers))


def adapt(config: HfConfig) -> DecoderConfig:
    """From a Qwen2MoeConfig.

    Transformers and the older code disagree on which layers a window is, where `layer_types` does not say: so it must.
    """
    config.require("attention_bias", None, True)
    config.require("mlp_bias", False, None)
    num_layers = config.integer("num_hidden_layers")
    if config.flag("use_sliding_window", False) and config.get("layer_types") is None:
        config.fail("use_sliding_window is true, but layer_types is missing: which layers have the window is not known")
    count, per_token = mixtral.read_counts(config, "num_experts", "num_local_experts")
    experts = ExpertSpec(
        count=count,
        per_token=per_token,
        size=config.integer("moe_intermediate_size"),
        renormalise=config.flag("norm_topk_prob", False),
        activation=config.activation(),
        shared_size=config.integer("shared_expert_intermediate_size"),
    )
    qkv_bias = config.flag("qkv_bias", True)
    windows = read_layer_windows(config, num_layers)
    return with_experts(config, llama.adapt(config, windows=windows, qkv_bias=qkv_bias, out_bias=False), experts)


FAMILY = Family(architecture="Qwen2MoeForCausalLM", adapt=adapt, weights=WEIGHTS, inert=INERT)
