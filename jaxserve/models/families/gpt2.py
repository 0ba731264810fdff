"""GPT-2: learned positions, biases everywhere, and kernels that are stored [in, out].

Published files leave the `transformer.` of tensor names out, and hold the causal masks of attention as buffers.
"""

from jaxserve.models.decoder_config import DecoderConfig, EmbeddingSpec, LayerSpec, MlpSpec
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig, read_layer_norm
from jaxserve.models.weight_rules import Rule

_LAYER, _TARGET = "transformer.h.{layer}", "layers.{layer}"
# Heads have no groups here, so the slots of a head are its query, its key and its value.
_QKV = "(slots kv_heads head_dim)"
WEIGHTS = (
    Rule("transformer.wte.weight", "embedding", "vocab embed"),
    Rule("transformer.wpe.weight", "position_embedding", "position embed"),
    Rule("transformer.ln_f.weight", "final_norm.weight", "embed"),
    Rule("transformer.ln_f.bias", "final_norm.bias", "embed"),
    Rule("lm_head.weight", "lm_head", "vocab embed"),
    Rule(f"{_LAYER}.ln_1.weight", f"{_TARGET}.attention_norm.weight", "embed"),
    Rule(f"{_LAYER}.ln_1.bias", f"{_TARGET}.attention_norm.bias", "embed"),
    Rule(f"{_LAYER}.ln_2.weight", f"{_TARGET}.mlp_norm.weight", "embed"),
    Rule(f"{_LAYER}.ln_2.bias", f"{_TARGET}.mlp_norm.bias", "embed"),
    Rule(f"{_LAYER}.attn.c_attn.weight", f"{_TARGET}.attention.qkv.kernel", f"embed {_QKV}"),
    Rule(f"{_LAYER}.attn.c_attn.bias", f"{_TARGET}.attention.qkv.bias", _QKV),
    Rule(f"{_LAYER}.attn.c_proj.weight", f"{_TARGET}.attention.out.kernel", "(heads head_dim) embed"),
    Rule(f"{_LAYER}.attn.c_proj.bias", f"{_TARGET}.attention.out.bias", "embed"),
    Rule(f"{_LAYER}.mlp.c_fc.weight", f"{_TARGET}.mlp.up.kernel", "embed mlp"),
    Rule(f"{_LAYER}.mlp.c_fc.bias", f"{_TARGET}.mlp.up.bias", "mlp"),
    Rule(f"{_LAYER}.mlp.c_proj.weight", f"{_TARGET}.mlp.down.kernel", "mlp embed"),
    Rule(f"{_LAYER}.mlp.c_proj.bias", f"{_TARGET}.mlp.down.bias", "embed"),
)
IGNORED = (r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",)
# Scores are float32 here in any case, summaries belong to other heads than that of a language model, and old files have
# fields of the trainer.
INERT = (
    "_num_labels",
    "n_ctx",
    "n_special",
    "output_past",
    "predict_special_tokens",
    "reorder_and_upcast_attn",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
)


def adapt(config: HfConfig) -> DecoderConfig:
    """From a GPT2Config."""
    hidden = config.integer(config.spelled("n_embd", "hidden_size"))
    heads = config.integer(config.spelled("n_head", "num_attention_heads"))
    head_dim = config.head_dim(hidden, heads)
    num_positions = config.integer(config.spelled("n_positions", "max_position_embeddings"), 1024)
    mlp = MlpSpec(
        size=config.integer("n_inner", 4 * hidden),
        gated=False,
        activation=config.activation("activation_function", "gelu_new"),
        bias=True,
    )
    scale = head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    shrinks = config.flag("scale_attn_by_inverse_layer_idx", False)
    return DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_query_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        max_position=num_positions,
        layers=tuple(
            LayerSpec(
                mlp=mlp,
                position=None,
                scale=scale / (index + 1) if shrinks else scale,
                qkv_bias=True,
                out_bias=True,
            )
            for index in range(config.integer(config.spelled("n_layer", "num_hidden_layers")))
        ),
        norm=read_layer_norm(config),
        embedding=EmbeddingSpec(num_positions=num_positions),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


FAMILY = Family(
    architecture="GPT2LMHeadModel",
    adapt=adapt,
    weights=WEIGHTS,
    ignored=IGNORED,
    inert=INERT,
)
