"""A target and what makes its drafts as one model: a head, or a small decoder, is a part of the target's decoder.

So it is placed, converted and copied with it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from jaxserve.models.decoder import Decoder
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.drafts.config import HeadConfig
from jaxserve.models.drafts.loading import load_head, split_head
from jaxserve.models.loading import LoadedModel, PlannedModel, plan_model, split_abstract
from jaxserve.models.partition import Partition
from jaxserve.models.quantised import Kept
from jaxserve.models.weights import Path as WeightPath


def with_head(planned: PlannedModel, path: Path, config: HeadConfig | DecoderConfig) -> PlannedModel:
    """The model with the head, or the draft model, in the directory `path`, whose weights are read with the model's.

    `config`: of that. Raises CheckpointError from `load` where the files do not fit.
    """
    shapes = planned.shapes
    if isinstance(config, DecoderConfig):
        draft = plan_model(path, dtype=shapes.dtype.name, mesh=shapes.mesh)
        # Parameters that are codes are so in the whole model, under their paths in it.
        kept = {("head", *name): found for name, found in draft.shapes.kept.items()}
        return _attached(planned, draft.shapes.graphdef, draft.shapes.state, draft.fill, kept)

    def fill() -> nnx.State:
        architecture = target_name(shapes)
        return load_head(
            path, shapes.config, architecture, partition=shapes.partition, mesh=shapes.mesh, dtype=shapes.dtype
        ).state

    return _attached(planned, *split_head(config, shapes.partition, shapes.dtype), fill, {})


def _attached(
    planned: PlannedModel,
    head_graphdef: nnx.GraphDef,
    head_state: nnx.State,
    fill_head: Callable[[], nnx.State],
    kept: Mapping[WeightPath, Kept],
) -> PlannedModel:
    shapes = planned.shapes
    graphdef, state = attach(shapes.graphdef, shapes.state, head_graphdef, head_state)
    more = sum(leaf.size for leaf in jax.tree.leaves(head_state))
    both = dataclasses.replace(
        shapes, graphdef=graphdef, state=state, num_params=shapes.num_params + more, kept={**shapes.kept, **kept}
    )

    def fill() -> nnx.State:
        return attach(shapes.graphdef, planned.fill(), head_graphdef, fill_head())[1]

    def place(params: Mapping[str, jax.Array]) -> nnx.State:
        return attach(shapes.graphdef, planned.place(params), head_graphdef, fill_head())[1]

    return PlannedModel(shapes=both, fill=fill, place=place)


def target_name(model: LoadedModel) -> str:
    """The target's architecture, for messages."""
    names = model.checkpoint.config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else model.checkpoint.path.name


def attach(
    graphdef: nnx.GraphDef, state: nnx.State, head_graphdef: nnx.GraphDef, head_state: nnx.State
) -> tuple[nnx.GraphDef, nnx.State]:
    """The structure and the arrays (or shapes) of a decoder whose `head` is that one."""
    decoder: Decoder = nnx.merge(graphdef, state)
    decoder.head = nnx.data(nnx.merge(head_graphdef, head_state))
    return nnx.split(decoder)


def attach_shapes(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    config: HeadConfig | DecoderConfig,
    partition: Partition,
    dtype: np.dtype,
) -> tuple[nnx.GraphDef, nnx.State]:
    """`attach` for a head whose weights are not here: what is compiled for chips that are not here either."""
    if isinstance(config, DecoderConfig):
        return attach(graphdef, state, *split_abstract(Partition.of(config, partition.devices), dtype, None))
    return attach(graphdef, state, *split_head(config, partition, dtype))
