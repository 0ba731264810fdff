"""BLOOM: embeddings are normalised, ALiBi, biases everywhere, and a plain feed-forward block four times as wide.

Its tensor names are those of Megatron, which Falcon has too.
"""

from jaxserve.models.decoder_config import AlibiConfig, DecoderConfig, EmbeddingSpec, LayerSpec, MlpSpec
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig, read_layer_norm
from jaxserve.models.weight_rules import Rule

_LAYER, _TARGET = "transformer.h.{layer}", "layers.{layer}"
_QKV = "(kv_heads slots head_dim)"

EMBEDDINGS = (
    Rule("transformer.word_embeddings.weight", "embedding", "vocab embed"),
    Rule("transformer.ln_f.weight", "final_norm.weight", "embed"),
    Rule("transformer.ln_f.bias", "final_norm.bias", "embed"),
    Rule("lm_head.weight", "lm_head", "vocab embed"),
)
NORMS = (
    Rule(f"{_LAYER}.input_layernorm.weight", f"{_TARGET}.attention_norm.weight", "embed"),
    Rule(f"{_LAYER}.input_layernorm.bias", f"{_TARGET}.attention_norm.bias", "embed"),
    Rule(f"{_LAYER}.post_attention_layernorm.weight", f"{_TARGET}.mlp_norm.weight", "embed"),
    Rule(f"{_LAYER}.post_attention_layernorm.bias", f"{_TARGET}.mlp_norm.bias", "embed"),
)
# The fused projection lies on disk as in memory: of each key/value head its query heads, its key and its value.
PROJECTIONS = (
    Rule(f"{_LAYER}.self_attention.query_key_value.weight", f"{_TARGET}.attention.qkv.kernel", f"{_QKV} embed"),
    Rule(f"{_LAYER}.self_attention.query_key_value.bias", f"{_TARGET}.attention.qkv.bias", _QKV),
    Rule(f"{_LAYER}.self_attention.dense.weight", f"{_TARGET}.attention.out.kernel", "embed (heads head_dim)"),
    Rule(f"{_LAYER}.self_attention.dense.bias", f"{_TARGET}.attention.out.bias", "embed"),
    Rule(f"{_LAYER}.mlp.dense_h_to_4h.weight", f"{_TARGET}.mlp.up.kernel", "mlp embed"),
    Rule(f"{_LAYER}.mlp.dense_h_to_4h.bias", f"{_TARGET}.mlp.up.bias", "mlp"),
    Rule(f"{_LAYER}.mlp.dense_4h_to_h.weight", f"{_TARGET}.mlp.down.kernel", "embed mlp"),
    Rule(f"{_LAYER}.mlp.dense_4h_to_h.bias", f"{_TARGET}.mlp.down.bias", "embed"),
)
WEIGHTS = (
    *EMBEDDINGS,
    Rule("transformer.word_embeddings_layernorm.weight", "embedding_norm.weight", "embed"),
    Rule("transformer.word_embeddings_layernorm.bias", "embedding_norm.bias", "embed"),
    *NORMS,
    *PROJECTIONS,
)
# How Megatron fuses its kernels, and where it counts the positions of ALiBi from: softmax does not see that.
INERT = (
    "attention_softmax_in_fp32",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "offset_alibi",
    "skip_bias_add",
    "skip_bias_add_qkv",
    "unk_token_id",
)


def adapt(config: HfConfig) -> DecoderConfig:
    """From a BloomConfig, which has no field for the length: 2048, or what the `seq_length` of some files says."""
    config.require("apply_residual_connection_post_layernorm", False)
    if config.get("pretraining_tp", 1) != 1:
        config.require("slow_but_exact", False)  # it leaves biases out then
    config.require("slow_but_exact", False, True)
    hidden = config.integer(config.spelled("hidden_size", "n_embed"))
    heads = config.integer(config.spelled("n_head", "num_attention_heads"))
    config.require("n_inner", None, 4 * hidden)
    head_dim = config.head_dim(hidden, heads)
    layer = LayerSpec(
        mlp=MlpSpec(size=4 * hidden, gated=False, activation="gelu_tanh", bias=True),
        position=AlibiConfig(),
        scale=head_dim**-0.5,
        qkv_bias=True,
        out_bias=True,
    )
    return DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_query_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        max_position=config.integer("seq_length", 2048),
        layers=(layer,) * config.integer(config.spelled("n_layer", "num_hidden_layers")),
        norm=read_layer_norm(config),
        embedding=EmbeddingSpec(norm=True),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


FAMILY = Family(architecture="BloomForCausalLM", adapt=adapt, weights=WEIGHTS, inert=INERT)
