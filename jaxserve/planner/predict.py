"""Seconds from bytes and flops: a roofline, with its assumptions said aloud.

Owns the model of time. Refuses measurements. A step takes as long as the slower of two streams, bytes through the
device's memory and operations through its matrix units, each at an assumed share of its published peak; collectives
come after it, unhidden. The host adds nothing: a step is launched while the one before it runs.

Why shares and not peaks: no program reaches a peak. Why the same shares for every chip: none of them was measured here,
and a different number for each would pretend otherwise.
"""

import dataclasses
import math
from collections.abc import Sequence

from jaxserve.chips import Topology
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.planner.report import Prediction, StepFacts

_ACTIVATION_WIDTHS = (8, 4)  # of D and of F that a layer reads and writes for each token, in the weights' dtype
_LOGIT_PASSES = 2  # of the logits of a row in float32: written, read
_FLOAT32_PASSES = 6  # of bfloat16 products for one of float32, on units that have none


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What no data sheet says.

    Attributes:
      memory_share, compute_share, link_share: of the published peak.
      hop_seconds: from a chip to its neighbour; a collective crosses the slice and comes back.
      switch_seconds: of one collective through a switch.
    """

    memory_share: float = 0.8
    compute_share: float = 0.5
    link_share: float = 0.5
    hop_seconds: float = 1e-6
    switch_seconds: float = 10e-6

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

    `model` is `Partition.local`; `weight_size` and `cache_size` are bytes of a number.
    """

    model: DecoderConfig
    weight_size: int
    cache_size: int

    @property
    def layer_params(self) -> int:
        """Of the matrices of one layer."""
        m = self.model
        attention = m.hidden_size * m.head_dim * (2 * m.num_query_heads + 2 * m.num_kv_heads)
        return attention + 3 * m.hidden_size * m.ffn_size

    def flops(self, tokens: int, rows: int, pairs: float) -> float:
        """`pairs`: of a token and one that it sees, over all rows (full attention)."""
        m = self.model
        dense = 2 * tokens * m.num_layers * self.layer_params + 2 * rows * m.hidden_size * m.vocab_size
        # A window narrower than the context lets each token see fewer.
        attended = sum(pairs if w is None else min(pairs, tokens * w) for w in m.windows)
        return dense + 4 * attended * m.num_query_heads * m.head_dim

    def cache_bytes(self, tokens: int, rows: int, context: int) -> int:
        """Keys and values that the kernels read and write."""
        m = self.model
        of_token = 2 * m.num_kv_heads * m.head_dim * self.cache_size
        read = sum(rows * (context if w is None else min(context, w)) for w in m.windows)
        return of_token * (read + tokens * m.num_layers)

    def other_bytes(self, tokens: int, rows: int) -> int:
        """Weights, activations and logits: what is outside the kernels."""
        m = self.model
        of_d, of_f = _ACTIVATION_WIDTHS
        weights = m.num_layers * self.layer_params + m.vocab_size * m.hidden_size
        activations = m.num_layers * tokens * (of_d * m.hidden_size + of_f * m.ffn_size)
        return self.weight_size * (weights + activations) + 4 * _LOGIT_PASSES * rows * m.vocab_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Everything a prediction needs beside the size of a step. `replicas` work side by side."""

    topology: Topology
    work: Work
    steps: Sequence[StepFacts]
    assumed: Assumptions
    dtype: str
    kv_tokens: int
    replicas: int

    def decode(self, rows: int, context: int) -> Prediction:
        """One token for each of `rows` rows."""
        return self._predict(tokens=rows, rows=rows, context=context, pairs=rows * context, decode=True)

    def prefill(self, tokens: int) -> Prediction:
        """A prompt of `tokens` tokens, alone, in one step."""
        return self._predict(tokens=tokens, rows=1, context=tokens, pairs=tokens * (tokens + 1) / 2, decode=False)

    def _predict(self, *, tokens: int, rows: int, context: int, pairs: float, decode: bool) -> Prediction:
        chip, assumed = self.topology.chip, self.assumed
        near = self._nearest(tokens, decode)
        flops = self.work.flops(tokens, rows, pairs)
        moved = self.work.cache_bytes(tokens, rows, context) + (
            self._other_bytes(tokens, rows, near if decode else None)
        )
        # Exchanges per layer are alike in all buckets; what they carry grows with the tokens.
        growth = tokens / near.tokens if near is not None else 1.0
        sent = sum(c.sent_bytes for c in near.collectives) * growth if near is not None else 0.0
        number = sum(c.count for c in near.collectives) if near is not None else 0
        memory_s = moved / (chip.memory_bandwidth * assumed.memory_share)
        compute_s = flops / (peak_flops(self.topology, self.dtype) * assumed.compute_share)
        collective_s = 0.0
        if number:
            collective_s = number * self._wait(near) + sent / (chip.link_bandwidth * assumed.link_share)
        seconds = max(memory_s, compute_s) + collective_s
        return Prediction(
            decode=decode,
            tokens=tokens,
            rows=rows,
            context=context,
            flops=flops,
            moved_bytes=moved,
            sent_bytes=sent,
            memory_seconds=memory_s,
            compute_seconds=compute_s,
            collective_seconds=collective_s,
            seconds=seconds,
            tokens_per_second=self.replicas * tokens / seconds,
            fits_pages=rows * context <= self.kv_tokens,
            compiled=near is not None and (near.tokens, near.decode_only) == (tokens, decode),
        )

    def _nearest(self, tokens: int, decode: bool) -> StepFacts | None:
        same = [step for step in self.steps if step.decode_only == decode]
        # Either kind of step exchanges the same arrays in every layer.
        return min(same or self.steps, key=lambda step: abs(math.log(step.tokens / tokens)), default=None)

    def _other_bytes(self, tokens: int, rows: int, near: StepFacts | None) -> float:
        """Outside of kernels: the least, times what the compiled program adds to it, and sampling by the row.

        Without kernels attention is among what a program moves, and cannot be told apart: the least has to do.
        """
        least = self.work.other_bytes(tokens, rows)
        if near is None or not near.kernels or not near.decode_only:
            return least
        added = (near.moved_bytes - near.sampling_bytes) / self.work.other_bytes(near.tokens, near.rows)
        # Weights small enough to stay in a TPU's fast memory are counted as never read; no step is planned with that.
        return least * max(1.0, added) + near.sampling_bytes * rows / near.rows

    def _wait(self, step: StepFacts | None) -> float:
        chip = self.topology.chip
        if not chip.torus:
            return self.assumed.switch_seconds
        assert step is not None
        group = max((c.group for c in step.collectives), default=1)
        fitting = [s for s in chip.shapes if chip.num_devices(s) >= group]
        return 2 * sum(side - 1 for side in fitting[0]) * self.assumed.hop_seconds


def peak_flops(topology: Topology, dtype: str) -> float:
    """Operations a second of a matrix product in `dtype`."""
    flops = topology.chip.flops
    return flops[dtype] if dtype in flops else flops["bfloat16"] / _FLOAT32_PASSES
