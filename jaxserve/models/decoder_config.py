"""`DecoderConfig`, the static description of a decoder: a family's adapter produces it, the modules read it.

The families translate Hugging Face names into it. There are no arrays here, so that a config can be read and compared
without a device.
"""

import dataclasses
import enum


class NormKind(enum.StrEnum):
    """Kinds of normalisation of hidden states before a sub-block."""

    RMS = "rms"


class PositionKind(enum.StrEnum):
    """Kinds of positions in attention."""

    ROPE = "rope"


class MlpKind(enum.StrEnum):
    """Shape of the feed-forward block."""

    GATED = "gated"  # down(activation(gate(x)) * up(x))


class RopeScaling(enum.StrEnum):
    """Formulas that stretch the rotation frequencies beyond the trained length."""

    NONE = "none"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021) and its length scalings.

    Attributes:
      theta: base of the geometric series of frequencies.
      rotary_dim: leading dimensions of a head that turn; the rest pass through. Even.
      scaling: which of the formulas in `rope.py` applies; the fields below matter only to some.
      factor: stretch (all but none).
      original_max_position: trained length (dynamic, llama3, yarn).
      low_freq_factor, high_freq_factor: llama3.
      beta_fast, beta_slow, truncate: yarn's correction range, in turns; truncate rounds it to whole dimensions.
      attention_factor: yarn's multiplier of cos and sin, already resolved from mscale and mscale_all_dim.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        assert self.rotary_dim % 2 == 0, self.rotary_dim
        assert self.scaling is RopeScaling.NONE or self.factor > 0, self.factor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Everything static of one decoder. Letters of `jaxserve.api` in brackets.

    Attributes:
      vocab_size [V], hidden_size [D], ffn_size [F], num_layers [L]: sizes.
      num_query_heads [N], num_kv_heads [K], head_dim [H]: attention; N is a multiple of K, H need not be D / N.
      max_position: tokens of a sequence the checkpoint was made for.
      norm_eps: added under the square root.
      activation: name in `layers.ACTIVATIONS`.
      qkv_bias, out_bias, mlp_bias: which projections add a bias.
      qk_norm: RMS norm over each head of q and k before the rotation.
      windows: for each layer the sliding window in tokens, or None for full attention.
      attention_scale: multiplies the scores; None means H ** -0.5.
      attention_soft_cap, logit_soft_cap: x becomes cap * tanh(x / cap); None is off.
      tied_embeddings: the output projection is the transposed embedding table.
    """

    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope: RopeConfig
    windows: tuple[int | None, ...]
    norm: NormKind = NormKind.RMS
    norm_eps: float = 1e-6
    position: PositionKind = PositionKind.ROPE
    mlp: MlpKind = MlpKind.GATED
    activation: str = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        assert len(self.windows) == self.num_layers, (len(self.windows), self.num_layers)
        assert self.num_query_heads % self.num_kv_heads == 0, (self.num_query_heads, self.num_kv_heads)
        assert self.rope.rotary_dim <= self.head_dim, (self.rope.rotary_dim, self.head_dim)

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head [G]."""
        return self.num_query_heads // self.num_kv_heads
