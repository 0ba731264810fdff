"""The roofline: seconds of a step from bytes and flops, for plans and simulations.

A step takes as long as the slower of two streams, bytes through the device's memory and operations through its matrix
units, each at an assumed share of its published peak; collectives come after it, unhidden. `Work` is the least that a
step must do; the planner adds what a compiler adds, and `simulation.fitted` has measured times. Nothing here needs JAX.

The assumptions are shares since no program reaches a peak. They are the same for every chip: none of them was measured
here, and a different number for each would pretend otherwise.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from jaxserve.values.chips import Topology

_ACTIVATION_WIDTHS = (8, 4)  # of D and of F that a layer reads and writes for each token, in the weights' dtype
_MANY = 2**20  # tokens that hit every expert
_LOGIT_PASSES = 2  # of the logits of a row in float32: written, read
_FLOAT32_PASSES = 6  # of bfloat16 products for one of float32, on units that have none


class MlpShape(Protocol):
    """The sizes of a feed-forward block.

    `num_columns`: of [D] numbers each, that a token is multiplied with, in all matrices; `columns_read`: those that a
    step of so many tokens reads, of which it needs not all where there are experts; `width`: numbers between products,
    for each token.
    """

    @property
    def num_columns(self) -> float: ...

    @property
    def width(self) -> float: ...

    def columns_read(self, tokens: int) -> float: ...


class ModelShape(Protocol):
    """The sizes of a decoder. Letters as everywhere: [D], [V], [N], [K], [H]; `windows` and `mlps` are by layer."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def mlps(self) -> Sequence[MlpShape]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_query_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def windows(self) -> tuple[int | None, ...]: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Assumptions about a device that are in no data sheet.

    Attributes:
      memory_share, compute_share, link_share: of the published peak.
      hop_seconds: from a chip to its neighbour; a collective crosses the slice and comes back.
      switch_seconds: of one collective through a switch.
      host_bandwidth: bytes a second between host memory and each device, either way, where a simulation has host slots.
    """

    memory_share: float = 0.8
    compute_share: float = 0.5
    link_share: float = 0.5
    hop_seconds: float = 1e-6
    switch_seconds: float = 10e-6
    host_bandwidth: float = 25e9

    def sentences(self, topology: Topology, context: int, dtype: str, tensor: int) -> tuple[str, ...]:
        """One for each figure that a prediction used."""
        chip = topology.chip
        peak = peak_flops(topology, dtype)
        lines = [
            f"memory: {self.memory_share:.0%} of {chip.memory_bandwidth / 1e9:.0f} GB/s; "
            f"compute: {self.compute_share:.0%} of {peak / 1e12:.0f} Tflop/s in {dtype}",
            f"every row has {context} tokens of context, and asks for the dearest options of sampling",
            "the next step is launched while one runs: no gap of the host; the batch is full",
        ]
        if tensor > 1:
            wait = (
                f"{self.hop_seconds * 1e6:.0f} us a hop" if chip.torus else f"{self.switch_seconds * 1e6:.0f} us each"
            )
            lines.append(
                f"collectives: rings at {self.link_share:.0%} of {chip.link_bandwidth / 1e9:.0f} GB/s one way, "
                f"{wait}, never hidden behind compute"
            )
        return tuple(lines)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The least that a step must do on one device, counted from the sizes that the device holds.

    Attributes:
      model: the part of it on one device.
      weight_size: bytes of a number of the layers' matrices; of codes with their share of scales.
      expert_size: the same of blocks with experts; None: `weight_size`.
      cache_size: bytes of a key's or value's number.
      head_size: bytes of a number of the output projection; None: `weight_size`.
      activation_size: bytes of a number of activations; None: `weight_size`.
    """

    model: ModelShape
    weight_size: float
    cache_size: int
    head_size: float | None = None
    activation_size: int | None = None
    expert_size: float | None = None

    @property
    def activation_bytes(self) -> float:
        """Of one number."""
        return self.weight_size if self.activation_size is None else self.activation_size

    @property
    def matrix_params(self) -> float:
        """Parameters of the matrices of all layers that a token is multiplied with."""
        return self._attention_params + self.model.hidden_size * sum(mlp.num_columns for mlp in self.model.mlps)

    def read_params(self, tokens: int) -> float:
        """Parameters of the matrices of all layers that a step of so many tokens reads."""
        columns = sum(mlp.columns_read(tokens) for mlp in self.model.mlps)
        return self._attention_params + self.model.hidden_size * columns

    def matrix_bytes(self, tokens: int) -> float:
        """Bytes of the matrices of all layers that a step of so many tokens reads."""
        size = self.weight_size if self.expert_size is None else self.expert_size
        columns = sum(
            (size if _has_experts(mlp) else self.weight_size) * mlp.columns_read(tokens) for mlp in self.model.mlps
        )
        return self.weight_size * self._attention_params + self.model.hidden_size * columns

    @property
    def _attention_params(self) -> int:
        m = self.model
        return m.num_layers * m.hidden_size * m.head_dim * (2 * m.num_query_heads + 2 * m.num_kv_heads)

    def flops(self, tokens: int, rows: int, pairs: float) -> float:
        """Operations of the step. `pairs`: of a token and one that it sees, over all rows (full attention)."""
        m = self.model
        dense = 2 * tokens * self.matrix_params + 2 * rows * m.hidden_size * m.vocab_size
        # A window narrower than the context lets each token see fewer.
        attended = sum(pairs if w is None else min(pairs, tokens * w) for w in m.windows)
        return dense + 4 * attended * m.num_query_heads * m.head_dim

    def cache_bytes(self, tokens: int, rows: int, context: float) -> float:
        """Keys and values that the kernels read and write. `context`: tokens that a row sees, on average."""
        m = self.model
        of_token = 2 * m.num_kv_heads * m.head_dim * self.cache_size
        read = sum(rows * (context if w is None else min(context, w)) for w in m.windows)
        return of_token * (read + tokens * m.num_layers)

    def other_bytes(self, tokens: int, rows: int) -> float:
        """Bytes of weights, activations and logits: those outside of the kernels."""
        m = self.model
        table, logits = m.vocab_size * m.hidden_size, 4 * _LOGIT_PASSES * rows * m.vocab_size
        return self.layer_bytes(tokens) + (self.head_size or self.weight_size) * table + logits

    def layer_bytes(self, tokens: int) -> float:
        """Those of the layers: no embedding, no logits."""
        m = self.model
        of_d, of_f = _ACTIVATION_WIDTHS
        activations = tokens * (of_d * m.num_layers * m.hidden_size + of_f * sum(mlp.width for mlp in m.mlps))
        return self.matrix_bytes(tokens) + self.activation_bytes * activations


