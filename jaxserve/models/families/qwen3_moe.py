"""Qwen 3 with experts: Qwen 3, where some layers, most often all, have experts and none that all tokens go through."""

from jaxserve.models.decoder_config import DecoderConfig, ExpertSpec, QkNorm
from jaxserve.models.families import llama, mixtral, qwen2_moe, qwen3
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig, read_switched_window

WEIGHTS = (*qwen2_moe.WEIGHTS, *qwen3.QK_NORMS)


def adapt(config: HfConfig) -> DecoderConfig:
    """From a Qwen3MoeConfig. A window, where it is switched on, is on every layer; `max_window_layers` says nothing."""
    config.require("mlp_bias", False, None)
    count, per_token = mixtral.read_counts(config, "num_experts", "num_local_experts")
    experts = ExpertSpec(
        count=count,
        per_token=per_token,
        size=config.integer("moe_intermediate_size"),
        renormalise=config.flag("norm_topk_prob", False),
        activation=config.activation(),
    )
    windows = (read_switched_window(config),) * config.integer("num_hidden_layers")
    return qwen2_moe.with_experts(config, llama.adapt(config, windows=windows, qk_norm=QkNorm.HEAD), experts)


FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    adapt=adapt,
    weights=WEIGHTS,
    inert=(*qwen2_moe.INERT, "max_window_layers"),
)
