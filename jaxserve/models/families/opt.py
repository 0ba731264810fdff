"""OPT: learned positions from the third row of their table on, biases, and a plain feed-forward block with ReLU.

The 350M model normalises after each sub-block and not at the end, and its embeddings are narrower than its layers.
"""

from jaxserve.models.decoder_config import (
    DecoderConfig,
    EmbeddingSpec,
    LayerSpec,
    MlpSpec,
    NormKind,
    NormPlace,
    NormSpec,
)
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig
from jaxserve.models.weight_rules import Rule

_OFFSET = 2  # rows of the table of positions before that of position 0
_LAYER, _TARGET = "model.decoder.layers.{layer}", "layers.{layer}"
_Q, _KV = "(kv_heads slots head_dim)", "(kv_heads head_dim)"
WEIGHTS = (
    Rule("model.decoder.embed_tokens.weight", "embedding", "vocab embed"),
    Rule("model.decoder.embed_positions.weight", "position_embedding", "position embed"),
    Rule("model.decoder.project_in.weight", "embed_in.kernel", "embed width"),
    Rule("model.decoder.project_out.weight", "embed_out.kernel", "width embed"),
    Rule("model.decoder.final_layer_norm.weight", "final_norm.weight", "embed"),
    Rule("model.decoder.final_layer_norm.bias", "final_norm.bias", "embed"),
    Rule("lm_head.weight", "lm_head", "vocab embed"),
    # Each norm has one of two places: before its sub-block, or after the sum.
    *(
        Rule(f"{_LAYER}.{source}.{array}", f"{_TARGET}.{target}.{array}", "embed")
        for source, targets in (
            ("self_attn_layer_norm", ("attention_norm", "attention_sum")),
            ("final_layer_norm", ("mlp_norm", "mlp_sum")),
        )
        for target in targets
        for array in ("weight", "bias")
    ),
    Rule(f"{_LAYER}.self_attn.q_proj.weight", f"{_TARGET}.attention.qkv.kernel", f"{_Q} embed", "q"),
    Rule(f"{_LAYER}.self_attn.k_proj.weight", f"{_TARGET}.attention.qkv.kernel", f"{_KV} embed", "k"),
    Rule(f"{_LAYER}.self_attn.v_proj.weight", f"{_TARGET}.attention.qkv.kernel", f"{_KV} embed", "v"),
    Rule(f"{_LAYER}.self_attn.q_proj.bias", f"{_TARGET}.attention.qkv.bias", _Q, "q"),
    Rule(f"{_LAYER}.self_attn.k_proj.bias", f"{_TARGET}.attention.qkv.bias", _KV, "k"),
    Rule(f"{_LAYER}.self_attn.v_proj.bias", f"{_TARGET}.attention.qkv.bias", _KV, "v"),
    Rule(f"{_LAYER}.self_attn.out_proj.weight", f"{_TARGET}.attention.out.kernel", "embed (heads head_dim)"),
    Rule(f"{_LAYER}.self_attn.out_proj.bias", f"{_TARGET}.attention.out.bias", "embed"),
    Rule(f"{_LAYER}.fc1.weight", f"{_TARGET}.mlp.up.kernel", "mlp embed"),
    Rule(f"{_LAYER}.fc1.bias", f"{_TARGET}.mlp.up.bias", "mlp"),
    Rule(f"{_LAYER}.fc2.weight", f"{_TARGET}.mlp.down.kernel", "embed mlp"),
    Rule(f"{_LAYER}.fc2.bias", f"{_TARGET}.mlp.down.bias", "embed"),
)
INERT = ("activation_dropout", "init_std", "layerdrop")


def adapt(config: HfConfig) -> DecoderConfig:
    """From an OPTConfig. The epsilon of its norms is no field."""
    config.require("layer_norm_elementwise_affine", True)
    # Galactica states both of these.
    config.require("learned_embeddings", True)
    config.require("scale_embeddings", False)
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.head_dim(hidden, heads)
    bias, is_before = config.flag("enable_bias", True), config.flag("do_layer_norm_before", True)
    lacks_last = config.flag("_remove_final_layer_norm", False)
    num_positions, width = (
        config.integer("max_position_embeddings", 2048),
        config.integer("word_embed_proj_dim", hidden),
    )
    layer = LayerSpec(
        mlp=MlpSpec(
            size=config.integer("ffn_dim"),
            gated=False,
            activation=config.activation("activation_function", "relu"),
            bias=bias,
        ),
        position=None,
        scale=head_dim**-0.5,
        qkv_bias=bias,
        out_bias=bias,
        norms=(NormPlace.BEFORE if is_before else NormPlace.SUM,),
    )
    return DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_query_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        max_position=num_positions,
        layers=(layer,) * config.integer("num_hidden_layers"),
        norm=NormSpec(kind=NormKind.LAYER, eps=1e-5, bias=True),
        final_norm=is_before and not lacks_last,
        embedding=EmbeddingSpec(
            num_positions=num_positions,
            position_offset=_OFFSET,
            width=None if width == hidden else width,
        ),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


FAMILY = Family(architecture="OPTForCausalLM", adapt=adapt, weights=WEIGHTS, inert=INERT)
