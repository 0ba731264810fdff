"""`DecoderConfig`, the static description of a decoder: a family's adapter produces it, the modules read it.

A layer is a value, `LayerSpec`: what differs between families, and between the layers of one model, is a field of it.
The families translate Hugging Face names into it. There are no arrays here, so that a config can be read and compared
without a device.
"""

import dataclasses
import enum
import itertools


class NormKind(enum.StrEnum):
    """Kinds of normalisation of hidden states."""

    RMS = "rms"  # x / sqrt(mean(x ** 2)) (Zhang and Sennrich, 2019)
    LAYER = "layer"  # (x - mean(x)) / std(x) (Ba et al., 2016)


class NormPlace(enum.StrEnum):
    """Where a sub-block f of a layer is normalised."""

    BEFORE = "before"  # x + f(norm(x))
    AFTER = "after"  # x + norm(f(x))
    SUM = "sum"  # norm(x + f(x))


class Block(enum.StrEnum):
    """How attention and the feed-forward block of a layer follow each other."""

    SEQUENTIAL = "sequential"  # the second reads what the first has added to
    PARALLEL = "parallel"  # both read the input, each through its own norm
    SHARED = "shared"  # both read the input through one norm


class QkNorm(enum.StrEnum):
    """Over what queries and keys are normalised before positions are applied."""

    HEAD = "head"  # each head by itself
    JOINT = "joint"  # all heads of a token together


