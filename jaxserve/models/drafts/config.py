"""Static descriptions of draft heads: `EagleConfig` and `MedusaConfig`, which `reading` makes from a config.json.

A draft head is a small model that reads hidden states of another, its target, and guesses the tokens after the next.
"""

import dataclasses
import enum

from jaxserve.models.decoder_config import DecoderConfig


class HeadKind(enum.StrEnum):
    """Kinds of draft heads."""

    EAGLE = "eagle"  # one layer over embedding and last hidden state (Li et al., 2024, arXiv:2401.15077)
    EAGLE3 = "eagle3"  # one layer over embedding and hidden states of three layers (Li et al., 2025, arXiv:2503.01840)
    MTP = "mtp"  # a layer trained with the model to predict one token more (DeepSeek-V3; Qwen3-Next's names)
    MEDUSA = "medusa"  # a residual block for each place (Cai et al., 2024, arXiv:2401.10774)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """A head of one decoder layer, called once for each drafted token.

    Attributes:
      kind: EAGLE, EAGLE3 or MTP.
      decoder: sizes of its one layer; `vocab_size` and `hidden_size` are the target's.
      taps: layers of the target whose inputs the head reads, its number of layers standing for the output of the last;
        none: it reads the hidden states behind the final norm.
      draft_vocab_size: tokens that it chooses from.
      is_mapped: its ids are not the target's, and `DraftVocabulary` has those.
      own_embedding: it has a table of its own; else it reads the target's.
      own_lm_head: it has an output projection of its own; else the target's follows.
      fc_bias: the projection of its inputs adds a bias.
      norm_before_fc: all tapped hidden states of a token are normalised together first.
      norm_before_residual: what its layer adds to is the normalised feature.
      norm_output: the feature of the next place is its output behind the norm.
    """

    kind: HeadKind
    decoder: DecoderConfig
    taps: tuple[int, ...] = ()
    draft_vocab_size: int
    is_mapped: bool = False
    own_embedding: bool = False
    own_lm_head: bool = False
    fc_bias: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        assert self.kind is not HeadKind.MEDUSA and self.decoder.num_layers == 1, self
        assert (self.kind is HeadKind.EAGLE3) == bool(self.taps), self

    @property
    def hidden_size(self) -> int:
        """Of the target [D]."""
        return self.decoder.hidden_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """A head of independent blocks, each of which guesses one place from the same hidden state.

    Attributes:
      hidden_size [D], vocab_size [V]: the target's.
      num_heads: places.
      num_layers: residual blocks of each.
      bias: their products add one.
      own_lm_head: each has an output projection; else the target's follows.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    bias: bool = False
    own_lm_head: bool = False

    @property
    def kind(self) -> HeadKind:
        """MEDUSA."""
        return HeadKind.MEDUSA

    @property
    def taps(self) -> tuple[int, ...]:
        """None: the hidden states behind the final norm."""
        return ()

    @property
    def draft_vocab_size(self) -> int:
        """All of the target's."""
        return self.vocab_size


HeadConfig = EagleConfig | MedusaConfig
