"""Mixtral: Mistral with experts in every layer, of which the two best renormalised ones take a token.

Also the rules and the reader that other families with experts share.
"""

from jaxserve.models.decoder_config import DecoderConfig, ExpertSpec
from jaxserve.models.families import llama
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig, read_rope
from jaxserve.models.weight_rules import Rule

_MOE, _MLP = "model.layers.{layer}.block_sparse_moe", "layers.{layer}.mlp"
WEIGHTS = (
    *llama.EMBEDDINGS,
    *llama.NORMS,
    *llama.ATTENTION,
    Rule(f"{_MOE}.gate.weight", f"{_MLP}.router", "router embed"),
    Rule(f"{_MOE}.experts.{{expert}}.w1.weight", f"{_MLP}.gate_up", "expert_mlp embed", "gate"),
    Rule(f"{_MOE}.experts.{{expert}}.w3.weight", f"{_MLP}.gate_up", "expert_mlp embed", "up"),
    Rule(f"{_MOE}.experts.{{expert}}.w2.weight", f"{_MLP}.down", "embed expert_mlp"),
)
INERT = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")  # of training


def read_counts(config: HfConfig, *names: str) -> tuple[int, int]:
    """Experts of a layer, by the first of these fields that is there, and experts of a token.

    Raises CheckpointError where a token would need more than there are.
    """
    count = config.integer(next((name for name in names if config.get(name) is not None), names[0]))
    per_token = config.integer("num_experts_per_tok")
    if per_token > count:
        config.fail(f"num_experts_per_tok is {per_token}, but a layer has {count} experts")
    return count, per_token


def adapt(config: HfConfig) -> DecoderConfig:
    """From a MixtralConfig. Its published files set no window; one that is set is on every layer."""
    count, per_token = read_counts(config, "num_local_experts", "num_experts")
    window = None if config.get("sliding_window") is None else config.integer("sliding_window")
    experts = ExpertSpec(
        count=count, per_token=per_token, size=config.integer("intermediate_size"), activation=config.activation()
    )
    windows = (window,) * config.integer("num_hidden_layers")
    rope = read_rope(config, config.heads().head_dim, default_theta=1e6)
    return llama.adapt(config, default_eps=1e-5, windows=windows, rope=rope, mlp=experts)


FAMILY = Family(architecture="MixtralForCausalLM", adapt=adapt, weights=WEIGHTS, inert=INERT)
