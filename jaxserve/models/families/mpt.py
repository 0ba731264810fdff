"""MPT: ALiBi, no biases, queries, keys and values cut to a range, and a plain feed-forward block four times as wide.

Transformers ignores `alibi_bias_max`, with which longer models were trained (storywriter: 16). It is honoured here, and
the oracle of it is a formula of our own. The other fields that transformers ignores have their default values or are
refused: `alibi: false`, `logit_scale`, `expansion_ratio`, `qk_ln`, `prefix_lm`.
"""

import dataclasses
from collections.abc import Mapping

from jaxserve.models.decoder_config import AlibiConfig, DecoderConfig, LayerSpec, MlpSpec
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig, read_layer_norm
from jaxserve.models.weight_rules import Rule

_ARCHITECTURE = "MptForCausalLM"
_LAYER, _TARGET = "transformer.blocks.{layer}", "layers.{layer}"
_QKV = ("q", "k", "v")
WEIGHTS = (
    Rule("transformer.wte.weight", "embedding", "vocab embed"),
    Rule("transformer.norm_f.weight", "final_norm.weight", "embed"),
    Rule("lm_head.weight", "lm_head", "vocab embed"),
    Rule(f"{_LAYER}.norm_1.weight", f"{_TARGET}.attention_norm.weight", "embed"),
    Rule(f"{_LAYER}.norm_2.weight", f"{_TARGET}.mlp_norm.weight", "embed"),
    *(
        Rule(f"{_LAYER}.attn.Wqkv.weight", f"{_TARGET}.attention.qkv.kernel", axes, part, _QKV)
        for part, axes in zip(
            _QKV,
            ("(kv_heads slots head_dim) embed", "(kv_heads head_dim) embed", "(kv_heads head_dim) embed"),
            strict=True,
        )
    ),
    Rule(f"{_LAYER}.attn.out_proj.weight", f"{_TARGET}.attention.out.kernel", "embed (heads head_dim)"),
    Rule(f"{_LAYER}.ffn.up_proj.weight", f"{_TARGET}.mlp.up.kernel", "mlp embed"),
    Rule(f"{_LAYER}.ffn.down_proj.weight", f"{_TARGET}.mlp.down.kernel", "embed mlp"),
)
# `learned_pos_emb` has no meaning beside ALiBi, and `embedding_fraction` scales gradients.
INERT = (
    "emb_pdrop",
    "embedding_fraction",
    "init_config",
    "init_device",
    "learned_pos_emb",
    "tokenizer_name",
    "verbose",
)
_ATTENTION_INERT = ("attn_impl",)


def adapt(config: HfConfig) -> DecoderConfig:
    """From an MptConfig."""
    config.require("no_bias", True)
    config.require("expansion_ratio", 4)
    config.require("logit_scale", None)
    config.require("norm_type", "low_precision_layernorm", "layernorm")
    hidden = config.integer(config.spelled("d_model", "hidden_size"))
    heads = config.integer(config.spelled("n_heads", "num_attention_heads"))
    head_dim = config.head_dim(hidden, heads)
    stated = config.get("attn_config", {})
    if not isinstance(stated, Mapping):
        config.fail(f"attn_config must be a table, got {stated!r}")
    attention = HfConfig(stated, f"{config.origin}: attn_config")
    attention.require("attn_type", "multihead_attention")
    attention.require("alibi", True)
    for name in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        attention.require(name, False)
    clip = attention.get("clip_qkv")
    layer = LayerSpec(
        mlp=MlpSpec(size=4 * hidden, gated=False, activation="gelu"),
        position=AlibiConfig(max_bias=attention.number("alibi_bias_max", 8)),
        scale=attention.number("softmax_scale", head_dim**-0.5),
        qkv_clip=None if clip is None else attention.check_number("clip_qkv", clip),
    )
    attention.check_all_read(_ARCHITECTURE, _ATTENTION_INERT)
    return DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_query_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        max_position=config.integer("max_seq_len", 2048),
        layers=(layer,) * config.integer(config.spelled("n_layers", "num_hidden_layers")),
        norm=read_layer_norm(config, bias=False),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


FAMILY = Family(architecture=_ARCHITECTURE, adapt=adapt, weights=WEIGHTS, inert=INERT)
# As the files of the models' makers spell it; the same tensors and fields.
MOSAIC = dataclasses.replace(FAMILY, architecture="MPTForCausalLM")
