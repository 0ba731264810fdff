"""Llama 1 to 3.x, and the many checkpoints that call themselves Llama; also the weight table that its relatives share.

Fields of a config that Hugging Face ignores for Llama are ignored here as well.
"""

from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.family import Family, Rule
from jaxserve.models.hf_config import HfConfig, read_max_position, read_rope

_LAYER = "model.layers.{layer}"
_ATTENTION, _MLP = "layers.{layer}.attention", "layers.{layer}.mlp"
_Q = "(kv_heads group head_dim)"
_KV = "(kv_heads head_dim)"

WEIGHTS = (
    Rule("model.embed_tokens.weight", "embedding", "vocab embed -> vocab embed"),
    Rule(f"{_LAYER}.input_layernorm.weight", "layers.{layer}.attention_norm.weight", "embed -> embed"),
    Rule(f"{_LAYER}.self_attn.q_proj.weight", f"{_ATTENTION}.qkv.kernel", f"{_Q} embed -> {_Q[1:-1]} embed", "q"),
    Rule(
        f"{_LAYER}.self_attn.k_proj.weight",
        f"{_ATTENTION}.qkv.kernel",
        f"{_KV} embed -> kv_heads 1 head_dim embed",
        "k",
    ),
    Rule(
        f"{_LAYER}.self_attn.v_proj.weight",
        f"{_ATTENTION}.qkv.kernel",
        f"{_KV} embed -> kv_heads 1 head_dim embed",
        "v",
    ),
    Rule(f"{_LAYER}.self_attn.q_proj.bias", f"{_ATTENTION}.qkv.bias", f"{_Q} -> {_Q[1:-1]}", "q"),
    Rule(f"{_LAYER}.self_attn.k_proj.bias", f"{_ATTENTION}.qkv.bias", f"{_KV} -> kv_heads 1 head_dim", "k"),
    Rule(f"{_LAYER}.self_attn.v_proj.bias", f"{_ATTENTION}.qkv.bias", f"{_KV} -> kv_heads 1 head_dim", "v"),
    Rule(
        f"{_LAYER}.self_attn.o_proj.weight",
        f"{_ATTENTION}.out.kernel",
        "embed (heads head_dim) -> embed heads head_dim",
    ),
    Rule(f"{_LAYER}.self_attn.o_proj.bias", f"{_ATTENTION}.out.bias", "embed -> embed"),
    Rule(f"{_LAYER}.post_attention_layernorm.weight", "layers.{layer}.mlp_norm.weight", "embed -> embed"),
    Rule(f"{_LAYER}.mlp.gate_proj.weight", f"{_MLP}.gate_up.kernel", "mlp embed -> 1 mlp embed", "gate"),
    Rule(f"{_LAYER}.mlp.up_proj.weight", f"{_MLP}.gate_up.kernel", "mlp embed -> 1 mlp embed", "up"),
    Rule(f"{_LAYER}.mlp.gate_proj.bias", f"{_MLP}.gate_up.bias", "mlp -> 1 mlp", "gate"),
    Rule(f"{_LAYER}.mlp.up_proj.bias", f"{_MLP}.gate_up.bias", "mlp -> 1 mlp", "up"),
    Rule(f"{_LAYER}.mlp.down_proj.weight", f"{_MLP}.down.kernel", "embed mlp -> embed mlp"),
    Rule(f"{_LAYER}.mlp.down_proj.bias", f"{_MLP}.down.bias", "embed -> embed"),
    Rule("model.norm.weight", "final_norm.weight", "embed -> embed"),
    Rule("lm_head.weight", "lm_head", "vocab embed -> vocab embed"),
)
# Old exports stored the rotation frequencies, which follow from the config.
IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


def adapt(config: HfConfig, default_head_dim: int | None = None) -> DecoderConfig:
    """From a LlamaConfig. `default_head_dim`: where the config gives none; None means hidden_size over heads."""
    heads = config.heads(default_head_dim)
    rope = read_rope(config, heads.head_dim)
    num_layers = config.integer("num_hidden_layers")
    attention_bias = config.flag("attention_bias", False)
    return DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        ffn_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_query_heads=heads.num_query_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        max_position=read_max_position(config, rope),
        rope=rope,
        windows=(None,) * num_layers,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        activation=config.activation(),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False),
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


FAMILY = Family(architecture="LlamaForCausalLM", adapt=adapt, weights=WEIGHTS, ignored=IGNORED)
