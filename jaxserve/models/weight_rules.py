"""`Rule`: where one tensor of a checkpoint goes; a family of models is a table of these."""

import dataclasses

from jaxserve.models.decoder_config import Block


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """Where one checkpoint tensor (or one per layer) goes. Positional, since it is a row of a table.

    The parameter's logical axes say how it lies in memory; a rule says only how the tensor lies on disk. The length of
    each axis is the parameter's, or of the part of it that the tensor fills.

    Attributes:
      source: tensor name; `{layer}` stands for each layer's number, `{expert}` for each expert's.
      target: parameter path in the decoder, joined by dots, with the same `{layer}`. A rule whose target a decoder
        does not have (a bias, say) does not apply to it.
      axes: the tensor's axes, by the parameter's names for them; several that are one axis on disk in parentheses,
        outermost first. An axis of the parameter that is not named has length 1 in the part.
      part: name in `PARTS` when the tensor fills only a slice of the target.
      beside: names of all parts that lie behind each other along the tensor's first axis, `part` among them, where it
        holds more than this one.
      blocks: of layers that it applies to, in families whose layers of another kind name their tensors otherwise.
    """

    source: str
    target: str
    axes: str
    part: str | None = None
    beside: tuple[str, ...] = ()
    blocks: tuple[Block, ...] = tuple(Block)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A slice of one axis of a fused parameter; counted from the end where negative, None: to the end."""

    axis: str
    start: int
    stop: int | None

    def bounds(self, size: int) -> range:
        """Its indices of an axis of that length."""
        return range(*slice(self.start, self.stop).indices(size))


# Slices of the fused kernels of `layers.py` and of their biases, by the name a rule uses.
PARTS = {
    "q": Part(axis="slots", start=0, stop=-2),
    "k": Part(axis="slots", start=-2, stop=-1),
    "v": Part(axis="slots", start=-1, stop=None),
    "gate": Part(axis="gate_up", start=0, stop=1),
    "up": Part(axis="gate_up", start=1, stop=2),
    "tower_q": Part(axis="qkv", start=0, stop=1),
    "tower_k": Part(axis="qkv", start=1, stop=2),
    "tower_v": Part(axis="qkv", start=2, stop=3),
}
