"""The families that GGUF files are read by: those of Hugging Face's checkpoints, with the names of tensors in GGUF.

Configs and layouts are theirs. Only experts lie otherwise: those of a layer are one tensor, gate and up apart.
"""

import dataclasses
from collections.abc import Mapping

from jaxserve.models.families import (
    gemma,
    gemma2,
    gemma3,
    gpt_oss,
    llama,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    starcoder2,
)
from jaxserve.models.family import Family
from jaxserve.models.weight_rules import Rule

_HF_LAYER, _LAYER, _MLP = "model.layers.{layer}.", "blk.{layer}.", "layers.{layer}.mlp"

# Of modules, without the layer.
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INNER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
# Where a norm follows attention, that one has the name.
_NORMS_AFTER = {
    "pre_feedforward_layernorm": "ffn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_SINKS = {"self_attn": "attn_sinks", "post_attention_layernorm": "post_attention_norm"}
_EXPERTS = (
    Rule(f"{_LAYER}ffn_gate_exps.weight", f"{_MLP}.gate_up", "experts expert_mlp embed", "gate"),
    Rule(f"{_LAYER}ffn_up_exps.weight", f"{_MLP}.gate_up", "experts expert_mlp embed", "up"),
    Rule(f"{_LAYER}ffn_down_exps.weight", f"{_MLP}.down", "experts embed expert_mlp"),
)
_EXPERT_BIASES = (
    Rule(f"{_LAYER}ffn_gate_exps.bias", f"{_MLP}.gate_up_bias", "experts expert_mlp", "gate"),
    Rule(f"{_LAYER}ffn_up_exps.bias", f"{_MLP}.gate_up_bias", "experts expert_mlp", "up"),
    Rule(f"{_LAYER}ffn_down_exps.bias", f"{_MLP}.down_bias", "router embed"),
)
# Factors of rotation, which the config has; a table that no model reads.
_IGNORED = (r"rope_freqs\.weight", r"blk\.\d+\.attn_rot_embd\.weight")


def _named(family: Family, changed: Mapping[str, str] | None = None, experts: tuple[Rule, ...] = ()) -> Family:
    """`family` with names of GGUF. `changed`: modules that this one calls otherwise; `experts`: rules for them."""
    names = {**_INNER, **(changed or {})}
    rules = [
        dataclasses.replace(rule, source=_name(rule.source, names))
        for rule in family.weights
        if not (experts and ".experts." in rule.source) and ".shared_expert" not in rule.source
    ]
    return dataclasses.replace(
        family, architecture=f"{family.architecture} in GGUF", weights=(*rules, *experts), ignored=_IGNORED
    )


def _name(source: str, names: Mapping[str, str]) -> str:
    module, _, leaf = source.rpartition(".")
    if not module.startswith(_HF_LAYER):
        return f"{_OUTER[module]}.{leaf}"
    module = module.removeprefix(_HF_LAYER)
    return f"{_LAYER}{names[module]}.{'weight' if leaf == 'sinks' else leaf}"


GEMMA = _named(gemma.FAMILY)
GEMMA2 = _named(gemma2.FAMILY, _NORMS_AFTER)
GEMMA3 = _named(gemma3.FAMILY, _NORMS_AFTER)
GPT_OSS = _named(gpt_oss.FAMILY, _SINKS, (*_EXPERTS, *_EXPERT_BIASES))
LLAMA = _named(llama.FAMILY)
MIXTRAL = _named(mixtral.FAMILY, experts=_EXPERTS)
OLMO2 = _named(olmo2.FAMILY, _NORMS_AFTER)
PHI3 = _named(phi3.FAMILY)
QWEN2 = _named(qwen2.FAMILY)
QWEN3 = _named(qwen3.FAMILY)
QWEN3_MOE = _named(qwen3_moe.FAMILY, experts=_EXPERTS)
STARCODER2 = _named(starcoder2.FAMILY)