class RopeScaling(enum.StrEnum):
    """Formulas that stretch the rotation frequencies beyond the trained length."""

    NONE = "none"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    FACTORS = "factors"


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
      factors: what divides the frequency of each pair (factors).
      beta_fast, beta_slow, truncate: yarn's correction range, in turns; truncate rounds it to whole dimensions.
      attention_factor: yarn's multiplier of cos and sin, already resolved from mscale and mscale_all_dim.
      sections: of a token in a picture, how many pairs turn by its frame, its row and its column, one after another
        (M-RoPE, Wang et al., 2024); empty: a token has one position.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    factors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    sections: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.rotary_dim % 2 == 0, self.rotary_dim
        assert not self.sections or sum(self.sections) == self.rotary_dim // 2, (self.sections, self.rotary_dim)
        assert self.scaling is RopeScaling.NONE or self.factor > 0, self.factor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AlibiConfig:
    """Attention with linear biases (Press et al., 2022): each head has a slope, times the distance of a key.

    Attributes:
      max_bias: the exponent of the smallest slope: 2 ** -max_bias.
      factor: multiplies all slopes (Falcon scales the scores after the biases are added).
    """

    max_bias: float = 8.0
    factor: float = 1.0

    def slopes(self, num_heads: int) -> tuple[float, ...]:
        """The slope of each head: a geometric series, and beyond a power of two every other of a finer one."""
        power = 1 << (num_heads - 1).bit_length()  # the next power of two
        fine = [2.0 ** (-self.max_bias * i / power) for i in range(1, power + 1)]
        chosen = fine if power == num_heads else [*fine[1::2], *fine[::2]][:num_heads]
        return tuple(self.factor * slope for slope in chosen)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """One normalisation of hidden states.

    Attributes:
      kind: which.
      eps: added to the mean square, or the variance, under the root.
      bias: a bias is added at last.
      zero_centred: the stored weight is the difference to 1.
      round_first: the normalised number is rounded to the dtype of activations before the weight multiplies it, as
        some were trained; it matters in bfloat16.
    """

    kind: NormKind = NormKind.RMS
    eps: float = 1e-6
    bias: bool = False
    zero_centred: bool = False
    round_first: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """A dense feed-forward block.

    Attributes:
      size: [F], columns between the two products.
      gated: down(activation(gate(x)) * up(x)), and not down(activation(up(x))).
      activation: name in `kernels.activations.ACTIVATIONS`.
      bias: all of its projections add one.
    """

    size: int
    gated: bool = True
    activation: str = "silu"
    bias: bool = False

    @property
    def num_columns(self) -> int:
        """Columns of hidden_size that a token is multiplied with, in the matrices of one layer."""
        return (3 if self.gated else 2) * self.size

    def columns_read(self, tokens: int) -> float:
        """Columns that a step of so many tokens reads: all of them."""
        del tokens
        return self.num_columns

    @property
    def width(self) -> int:
        """Numbers between its products, for each token."""
        return self.size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """A feed-forward block of many experts, of which each token takes a few. Letters of `jaxserve.api` in brackets.

    Attributes:
      count: experts that the router chooses from.
      per_token: how many a token goes to.
      size [F]: columns of one expert's gate and up.
      renormalise: the weights of a token's experts add up to 1: a softmax over the chosen logits. It is the same as a
        softmax over all of them, divided by the sum of the chosen (Mixtral, Qwen3), and as a softmax after the choice
        (gpt-oss). Otherwise they are what a softmax over all experts gives to the chosen (Qwen2-MoE).
      router_bias: the router adds a bias to its logits.
      bias: the products of the experts add biases.
      activation: name in `kernels.activations.ACTIVATIONS`, of gate.
      limit: gpt-oss's activation takes its place: (up + 1) * gate * sigmoid(1.702 * gate), where gate is at most
        `limit`, and up between -`limit` and `limit`.
      shared_size: columns of an expert that all tokens go to, whose output is multiplied with the sigmoid of a product
        of its own; 0: there is none.
      held: experts in the arrays; None: `count`. More where they were padded to divide over devices (no token goes to
        those), fewer on one of several devices.
    """

    count: int
    per_token: int
    size: int
    renormalise: bool = True
    router_bias: bool = False
    bias: bool = False
    activation: str = "silu"
    limit: float | None = None
    shared_size: int = 0
    held: int | None = None

    def __post_init__(self) -> None:
        assert 1 <= self.per_token <= self.count, (self.per_token, self.count)

    @property
    def num_held(self) -> int:
        """Experts in the arrays."""
        return self.count if self.held is None else self.held

    @property
    def num_columns(self) -> float:
        """Columns of hidden_size that a token is multiplied with, in the matrices of one layer; on average."""
        return self.count + 3 * (self.per_token * self._share * self.size + self.shared_size)

    @property
    def _share(self) -> float:
        """Of the experts, that are in the arrays."""
        return min(1.0, self.num_held / self.count)

    @property
    def width(self) -> int:
        """Numbers between its products, for each token."""
        return self.per_token * self.size + self.shared_size

    def columns_read(self, tokens: int) -> float:
        """Columns that a step of so many tokens reads: experts hit, on average of tokens that choose evenly."""
        hit = self.count * self.hit_share(tokens)
        return self.count + 3 * (hit * self._share * self.size + self.shared_size)

    def hit_share(self, tokens: int) -> float:
        """Of the experts, that a step of so many tokens hits; on average of tokens that choose evenly."""
        return 1 - (1 - self.per_token / self.count) ** tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Everything static of one layer but the sizes that all layers share.

    Attributes:
      mlp: the feed-forward block.
      position: how attention knows where a token is; None: not at all (or from the embedding).
      scale: multiplies the scores.
      window: a token sees that many positions, its own included; None: all before it.
      soft_cap: scores s become soft_cap * tanh(s / soft_cap); None is off.
      sinks: a learned number for each query head joins the denominator of its softmax.
      qkv_clip: queries, keys and values are cut to [-qkv_clip, qkv_clip]; None is off.
      qk_norm: over what queries and keys are normalised; None is off.
      qkv_bias, out_bias: which projections of attention add a bias.
      block, norms: the order of the sub-blocks, and the places of their norms.
    """

    mlp: MlpSpec | ExpertSpec
    position: RopeConfig | AlibiConfig | None
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    qkv_clip: float | None = None
    qk_norm: QkNorm | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    block: Block = Block.SEQUENTIAL
    norms: tuple[NormPlace, ...] = (NormPlace.BEFORE,)

    def __post_init__(self) -> None:
        assert self.block is Block.SEQUENTIAL or self.norms == (NormPlace.BEFORE,), (self.block, self.norms)

    @property
    def rope(self) -> RopeConfig | None:
        """The rotation of queries and keys, if there is one."""
        return self.position if isinstance(self.position, RopeConfig) else None

    @property
    def alibi(self) -> AlibiConfig | None:
        """The linear biases of scores, if there are any."""
        return self.position if isinstance(self.position, AlibiConfig) else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSpec:
    """What becomes of a token before the first layer and of hidden states before the output projection.

    Attributes:
      scale: multiplies embeddings, rounded to their dtype first.
      norm: they are normalised.
      num_positions: learned positions, one added to each token; 0: none. `position_offset`: entries before that of
        position 0.
      width: of the table, where it is not hidden_size: a projection follows it, and another comes before the output.
    """

    scale: float = 1.0
    norm: bool = False
    num_positions: int = 0
    position_offset: int = 0
    width: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DecoderConfig:
    """Everything static of one decoder. Letters of `jaxserve.api` in brackets.

    Attributes:
      vocab_size [V], hidden_size [D]: sizes.
      num_query_heads [N], num_kv_heads [K], head_dim [H]: attention; N is a multiple of K, H need not be D / N.
      max_position: tokens of a sequence the checkpoint was made for.
      layers: one after another.
      norm: how hidden states are normalised, everywhere.
      final_norm: they are once more after the last layer.
      embedding: see there.
      logit_soft_cap: logits x become cap * tanh(x / cap); None is off.
      tied_embeddings: the output projection is the transposed embedding table.
      lm_head_bias: it adds a bias.
      has_head: false of a base model, which makes hidden states alone; then `tied_embeddings` gives it logits, which
        mean nothing, and nobody may generate.
      cache_scales: attention has scales of keys and values, since the cache has eight bits; no matter of a checkpoint.
      module: the class of the decoder, made and called as `decoder.Decoder` is; None: that one.
    """

    vocab_size: int
    hidden_size: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec = NormSpec(round_first=True)
    final_norm: bool = True
    embedding: EmbeddingSpec = EmbeddingSpec()
    logit_soft_cap: float | None = None
    tied_embeddings: bool = False
    lm_head_bias: bool = False
    has_head: bool = True
    cache_scales: bool = False
    module: type | None = None

    def __post_init__(self) -> None:
        assert self.layers
        assert self.num_query_heads % self.num_kv_heads == 0, (self.num_query_heads, self.num_kv_heads)
        for rope in self.ropes:
            assert rope.rotary_dim <= self.head_dim, (rope.rotary_dim, self.head_dim)

    def __repr__(self) -> str:
        """Equal layers that follow each other are written once."""
        runs = ", ".join(f"{len(list(run))} x {layer!r}" for layer, run in itertools.groupby(self.layers))
        others = [f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.name != "layers"]
        return f"DecoderConfig({', '.join(others)}, layers=[{runs}])"

    @property
    def num_layers(self) -> int:
        """[L]."""
        return len(self.layers)

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head [G]."""
        return self.num_query_heads // self.num_kv_heads

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return tuple(layer.window for layer in self.layers)

    @property
    def mlps(self) -> tuple[MlpSpec | ExpertSpec, ...]:
        """The feed-forward block of each layer."""
        return tuple(layer.mlp for layer in self.layers)

    def hit_share(self, tokens: int) -> float:
        """Of a layer's experts, that a step of so many tokens hits (`ExpertSpec.hit_share`); 1 without experts."""
        shares = [mlp.hit_share(tokens) for mlp in self.mlps if isinstance(mlp, ExpertSpec)]
        return max(shares, default=1.0)

    @property
    def has_sections(self) -> bool:
        """A token of a picture has three positions (`RopeConfig.sections`)."""
        return any(rope.sections for rope in self.ropes)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The different rotations of the layers."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))
