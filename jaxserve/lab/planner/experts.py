"""What a compiled step does with experts: its grouped products, other readers of their weights, sums, and bytes.

The bytes are those of the layers: attention's kernels, the embedding, the logits and sampling are left out.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator

import jax
from flax import nnx

from jaxserve.lab.compiled.ahead import AbsentModel
from jaxserve.lab.compiled.collectives import KINDS
from jaxserve.lab.compiled.traffic import grouped_products, is_grouped_product, kernel_calls, memory_traffic
from jaxserve.lab.planner.make import step_work
from jaxserve.models.decoder_config import ExpertSpec
from jaxserve.models.sharding import WeightParameter, shardings_for
from jaxserve.runtime.hlo import Module, dims_of
from jaxserve.sched.plan import Bucket

_OUTSIDE = frozenset(("embed", "logits", "sample", "prompt_logprobs", "pool"))  # scopes that are no layer's
_PASSED_ON = frozenset(("bitcast", "get-tuple-element"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFacts:
    """Facts of the layers of one compiled step, on one device.

    Attributes:
      layers: that were compiled; all have experts.
      products: kernels of grouped products.
      other_readers: instructions that read weights of experts and are no such kernel: copies, or products of all rows
        with all experts.
      sums, other_exchanges: between devices.
      moved_bytes: through the memory, of experts those that are hit on average.
      weight_bytes: of the layers, of experts those hit on average.
      least_bytes: these and activations (`roofline.Work`).
    """

    layers: int
    products: int
    other_readers: tuple[str, ...]
    sums: int
    other_exchanges: int
    moved_bytes: int
    weight_bytes: int
    least_bytes: int

    @property
    def excess(self) -> float:
        """Bytes moved for each that has to be."""
        return self.moved_bytes / self.least_bytes


def expert_facts(module: Module, absent: AbsentModel, bucket: Bucket) -> ExpertFacts:
    """The facts of the compiled step of a bucket of a placed model of one stage."""
    (stage,) = absent.stages
    model = stage.partition.local
    local = dataclasses.replace(model, layers=model.layers[stage.layers.start : stage.layers.stop])
    assert all(isinstance(mlp, ExpertSpec) for mlp in local.mlps), "every layer has experts"
    work = dataclasses.replace(step_work(absent), model=local, cache_size=0)
    entry = module.computations[module.entry]
    outside = {i.name for i in entry if _OUTSIDE.intersection(i.scopes)}
    outside |= kernel_calls(module).keys() - grouped_products(module)
    # A TPU fetches one weight for the program's next run at the end of this one. Where it does, the fetch at the start
    # is the first run's alone; and few layers would make much of what happens once in a step.
    fetched = Counter(i.operands[0] for i in entry if i.op == "copy-start")
    outside |= {i.name for i in entry if "cross_program_prefetch_index" in i.text and fetched[i.operands[0]] > 1}
    moved = memory_traffic(module, hit_share=local.hit_share(bucket.tokens))
    exchanges = [
        i.op.removesuffix("-start")
        for name, body in module.computations.items()
        for i in body
        if i.op.removesuffix("-start") in KINDS and not _OUTSIDE.intersection(i.scopes)
    ]
    return ExpertFacts(
        layers=local.num_layers,
        products=len(grouped_products(module)),
        other_readers=tuple(_other_readers(module, absent)),
        sums=exchanges.count("all-reduce"),
        other_exchanges=len(exchanges) - exchanges.count("all-reduce"),
        moved_bytes=sum(size for name, size in moved.items() if name not in outside),
        weight_bytes=round(work.matrix_bytes(bucket.tokens)),
        least_bytes=round(work.layer_bytes(bucket.tokens)),
    )


def _other_readers(module: Module, absent: AbsentModel) -> Iterator[str]:
    """Instructions of the entry that take an expert weight and are no grouped product."""
    shapes = set(_weight_shapes(absent))
    entry = module.computations[module.entry]
    weights = {i.name for i in entry if i.op == "parameter" and dims_of(i.shape) in shapes}
    assert weights, f"no parameter has one of the shapes {shapes}"
    for i in entry:
        if not weights.intersection(i.operands) or is_grouped_product(i):
            continue
        if i.op in _PASSED_ON:
            weights.add(i.name)
        else:
            yield i.name


def _weight_shapes(absent: AbsentModel) -> Iterator[tuple[int, ...]]:
    """Of the experts' matrices on one device, as the step takes them."""
    (stage,) = absent.stages
    placed = nnx.to_flat_state(shardings_for(stage.state, stage.mesh))
    for (_, variable), (_, shardings) in zip(nnx.to_flat_state(stage.state), placed, strict=True):
        if isinstance(variable, WeightParameter) and any("experts" in axes for axes in variable.leaf_axes()):
            for leaf, sharding in zip(jax.tree.leaves(variable), jax.tree.leaves(shardings), strict=True):
                yield sharding.shard_shape(leaf.shape)