def _has_experts(mlp: MlpShape) -> bool:
    """Whether some tokens together read more than one is multiplied with."""
    return mlp.columns_read(_MANY) > mlp.num_columns


class Seconds(NamedTuple):
    """Seconds of one step; `total` is the longer of the first two, and the third."""

    memory: float
    compute: float
    collective: float

    @property
    def total(self) -> float:
        return max(self.memory, self.compute) + self.collective


def roofline_seconds(
    topology: Topology,
    assumed: Assumptions,
    dtype: str,
    *,
    flops: float,
    moved_bytes: float,
    collectives: int,
    sent_bytes: float,
    group: int,
) -> Seconds:
    """Seconds of a step on one device.

    `collectives` of them are carried out in groups of `group` devices; each device sends `sent_bytes` for all of them.
    """
    chip = topology.chip
    collective_s = 0.0
    if collectives:
        wait_s = collective_wait(topology, assumed, group)
        collective_s = collectives * wait_s + sent_bytes / (chip.link_bandwidth * assumed.link_share)
    return Seconds(
        moved_bytes / (chip.memory_bandwidth * assumed.memory_share),
        flops / (peak_flops(topology, dtype) * assumed.compute_share),
        collective_s,
    )


def collective_wait(topology: Topology, assumed: Assumptions, group: int) -> float:
    """Latency of a collective of `group` devices, in seconds: its time for no bytes."""
    chip = topology.chip
    if not chip.torus:
        return assumed.switch_seconds
    fitting = [s for s in chip.shapes if chip.num_devices(s) >= group]
    return 2 * sum(side - 1 for side in fitting[0]) * assumed.hop_seconds


def peak_flops(topology: Topology, dtype: str) -> float:
    """Operations a second of a matrix product in `dtype`."""
    flops = topology.chip.flops
    return flops[dtype] if dtype in flops else flops["bfloat16"] / _FLOAT32_PASSES
