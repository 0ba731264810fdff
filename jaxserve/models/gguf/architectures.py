"""The table of GGUF's architectures: which metadata are which fields of config.json, and how tensors were changed.

A key that this table does not name becomes a field of its own name, which every family then refuses as one that may
change results; `model.overrides` can set it to null.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

# Behind the name of the architecture, as in `llama.context_length`.
_COMMON = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_SLIDING = {"attention.sliding_window": "sliding_window"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One value of `general.architecture`.

    Attributes:
      hf: the same in `architectures` of config.json.
      model_type: the same in `model_type`.
      family: name of its `Family` in `families`.
      keys: from metadata, without the name of the architecture, to fields of config.json.
      required: those of `keys` that must be there.
      fixed: fields that the files do not say and all models have.
      turned: names of the tensors of a layer whose rows the converter has reordered, as Llama's q and k: the two halves
        of each head are there by turns.
      shifted_norms: weights of norms are stored with 1 added.
      scalar_by_heads: numbers of layers at which the scale of scores is by hidden_size over heads and not by the size
        of a head, as llama.cpp tells them (the largest Gemma of each version); None: config.json has no such field.
    """

    hf: str
    model_type: str
    family: str
    keys: Mapping[str, str]
    required: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    turned: tuple[str, ...] = ()
    shifted_norms: bool = False
    scalar_by_heads: tuple[int, ...] | None = None


_LLAMA = Architecture(
    hf="LlamaForCausalLM",
    model_type="llama",
    family="LLAMA",
    keys={**_COMMON, **_RMS},
    turned=("attn_q.weight", "attn_q.bias", "attn_k.weight", "attn_k.bias"),
)
# Llama and Mixtral share a name in GGUF; this one has expert_count.
MIXTRAL = dataclasses.replace(
    _LLAMA,
    hf="MixtralForCausalLM",
    model_type="mixtral",
    family="MIXTRAL",
    keys={**_COMMON, **_RMS, **_EXPERTS},
)
ARCHITECTURES = {
    "gemma": Architecture(
        hf="GemmaForCausalLM",
        model_type="gemma",
        family="GEMMA",
        keys={**_COMMON, **_RMS},
        shifted_norms=True,
    ),
    "gemma2": Architecture(
        hf="Gemma2ForCausalLM",
        model_type="gemma2",
        family="GEMMA2",
        keys={
            **_COMMON,
            **_RMS,
            **_SLIDING,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        required=("attention.sliding_window",),
        shifted_norms=True,
        scalar_by_heads=(46,),
    ),
    "gemma3": Architecture(
        hf="Gemma3ForCausalLM",
        model_type="gemma3_text",
        family="GEMMA3",
        keys={
            **_COMMON,
            **_RMS,
            **_SLIDING,
            "rope.freq_base_swa": "rope_local_base_freq",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        required=("attention.sliding_window", "rope.freq_base"),
        shifted_norms=True,
        scalar_by_heads=(62,),
    ),
    "gpt-oss": Architecture(
        hf="GptOssForCausalLM",
        model_type="gpt_oss",
        family="GPT_OSS",
        keys={
            **_COMMON,
            **_RMS,
            **_SLIDING,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        required=("attention.sliding_window", "expert_count", "expert_used_count", "expert_feed_forward_length"),
    ),
    "llama": _LLAMA,
    "olmo2": Architecture(hf="Olmo2ForCausalLM", model_type="olmo2", family="OLMO2", keys={**_COMMON, **_RMS}),
    "phi3": Architecture(
        hf="Phi3ForCausalLM",
        model_type="phi3",
        family="PHI3",
        keys={**_COMMON, **_RMS, **_SLIDING},
        required=("attention.sliding_window",),  # older files lack it, and mean another window than none
    ),
    "qwen2": Architecture(hf="Qwen2ForCausalLM", model_type="qwen2", family="QWEN2", keys={**_COMMON, **_RMS}),
    "qwen3": Architecture(hf="Qwen3ForCausalLM", model_type="qwen3", family="QWEN3", keys={**_COMMON, **_RMS}),
    "qwen3moe": Architecture(
        hf="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        family="QWEN3_MOE",
        keys={**_COMMON, **_RMS, **_EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"},
        required=("expert_count", "expert_used_count", "expert_feed_forward_length"),
        fixed={"norm_topk_prob": True},
    ),
    "starcoder2": Architecture(
        hf="Starcoder2ForCausalLM",
        model_type="starcoder2",
        family="STARCODER2",
        keys={**_COMMON, "attention.layer_norm_epsilon": "norm_epsilon"},
    ),
}
