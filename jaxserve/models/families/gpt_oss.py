"""gpt-oss: experts with biases and a clamped activation in every layer, sinks, and windows on every other layer.

The names below are those of bfloat16 checkpoints. Experts of the published ones are MXFP4 (`quantised.mxfp4`).
"""

import dataclasses

from jaxserve.models.decoder_config import DecoderConfig, ExpertSpec
from jaxserve.models.families import llama, mixtral
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig, read_layer_types, read_rope
from jaxserve.models.weight_rules import Rule

_LAYER, _MLP = "model.layers.{layer}", "layers.{layer}.mlp"
# Columns of gate and up lie by turns, and matrices with the inputs before the outputs.
WEIGHTS = (
    *llama.EMBEDDINGS,
    *llama.NORMS,
    *llama.ATTENTION,
    Rule(f"{_LAYER}.self_attn.sinks", "layers.{layer}.attention.sinks", "heads"),
    Rule(f"{_LAYER}.mlp.router.weight", f"{_MLP}.router", "router embed"),
    Rule(f"{_LAYER}.mlp.router.bias", f"{_MLP}.router_bias", "router"),
    Rule(f"{_LAYER}.mlp.experts.gate_up_proj", f"{_MLP}.gate_up", "experts embed (expert_mlp gate_up)"),
    Rule(f"{_LAYER}.mlp.experts.gate_up_proj_bias", f"{_MLP}.gate_up_bias", "experts (expert_mlp gate_up)"),
    Rule(f"{_LAYER}.mlp.experts.down_proj", f"{_MLP}.down", "experts expert_mlp embed"),
    Rule(f"{_LAYER}.mlp.experts.down_proj_bias", f"{_MLP}.down_bias", "router embed"),
)


def adapt(config: HfConfig) -> DecoderConfig:
    """From a GptOssConfig. Without `layer_types` the layers with even numbers have the window, as in transformers."""
    num_layers = config.integer("num_hidden_layers")
    kinds = read_layer_types(config, num_layers) or ["sliding_attention", "full_attention"] * num_layers
    window = config.integer("sliding_window", 128)
    count, per_token = mixtral.read_counts(config, "num_local_experts", "num_experts")
    if config.number("swiglu_alpha", 1.702) != 1.702:
        config.fail(f"swiglu_alpha is {config.get('swiglu_alpha')!r}, which is not supported (only 1.702)")
    experts = ExpertSpec(
        count=count,
        per_token=per_token,
        size=config.integer("intermediate_size"),
        router_bias=True,
        bias=True,
        limit=config.number("swiglu_limit", 7.0),
    )
    if config.get("rope_scaling") is None and config.get("rope_parameters") is None:
        config.fail(
            "rope_scaling is missing, and readers differ on what that means for gpt-oss; set it in model.overrides: "
            "the published models have yarn, and rope_type default is no scaling"
        )
    bias = config.flag("attention_bias", True)
    base = llama.adapt(
        config,
        default_head_dim=64,
        default_eps=1e-5,
        rope=read_rope(config, config.heads(64).head_dim, default_theta=150_000.0),
        windows=[window if kind == "sliding_attention" else None for kind in kinds[:num_layers]],
        mlp=experts,
        sinks=True,
        qkv_bias=bias,
        out_bias=bias,
    )
    return dataclasses.replace(base, norm=dataclasses.replace(base.norm, round_first=False))


FAMILY = Family(
    architecture="GptOssForCausalLM",
    adapt=adapt,
    weights=WEIGHTS,
    inert=(*mixtral.INERT, "experts_per_token", "initial_context_length"),
)
