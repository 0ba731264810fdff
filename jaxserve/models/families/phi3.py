"""Phi 3, 3.5 and 4 with the short context: Llama with q, k and v in one tensor, and gate and up in another.

Checkpoints of the long context stretch each frequency by a table of its own (longrope); they are refused.
"""

from collections.abc import Mapping

from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.families import llama
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig, read_rope
from jaxserve.models.weight_rules import Rule

_LAYER, _OURS = "model.layers.{layer}", "layers.{layer}"
_QKV, _QKV_PARTS = f"{_LAYER}.self_attn.qkv_proj.weight", ("q", "k", "v")
_GATE_UP, _GATE_UP_PARTS = f"{_LAYER}.mlp.gate_up_proj.weight", ("gate", "up")
_Q, _KV = "(kv_heads slots head_dim) embed", "(kv_heads head_dim) embed"
WEIGHTS = (
    *llama.EMBEDDINGS,
    *llama.NORMS,
    Rule(_QKV, f"{_OURS}.attention.qkv.kernel", _Q, "q", _QKV_PARTS),
    Rule(_QKV, f"{_OURS}.attention.qkv.kernel", _KV, "k", _QKV_PARTS),
    Rule(_QKV, f"{_OURS}.attention.qkv.kernel", _KV, "v", _QKV_PARTS),
    Rule(f"{_LAYER}.self_attn.o_proj.weight", f"{_OURS}.attention.out.kernel", "embed (heads head_dim)"),
    Rule(_GATE_UP, f"{_OURS}.mlp.gate_up.kernel", "mlp embed", "gate", _GATE_UP_PARTS),
    Rule(_GATE_UP, f"{_OURS}.mlp.gate_up.kernel", "mlp embed", "up", _GATE_UP_PARTS),
    Rule(f"{_LAYER}.mlp.down_proj.weight", f"{_OURS}.mlp.down.kernel", "embed mlp"),
)


def adapt(config: HfConfig) -> DecoderConfig:
    """From a Phi3Config. A sliding window is on all layers; absent or null means none."""
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.require(name, False, None)
    _refuse_scaling(config)
    size = config.get("sliding_window")
    window = None if size is None else config.integer("sliding_window")
    rope = read_rope(config, config.heads().head_dim, default_share=1.0)
    windows = (window,) * config.integer("num_hidden_layers")
    return llama.adapt(config, default_eps=1e-5, windows=windows, rope=rope)


def _refuse_scaling(config: HfConfig) -> None:
    """Old files call longrope 'su' or 'yarn'; transformers takes no other scaling for this family."""
    table = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = table.get("rope_type", table.get("type", "default")) if isinstance(table, Mapping) else "default"
    if kind != "default":
        config.fail(
            f"rope scaling {kind!r} (longrope) is not supported for Phi 3; take the checkpoint of the same model with "
            "the short context, which has none, such as Phi-3-mini-4k-instruct or phi-4"
        )


# The trained length matters to longrope alone.
FAMILY = Family(
    architecture="Phi3ForCausalLM", adapt=adapt, weights=WEIGHTS, inert=("original_max_position_embeddings",)
)
