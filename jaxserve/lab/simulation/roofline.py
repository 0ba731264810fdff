"""A cost model for devices that are not at hand: published peaks, the sizes of a model, and assumed shares.

A plan becomes bytes and operations of one device, and these become seconds in `lab.roofline`, as in the planner. A step
computes the whole bucket, padding included, but attends only to real tokens. A step of several rounds does so in each
of them. Drafts cost nothing here, which is true of those that are looked up.

The work that a compiler adds, and the host, are unknown here. Compare with `jaxserve plan`, which compiles the real
step for the same device, before you believe an absolute figure; differences between policies depend on it far less.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.errors import CapacityError, ConfigError
from jaxserve.lab.roofline import Assumptions, MlpShape, ModelShape, Seconds, Work, roofline_seconds
from jaxserve.lab.simulation.values import StepCost
from jaxserve.lab.tower_work import TowerWork
from jaxserve.sched.plan import Bucket, Limits, StepPlan
from jaxserve.values.chips import Topology, parse_topology

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8": 1}
RESERVED_BYTES = 2**30  # of a device, for what a step needs
_ALL = 2**30  # tokens that read every expert
_SUMS_PER_LAYER = 2  # behind attention and behind the feed-forward block, of all hidden states


class GatedMlp(NamedTuple):
    """A `MlpShape` of three matrices."""

    width: int

    @property
    def num_columns(self) -> float:
        """See `MlpShape`."""
        return 3 * self.width

    def columns_read(self, tokens: int) -> float:
        """See `MlpShape`."""
        del tokens
        return self.num_columns


class MlpPart(NamedTuple):
    """A `MlpShape` of which a device has one part in `devices`."""

    whole: MlpShape
    devices: int

    @property
    def num_columns(self) -> float:
        """See `MlpShape`."""
        return self.whole.num_columns / self.devices

    @property
    def width(self) -> float:
        """See `MlpShape`."""
        return self.whole.width / self.devices

    def columns_read(self, tokens: int) -> float:
        """See `MlpShape`."""
        return self.whole.columns_read(tokens) / self.devices


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The sizes of a decoder, for use without a checkpoint. See `ModelShape` for the letters.

    All layers have full attention and a gated feed-forward block of `ffn_size`, unless `layer_windows` and `layer_mlps`
    say otherwise.
    """

    hidden_size: int
    ffn_size: int
    vocab_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    layer_windows: tuple[int | None, ...] = ()
    layer_mlps: tuple[MlpShape, ...] = ()

    @property
    def mlps(self) -> tuple[MlpShape, ...]:
        """Feed-forward block of each layer."""
        return self.layer_mlps or (GatedMlp(self.ffn_size),) * self.num_layers

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer; None: full attention."""
        return self.layer_windows or (None,) * self.num_layers


# From the config.json files of the published checkpoints.
LLAMA_3_8B = DecoderShape(
    hidden_size=4096,
    ffn_size=14336,
    vocab_size=128256,
    num_layers=32,
    num_query_heads=32,
    num_kv_heads=8,
    head_dim=128,
)
LLAMA_3_70B = DecoderShape(
    hidden_size=8192,
    ffn_size=28672,
    vocab_size=128256,
    num_layers=80,
    num_query_heads=64,
    num_kv_heads=8,
    head_dim=128,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """Seconds of the loop's thread, assumed: a step, and each row of it, before the launch and after the result.

    The defaults are near what the scheduler, packing and streams of this engine take on a server's core at 256 rows.
    """

    step_s: float = 300e-6
    row_s: float = 1e-6
    commit_row_s: float = 2e-6


class Roofline:
    """A `CostModel`. It caches figures of each bucket; nothing else of it changes.

    Args:
      topology: 'v5e:2x4', 'h200:1', or a parsed one. One of its devices alone is meant by 'cpu:1'.
      model: sizes of the whole model; a `DecoderConfig` is one.
      tensor: devices that share every layer; None: all of the topology.
      dtype: of weights and matrix products; bfloat16, or float32 on a CPU, when empty. `cache_dtype`: of keys and
        values, the same when empty.
      stored: the bytes of a number of weights that are kept as codes are those in it; None: all are in `dtype`.
      assumed, host: assumptions that are in no data sheet.
      tower, patch_buckets: of a model that takes pictures: its tower, and the sizes that a picture is padded to. A step
        takes as much longer as the pictures take that are encoded before it.

    Raises ConfigError for a topology or a type that does not exist, or more devices than there are.
    """

    def __init__(
        self,
        topology: Topology | str,
        model: ModelShape,
        *,
        tensor: int | None = None,
        dtype: str = "",
        cache_dtype: str = "",
        stored: Work | None = None,
        assumed: Assumptions | None = None,
        host: HostCost | None = None,
        tower: TowerWork | None = None,
        patch_buckets: Sequence[int] = (),
    ) -> None:
        self.topology = parse_topology(topology) if isinstance(topology, str) else topology
        self.tensor = self.topology.num_devices if tensor is None else tensor
        self.dtype = dtype = _checked_dtype(self.topology, dtype)
        self.assumed = assumed or Assumptions()
        self.host = host or HostCost()
        self.tower = tower
        self.hidden_size = model.hidden_size
        self.encode_s: dict[int, float] = {}  # by bucket of patches
        if tower is not None:
            peaks = (self.topology, self.assumed, dtype)
            self.encode_s = {patches: tower.seconds(patches, *peaks) for patches in sorted(patch_buckets)}
        cache_dtype = cache_dtype or dtype
        if cache_dtype not in _ITEM_BYTES:
            raise ConfigError(f"no numbers of type {cache_dtype!r} are known; there are {', '.join(_ITEM_BYTES)}")
        if not 1 <= self.tensor <= self.topology.num_devices:
            raise ConfigError(
                f"a step on {self.tensor} devices was asked for, but {self.topology.name} has "
                f"{self.topology.num_devices}; lower `tensor` or name a larger topology"
            )
        if self.tensor > 1 and not self.topology.chip.link_bandwidth:
            raise ConfigError(
                f"a step on {self.tensor} devices of {self.topology.name} was asked for, and nothing is known of the "
                "links between them; take a tensor of 1"
            )
        self.work = Work(
            model=local_shape(model, self.tensor),
            weight_size=_ITEM_BYTES[dtype] if stored is None else stored.weight_size,
            expert_size=None if stored is None else stored.expert_size,
            head_size=None if stored is None else stored.head_size,
            activation_size=_ITEM_BYTES[dtype],
            cache_size=_ITEM_BYTES[cache_dtype],
        )
        self._windows = collections.Counter(self.work.model.windows)
        self._of_bucket: dict[Bucket, Seconds] = {}
        # Of one more pair of tokens, and one more token of context, in a layer.
        layers = self.work.model.num_layers
        self._of_pair_s = self._seconds(flops=self.work.flops(1, 0, 1.0) - self.work.flops(1, 0, 0.0)).compute / layers
        self._of_context_s = self._seconds(moved_bytes=self.work.cache_bytes(0, 1, 1.0)).memory / layers

    def step_seconds(self, plan: StepPlan, bucket: Bucket) -> StepCost:
        """See `CostModel`."""
        num_rows = len(plan.decode_rows) + len(plan.chunks)
        base = self._of_bucket.get(bucket)
        if base is None:
            base = self._of_bucket[bucket] = self._base(bucket)
        memory_s, compute_s, collective_s = base
        for window, num_layers in self._windows.items():
            context, pairs = _attended(plan, window)
            compute_s += self._of_pair_s * pairs * num_layers
            memory_s += self._of_context_s * context * num_layers
        host = self.host
        device_s = ((memory_s if memory_s > compute_s else compute_s) + collective_s) * plan.rounds
        for encode in plan.encodes:
            if encode.load:
                num_bytes = encode.num_tokens * self.hidden_size * self.work.activation_bytes
                device_s += num_bytes / self.assumed.host_bandwidth
            else:
                device_s += self._encode_seconds(encode.picture.num_patches)
        return StepCost(host.step_s + host.row_s * num_rows, device_s, host.commit_row_s * num_rows)

    def _encode_seconds(self, patches: int) -> float:
        for bucket, seconds in self.encode_s.items():
            if patches <= bucket:
                return seconds
        largest = max(self.encode_s, default=0)
        raise ConfigError(
            f"a picture of {patches} patches was asked for, but the simulated server encodes up to {largest}; make it "
            "smaller, as a server would, or raise vision.max_pixels"
        )

    def step_ms(self, limits: Limits) -> Limits:
        """The limits with the time of a round of each decode bucket, without context, as a device measures them."""
        times = {bucket: 1e3 * self._base(bucket).total for bucket in limits.buckets if bucket.decode_only}
        return limits.with_buckets(limits.buckets, times)

    def num_pages(
        self,
        page_size: int,
        *,
        page_layers: int | None = None,
        memory_fraction: float = 0.9,
        cache_fraction: float = 1.0,
        reserved_bytes: int = RESERVED_BYTES,
    ) -> int:
        """Pages that fit beside the weights on each device, `reserved_bytes` left for what a step needs.

        A page holds tokens of `page_layers` layers; None: of all. The weights of a tower count. Pages take no more than
        `cache_fraction` of the device. An estimate; `jaxserve plan` asks the compiler. Raises CapacityError when not
        one does.
        """
        m = self.work.model
        if self.tower is not None:
            reserved_bytes += self.tower.num_bytes
        tables = (self.work.head_size or self.work.weight_size) + self.work.activation_bytes
        weights = int(self.work.matrix_bytes(_ALL) + tables * m.vocab_size * m.hidden_size)
        page = self.page_bytes(page_size, page_layers or m.num_layers)
        budget = int(self.topology.chip.allocatable_bytes * memory_fraction) - reserved_bytes
        if budget - weights < page:
            raise CapacityError(
                f"the weights take {weights / 2**30:.1f} GiB of the {budget / 2**30:.1f} GiB that may be used on a "
                f"device of {self.topology.name}; take more devices, or a narrower dtype than {self.dtype}"
            )
        return min(budget - weights, int(self.topology.chip.allocatable_bytes * cache_fraction)) // page

    def page_bytes(self, page_size: int, page_layers: int) -> int:
        """Bytes of a page on each device."""
        m = self.work.model
        return 2 * page_layers * m.num_kv_heads * m.head_dim * self.work.cache_size * page_size

    def _base(self, bucket: Bucket) -> Seconds:
        """The cost of a bucket whose rows have no context."""
        work, model = self.work, self.work.model
        number = _SUMS_PER_LAYER * model.num_layers if self.tensor > 1 else 0
        payload = number * bucket.tokens * model.hidden_size * work.activation_bytes
        lines = bucket.rows * bucket.width  # of logits
        return self._seconds(
            flops=work.flops(bucket.tokens, lines, 0.0),
            moved_bytes=work.cache_bytes(bucket.tokens, 0, 0.0) + work.other_bytes(bucket.tokens, lines),
            collectives=number,
            sent_bytes=2 * (self.tensor - 1) / self.tensor * payload,  # a ring: scatter, then gather
        )

    def _seconds(
        self, *, flops: float = 0.0, moved_bytes: float = 0.0, collectives: int = 0, sent_bytes: float = 0.0
    ) -> Seconds:
        return roofline_seconds(
            self.topology,
            self.assumed,
            self.dtype,
            flops=flops,
            moved_bytes=moved_bytes,
            collectives=collectives,
            sent_bytes=sent_bytes,
            group=self.tensor,
        )


def _attended(plan: StepPlan, window: int | None) -> tuple[int, int]:
    """Tokens of context that the rows of a step read in a layer, and pairs of a token and one that it sees."""
    if window is None:
        context = sum(plan.decode_positions) + len(plan.decode_positions)
    else:
        context = sum(min(position + 1, window) for position in plan.decode_positions)
    pairs = context * plan.width
    for chunk in plan.chunks:
        length = len(chunk.token_ids)
        seen, of_chunk = chunk.start + length, length * chunk.start + length * (length + 1) // 2
        context += seen if window is None else min(seen, window)
        pairs += of_chunk if window is None else min(of_chunk, length * window)
    return context, pairs


def _checked_dtype(topology: Topology, dtype: str) -> str:
    flops = topology.chip.flops
    offered = {*flops, *(("float32",) if "bfloat16" in flops else ())}  # whose units compute it in several passes
    dtype = dtype or ("bfloat16" if "bfloat16" in flops else "float32")
    if dtype not in offered:
        raise ConfigError(f"{topology.name} computes {', '.join(sorted(offered))}, but {dtype!r} was asked for")
    return dtype


def local_shape(model: ModelShape, devices: int) -> DecoderShape:
    """The part of a model on the most loaded of `devices` devices; heads of keys fewer than devices are copied."""
    kv_heads = math.ceil(model.num_kv_heads / devices)
    return DecoderShape(
        hidden_size=model.hidden_size,
        ffn_size=math.ceil(max(mlp.width for mlp in model.mlps) / devices),
        vocab_size=math.ceil(model.vocab_size / devices),
        num_layers=model.num_layers,
        num_query_heads=math.ceil(model.num_query_heads / devices),
        num_kv_heads=kv_heads,
        head_dim=model.head_dim,
        layer_windows=model.windows,
        layer_mlps=tuple(MlpPart(mlp, devices) for mlp in model.mlps),
    )
