"""Falcon in its three forms: 7B (one key/value head, one norm), 40B and 11B (groups of heads), and RW (ALiBi, biases).

The attention and the feed-forward block of 7B, 40B and 11B are parallel: 7B and 11B share one norm, 40B has two. In the
RW form they are sequential. BLOOM's tensor names, with two more for the norms of 40B.

ALiBi is added to the scores before they are scaled. Transformers rounds slope times position to bfloat16, whatever the
model's dtype; here it is float32, and the oracle of heads whose slopes are no powers of two is a formula of our own.
Transformers' eager attention adds ALiBi twice, to the scores and in the mask; its default attention does not, and is
the oracle.
"""

from jaxserve.models.decoder_config import AlibiConfig, Block, DecoderConfig, LayerSpec, MlpSpec
from jaxserve.models.families import bloom
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig, read_layer_norm, read_max_position, read_rope
from jaxserve.models.weight_rules import Rule

_LAYER, _TARGET = "transformer.h.{layer}", "layers.{layer}"
_ONE_NORM = (Block.SEQUENTIAL, Block.SHARED)
_TWO_NORMS = (Block.PARALLEL,)
WEIGHTS = (
    *bloom.EMBEDDINGS,
    Rule(f"{_LAYER}.input_layernorm.weight", f"{_TARGET}.attention_norm.weight", "embed", blocks=_ONE_NORM),
    Rule(f"{_LAYER}.input_layernorm.bias", f"{_TARGET}.attention_norm.bias", "embed", blocks=_ONE_NORM),
    Rule(f"{_LAYER}.post_attention_layernorm.weight", f"{_TARGET}.mlp_norm.weight", "embed", blocks=_ONE_NORM),
    Rule(f"{_LAYER}.post_attention_layernorm.bias", f"{_TARGET}.mlp_norm.bias", "embed", blocks=_ONE_NORM),
    Rule(f"{_LAYER}.ln_attn.weight", f"{_TARGET}.attention_norm.weight", "embed", blocks=_TWO_NORMS),
    Rule(f"{_LAYER}.ln_attn.bias", f"{_TARGET}.attention_norm.bias", "embed", blocks=_TWO_NORMS),
    Rule(f"{_LAYER}.ln_mlp.weight", f"{_TARGET}.mlp_norm.weight", "embed", blocks=_TWO_NORMS),
    Rule(f"{_LAYER}.ln_mlp.bias", f"{_TARGET}.mlp_norm.bias", "embed", blocks=_TWO_NORMS),
    *bloom.PROJECTIONS,
)
# Files of the RW form state rotations beside ALiBi, and nothing uses them then.
INERT = ("rope_parameters", "rope_scaling", "rope_theta")


def adapt(config: HfConfig) -> DecoderConfig:
    """From a FalconConfig."""
    config.require("apply_residual_connection_post_layernorm", False)
    hidden = config.integer(config.spelled("hidden_size", "n_embed"))
    heads, kv_heads = _read_heads(config)
    head_dim = config.head_dim(hidden, heads)
    ffn_size = config.integer("ffn_hidden_size", 4 * hidden)
    if config.integer("ff_factor", 4) * hidden != ffn_size and config.get("ff_factor") is not None:
        config.fail(f"ff_factor {config.get('ff_factor')} of hidden_size {hidden} is not ffn_hidden_size {ffn_size}")
    bias = config.flag("bias", False)
    if config.flag("alibi", False):
        position = AlibiConfig(factor=head_dim**-0.5)
        max_position = config.integer("max_position_embeddings", 2048)
    else:
        position = read_rope(config, head_dim)
        max_position = read_max_position(config, position)
    layer = LayerSpec(
        mlp=MlpSpec(size=ffn_size, gated=False, activation=config.activation("activation", "gelu"), bias=bias),
        position=position,
        scale=head_dim**-0.5,
        qkv_bias=bias,
        out_bias=bias,
        block=_read_block(config),
    )
    return DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        layers=(layer,) * config.integer("num_hidden_layers"),
        norm=read_layer_norm(config),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


def _read_heads(config: HfConfig) -> tuple[int, int]:
    """Query heads, and key/value heads: `num_kv_heads` counts in the new architecture alone."""
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_kv_heads", heads)
    if config.flag("new_decoder_architecture", False):
        if heads % kv_heads:
            config.fail(f"num_attention_heads {heads} is no multiple of num_kv_heads {kv_heads}")
        return heads, kv_heads
    if config.flag("multi_query", True):
        return heads, 1
    config.require("num_kv_heads", None, heads)
    return heads, heads


def _read_block(config: HfConfig) -> Block:
    """The new architecture is parallel, with two norms unless it says one; the old one shares its norm if parallel."""
    is_new, is_parallel = config.flag("new_decoder_architecture", False), config.flag("parallel_attn", True)
    config.flag("multi_query", True)  # without meaning in the new architecture
    if is_new:
        config.require("parallel_attn", True)
        config.require("num_ln_in_parallel_attn", None, 1, 2)
        return Block.SHARED if config.get("num_ln_in_parallel_attn", 2) == 1 else Block.PARALLEL
    config.require("num_ln_in_parallel_attn", None, 1)
    return Block.SHARED if is_parallel else Block.SEQUENTIAL


FAMILY = Family(architecture="FalconForCausalLM", adapt=adapt, weights=WEIGHTS, inert=INERT)
