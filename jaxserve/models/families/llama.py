"""Llama 1 to 3.x, and the checkpoints that call themselves Llama; also what its relatives share of its weight table."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxserve.models.decoder_config import DecoderConfig, LayerSpec, MlpSpec, NormSpec, RopeConfig
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig, read_max_position, read_rope
from jaxserve.models.weight_rules import Rule

_LAYER = "model.layers.{layer}"
_ATTENTION, _MLP = "layers.{layer}.attention", "layers.{layer}.mlp"
_Q = "(kv_heads slots head_dim)"
_KV = "(kv_heads head_dim)"

EMBEDDINGS = (
    Rule("model.embed_tokens.weight", "embedding", "vocab embed"),
    Rule("model.norm.weight", "final_norm.weight", "embed"),
    Rule("lm_head.weight", "lm_head", "vocab embed"),
)
QKV = (
    Rule(f"{_LAYER}.self_attn.q_proj.weight", f"{_ATTENTION}.qkv.kernel", f"{_Q} embed", "q"),
    Rule(f"{_LAYER}.self_attn.k_proj.weight", f"{_ATTENTION}.qkv.kernel", f"{_KV} embed", "k"),
    Rule(f"{_LAYER}.self_attn.v_proj.weight", f"{_ATTENTION}.qkv.kernel", f"{_KV} embed", "v"),
    Rule(f"{_LAYER}.self_attn.q_proj.bias", f"{_ATTENTION}.qkv.bias", _Q, "q"),
    Rule(f"{_LAYER}.self_attn.k_proj.bias", f"{_ATTENTION}.qkv.bias", _KV, "k"),
    Rule(f"{_LAYER}.self_attn.v_proj.bias", f"{_ATTENTION}.qkv.bias", _KV, "v"),
)
ATTENTION = (
    *QKV,
    Rule(f"{_LAYER}.self_attn.o_proj.weight", f"{_ATTENTION}.out.kernel", "embed (heads head_dim)"),
    Rule(f"{_LAYER}.self_attn.o_proj.bias", f"{_ATTENTION}.out.bias", "embed"),
)
NORMS = (
    Rule(f"{_LAYER}.input_layernorm.weight", "layers.{layer}.attention_norm.weight", "embed"),
    Rule(f"{_LAYER}.post_attention_layernorm.weight", "layers.{layer}.mlp_norm.weight", "embed"),
)
MLP = (
    Rule(f"{_LAYER}.mlp.gate_proj.weight", f"{_MLP}.gate_up.kernel", "mlp embed", "gate"),
    Rule(f"{_LAYER}.mlp.up_proj.weight", f"{_MLP}.gate_up.kernel", "mlp embed", "up"),
    Rule(f"{_LAYER}.mlp.gate_proj.bias", f"{_MLP}.gate_up.bias", "mlp", "gate"),
    Rule(f"{_LAYER}.mlp.up_proj.bias", f"{_MLP}.gate_up.bias", "mlp", "up"),
    Rule(f"{_LAYER}.mlp.down_proj.weight", f"{_MLP}.down.kernel", "embed mlp"),
    Rule(f"{_LAYER}.mlp.down_proj.bias", f"{_MLP}.down.bias", "embed"),
)
WEIGHTS = (*EMBEDDINGS, *NORMS, *ATTENTION, *MLP)


def adapt(
    config: HfConfig,
    *,
    default_head_dim: int | None = None,
    default_eps: float = 1e-6,
    windows: Sequence[int | None] | None = None,
    rope: RopeConfig | None = None,
    **changes: Any,
) -> DecoderConfig:
    """From a LlamaConfig.

    Args:
      config: with Llama's fields.
      default_head_dim: where the config gives none; None means hidden_size over heads.
      default_eps: of norms, where the config gives none.
      windows: of each layer; None: full attention.
      rope: of all layers; None: as Llama's fields say it.
      changes: fields of every `LayerSpec` that the relative of Llama has otherwise.
    """
    heads = config.heads(default_head_dim)
    rope = read_rope(config, heads.head_dim) if rope is None else rope
    attention_bias = config.flag("attention_bias", False)
    fields = {
        "mlp": MlpSpec(
            size=config.integer("intermediate_size"),
            activation=config.activation(),
            bias=config.flag("mlp_bias", False),
        ),
        "position": rope,
        "scale": heads.head_dim**-0.5,
        "qkv_bias": attention_bias,
        "out_bias": attention_bias,
    }
    layer = LayerSpec(**(fields | changes))
    windows = (None,) * config.integer("num_hidden_layers") if windows is None else windows
    return DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        num_query_heads=heads.num_query_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        max_position=read_max_position(config, rope),
        layers=tuple(dataclasses.replace(layer, window=window) for window in windows),
        norm=NormSpec(eps=config.number("rms_norm_eps", default_eps), round_first=True),
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


FAMILY = Family(architecture="LlamaForCausalLM", adapt=adapt, weights=WEIGHTS)
