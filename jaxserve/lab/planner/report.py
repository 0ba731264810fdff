"""`Plan`, the answer of the planner: values that print as a table or as JSON.

All bytes are per device unless a name says otherwise.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.lab.compiled.collectives import Collective
from jaxserve.lab.compiled.temporaries import Temporary


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes on the fullest device.

    Attributes:
      total_bytes: memory that JAX's allocator offers on it.
      budget_bytes: the share of it that may be used.
      state_bytes: block tables, masks and counts of the rows.
      adapter_bytes: the slots of LoRA adapters, of which there are `adapter_slots` and one of zeros; 0 without them.
      move_bytes: pages on their way to and from host memory, packed; 0 without `cache.host_bytes`.
      temporary_bytes: the most that a compiled step needs; an estimate where `temporaries_compiled` is false.
      headroom_bytes: unused bytes; negative: bytes that are missing before the first pages fit.
      page_bytes: one page, all slots of the device.
      page_groups: the groups of layers that share block tables, in words; empty where there is one without window.
      kv_tokens: that the pages hold, of sequences of model.max_len tokens.
      chosen_by: which rule fixed the number of pages.
    """

    total_bytes: int
    budget_bytes: int
    weight_bytes: int
    kv_bytes: int
    state_bytes: int
    adapter_bytes: int
    adapter_slots: int
    move_bytes: int
    temporary_bytes: int
    temporaries_compiled: bool
    headroom_bytes: int
    page_bytes: int
    page_size: int
    num_pages: int
    kv_tokens: int
    page_groups: str
    chosen_by: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PictureUse:
    """A picture of a size that the tower is compiled for.

    Attributes:
      patches, tokens: of the largest that is padded to it.
      temporary_bytes: estimate of the tower's activations, on each device.
      seconds: of the tower, by the roofline; added to the step before which the picture is encoded.
    """

    patches: int
    tokens: int
    temporary_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TowerUse:
    """The tower of a model that takes pictures, which each device has whole; parts of `MemoryUse`.

    Attributes:
      weight_bytes: part of the weights.
      pool_bytes: of embeddings, part of the state; `pool_tokens` fit.
      pictures: by size, ascending.
    """

    weight_bytes: int
    pool_bytes: int
    pool_tokens: int
    pictures: tuple[PictureUse, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CountedKernel:
    """One kernel of a layer, by the schedule that libtpu wrote for it.

    Attributes:
      window: of the layers that call it; None for full attention.
      byte_seconds: that its bytes need at the published bandwidth.
      spills: registers that one turn of an inner loop stores and loads for want of registers, in the worst loop.
    """

    name: str
    window: int | None
    seconds: float
    byte_seconds: float
    spills: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CountedStep:
    """The best guess of a step's time: counted in what the compilers wrote, never measured.

    Attributes:
      rows, tokens, context: of the batch that was counted; `context` tokens of each row, as many as the pages hold.
      seconds: the guess; `parts` (`lab.ledger.PARTS`) add up to it.
      byte_seconds, flop_seconds: the two floors, at the published bandwidth and peak.
      instructions, unestimated, unestimated_seconds, open_loops: as in `lab.ledger.StepTime`.
    """

    rows: int
    tokens: int
    context: int
    seconds: float
    parts: Mapping[str, float]
    byte_seconds: float
    flop_seconds: float
    instructions: int
    unestimated: int
    unestimated_seconds: float
    open_loops: int
    kernels: tuple[CountedKernel, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """Facts of one compiled step, from the compiler. Of a step of several rounds: of one of them.

    Attributes:
      width: tokens that each row feeds in a decode step: 1, or more with drafts.
      compiled_layers: of the programs that were compiled; where they are fewer than the model's, the rest is extended.
      compile_seconds: for the whole model on this machine.
      largest_temporary: of the arrays that the step makes, the largest; None: it makes none.
      argument_bytes: XLA's count of weights, state and inputs.
      predicted_argument_bytes: the same by arithmetic on shapes.
      flops: XLA's count; None where its compiler gives none.
      moved_bytes: through the memory of the device, Pallas kernels left out, since the text of a program does not say
        how much of the cache they read.
      sampling_bytes: the part of them that sampling moves when every row uses its most expensive options.
      kernels: calls of each Pallas kernel.
      counted: the guess of its time; None where there is none, for which `Plan.notes` have the reason.
    """

    name: str
    tokens: int
    rows: int
    decode_only: bool
    compiled_layers: tuple[int, ...]
    compile_seconds: float
    temporary_bytes: int
    argument_bytes: int
    predicted_argument_bytes: int
    flops: float | None
    moved_bytes: float
    sampling_bytes: float
    kernels: Mapping[str, int]
    collectives: tuple[Collective, ...]
    counted: CountedStep | None = None
    width: int = 1
    largest_temporary: Temporary | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One step of `tokens` tokens in `rows` rows at `context` tokens a row.

    Attributes:
      seconds: the larger of memory_seconds and compute_seconds, and the collectives after it.
      tokens_per_second: of all replicas; for a mixed step, prompt tokens; with drafts, if all of them are right.
      fits_pages: the pages hold that many rows of that context.
      compiled: the step itself was compiled; otherwise its bytes are extended from the nearest that was.
      width: tokens of each row of a decode step: its last one, and drafts.
    """

    decode: bool
    tokens: int
    rows: int
    context: int
    flops: float
    moved_bytes: float
    sent_bytes: float
    memory_seconds: float
    compute_seconds: float
    collective_seconds: float
    seconds: float
    tokens_per_second: float
    fits_pages: bool
    compiled: bool
    width: int = 1

    @property
    def bound_by(self) -> str:
        """The part that takes longest."""
        times = {
            "memory": self.memory_seconds,
            "compute": self.compute_seconds,
            "collectives": self.collective_seconds,
        }
        return max(times, key=lambda name: times[name])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A placement that would fit: the smallest topology of the same chip, and the smallest parallel.tensor there."""

    topology: str
    tensor: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer for one config on one topology.

    Attributes:
      problem: why it does not fit, with the setting to change; None when it fits.
      suggestion: None when it fits, or when nothing of that chip is large enough.
      devices_used: of the topology's `num_devices`.
      layers_compiled: None when nothing was compiled.
      assumptions: of the predictions, a sentence each.
      dtype: of activations.
      weights: the types that weights are kept in.
      notes: further facts for an operator.
      seconds: that planning took.
      tower: None for a model that takes no pictures.
    """

    topology: str
    chip: str
    num_devices: int
    devices_used: int
    tensor: int
    data: int
    model: str
    dtype: str
    weights: str
    fits: bool
    problem: str | None
    suggestion: Suggestion | None
    memory: MemoryUse
    steps: tuple[StepFacts, ...]
    predictions: tuple[Prediction, ...]
    assumptions: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float
    tower: TowerUse | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values, names as above."""
        tree = dataclasses.asdict(self)
        for prediction, values in zip(self.predictions, tree["predictions"], strict=True):
            values["bound_by"] = prediction.bound_by
        return tree
