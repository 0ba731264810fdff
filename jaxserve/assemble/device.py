"""`Device`: a model that is ready to run plans, as `assemble` hands it to an engine."""

import dataclasses
import os
from collections.abc import Callable, Mapping

import jax

from jaxserve.engine.adapters import LoadedAdapters
from jaxserve.hosts import JointStore, LocalStore
from jaxserve.runtime.canonical_pages import SlotForm
from jaxserve.runtime.host_slots import SlotBytes
from jaxserve.runtime.runner import Weights
from jaxserve.sched import LaterBuckets, Limits, Runner

WeightSource = Mapping[str, jax.Array] | str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A model that is ready to run plans.

    Attributes:
      vocab_size: V of the model; the tokenizer may know fewer ids.
      eos_token_ids: as the checkpoint says.
      sampling_defaults: options of `SamplingParams` that the checkpoint recommends.
      private_prompts_above, max_position, generates: see `ModelInfo`.
      seconds: times of its construction: `plan` for the checkpoint's header and all shapes, then `weights` and
        `executables` at once.
      later: step shapes that the runner does not have yet; None: it has all.
      facts: settings that must be the same in all processes that run the model together, as texts.
      namespace: of the keys of pages (see `content`); equal where pages could be exchanged.
      slots: host memory for pages; None where there is none.
      page_layout: how the bytes of a slot are arranged.
      slot_form: the same as a value, where it is known.
      new_weights: makes other weights for the runner (see `live_weights`); None: it keeps those that it has.
      namespace_of: what `namespace` is with the weights of this directory; None: that is not known.
      renew: gives back the memory of the runner, which is used no more, and makes another device of the same weights
        and executables; takes seconds. None where that cannot be.
      adapters: those that requests may name, the same of all replicas; None: the engine takes none.
      join_stores: of a model over several processes: makes the store of all processes from that of this one.
    """

    runner: Runner
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, object]
    private_prompts_above: int | None = None
    max_position: int | None = None
    generates: bool = True
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    later: LaterBuckets | None = None
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    namespace: str = ""
    slots: SlotBytes | None = None
    page_layout: str = ""
    slot_form: SlotForm | None = None
    new_weights: Callable[[WeightSource], Weights] | None = None
    namespace_of: Callable[[str], str] | None = None
    renew: "Callable[[], Device] | None" = None
    adapters: LoadedAdapters | None = None
    join_stores: Callable[[LocalStore], JointStore] | None = None

    @property
    def all_limits(self) -> Limits:
        """The runner's limits once every bucket is there."""
        return self.runner.limits if self.later is None else self.later.all_limits
