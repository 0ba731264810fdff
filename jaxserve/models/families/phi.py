"""Phi 1, 1.5 and 2: attention and a plain feed-forward block beside each other, behind one norm.

Only a part of each head turns. Norms are over mean and variance, and everything has a bias, the output projection too.
"""

from jaxserve.models.decoder_config import Block, DecoderConfig, LayerSpec, MlpSpec, NormKind, NormSpec, QkNorm
from jaxserve.models.families import llama
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig, read_max_position, read_rope
from jaxserve.models.weight_rules import Rule

_LAYER, _OURS = "model.layers.{layer}", "layers.{layer}"
_ATTENTION = f"{_LAYER}.self_attn"
WEIGHTS = (
    Rule("model.embed_tokens.weight", "embedding", "vocab embed"),
    Rule("model.final_layernorm.weight", "final_norm.weight", "embed"),
    Rule("model.final_layernorm.bias", "final_norm.bias", "embed"),
    Rule("lm_head.weight", "lm_head", "vocab embed"),
    Rule("lm_head.bias", "lm_head_bias", "vocab"),
    Rule(f"{_LAYER}.input_layernorm.weight", f"{_OURS}.attention_norm.weight", "embed"),
    Rule(f"{_LAYER}.input_layernorm.bias", f"{_OURS}.attention_norm.bias", "embed"),
    *llama.QKV,
    Rule(f"{_ATTENTION}.q_layernorm.weight", f"{_OURS}.attention.q_norm.weight", "head_dim"),
    Rule(f"{_ATTENTION}.q_layernorm.bias", f"{_OURS}.attention.q_norm.bias", "head_dim"),
    Rule(f"{_ATTENTION}.k_layernorm.weight", f"{_OURS}.attention.k_norm.weight", "head_dim"),
    Rule(f"{_ATTENTION}.k_layernorm.bias", f"{_OURS}.attention.k_norm.bias", "head_dim"),
    Rule(f"{_ATTENTION}.dense.weight", f"{_OURS}.attention.out.kernel", "embed (heads head_dim)"),
    Rule(f"{_ATTENTION}.dense.bias", f"{_OURS}.attention.out.bias", "embed"),
    Rule(f"{_LAYER}.mlp.fc1.weight", f"{_OURS}.mlp.up.kernel", "mlp embed"),
    Rule(f"{_LAYER}.mlp.fc1.bias", f"{_OURS}.mlp.up.bias", "mlp"),
    Rule(f"{_LAYER}.mlp.fc2.weight", f"{_OURS}.mlp.down.kernel", "embed mlp"),
    Rule(f"{_LAYER}.mlp.fc2.bias", f"{_OURS}.mlp.down.bias", "embed"),
)


def adapt(config: HfConfig) -> DecoderConfig:
    """From a PhiConfig. An absent `partial_rotary_factor` means 0.5 there."""
    heads = config.heads()
    rope = read_rope(config, heads.head_dim, default_share=0.5)
    layer = LayerSpec(
        mlp=MlpSpec(
            size=config.integer("intermediate_size"),
            gated=False,
            activation=config.activation("hidden_act", "gelu_new"),
            bias=True,
        ),
        position=rope,
        scale=heads.head_dim**-0.5,
        qk_norm=QkNorm.HEAD if config.flag("qk_layernorm", False) else None,
        qkv_bias=True,
        out_bias=True,
        block=Block.SHARED,
    )
    return DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        num_query_heads=heads.num_query_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        max_position=read_max_position(config, rope),
        layers=(layer,) * config.integer("num_hidden_layers"),
        norm=NormSpec(kind=NormKind.LAYER, eps=config.number("layer_norm_eps", 1e-5), bias=True),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        lm_head_bias=True,
    )


FAMILY = Family(architecture="PhiForCausalLM", adapt=adapt, weights=WEIGHTS)
