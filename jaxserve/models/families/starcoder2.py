"""StarCoder 2: Llama's block with norms over mean and variance, a plain feed-forward block, and biases everywhere.

A sliding window, where there is one, is on all layers.
"""

from jaxserve.models.decoder_config import DecoderConfig, LayerSpec, MlpSpec, NormKind, NormSpec
from jaxserve.models.families import llama
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig, read_max_position, read_rope
from jaxserve.models.weight_rules import Rule

_LAYER, _OURS = "model.layers.{layer}", "layers.{layer}"
WEIGHTS = (
    *llama.EMBEDDINGS,
    *llama.NORMS,
    *llama.ATTENTION,
    Rule("model.norm.bias", "final_norm.bias", "embed"),
    Rule(f"{_LAYER}.input_layernorm.bias", f"{_OURS}.attention_norm.bias", "embed"),
    Rule(f"{_LAYER}.post_attention_layernorm.bias", f"{_OURS}.mlp_norm.bias", "embed"),
    Rule(f"{_LAYER}.mlp.c_fc.weight", f"{_OURS}.mlp.up.kernel", "mlp embed"),
    Rule(f"{_LAYER}.mlp.c_fc.bias", f"{_OURS}.mlp.up.bias", "mlp"),
    Rule(f"{_LAYER}.mlp.c_proj.weight", f"{_OURS}.mlp.down.kernel", "embed mlp"),
    Rule(f"{_LAYER}.mlp.c_proj.bias", f"{_OURS}.mlp.down.bias", "embed"),
)


def adapt(config: HfConfig) -> DecoderConfig:
    """From a Starcoder2Config. `use_bias` is of the projections; the norms always have one."""
    eps = config.number("norm_epsilon", 1e-5)
    config.require("layer_norm_epsilon", None, eps)  # published files say the same thing twice
    config.require("norm_type", None, "layer_norm")
    config.require("mlp_type", None, "default")
    config.integer("num_key_value_heads")  # absent, it would mean 2
    heads = config.heads()
    rope = read_rope(config, heads.head_dim)
    bias = config.flag("use_bias", True)
    size = config.get("sliding_window")
    layer = LayerSpec(
        mlp=MlpSpec(
            size=config.integer("intermediate_size"),
            gated=False,
            activation=config.activation("hidden_act", "gelu_pytorch_tanh"),
            bias=bias,
        ),
        position=rope,
        scale=heads.head_dim**-0.5,
        window=None if size is None else config.integer("sliding_window"),
        qkv_bias=bias,
        out_bias=bias,
    )
    return DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        num_query_heads=heads.num_query_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        max_position=read_max_position(config, rope),
        layers=(layer,) * config.integer("num_hidden_layers"),
        norm=NormSpec(kind=NormKind.LAYER, eps=eps, bias=True),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


FAMILY = Family(architecture="Starcoder2ForCausalLM", adapt=adapt, weights=WEIGHTS)
