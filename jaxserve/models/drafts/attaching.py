"""A target and its head as one model: a head is a part of its decoder, and is placed, converted and copied with it."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from jaxserve.models.decoder import Decoder
from jaxserve.models.drafts.config import HeadConfig
from jaxserve.models.drafts.loading import load_head, split_head
from jaxserve.models.loading import LoadedModel, PlannedModel
from jaxserve.models.partition import Partition


def with_head(planned: PlannedModel, path: Path, config: HeadConfig) -> PlannedModel:
    """The model with the head in the directory `path`, whose weights are read with the model's. `config`: of the head.

    Raises CheckpointError from `load` where the files do not fit.
    """
    shapes = planned.shapes
    head_graphdef, head_state = split_head(config, shapes.partition, shapes.dtype)
    graphdef, state = attach(shapes.graphdef, shapes.state, head_graphdef, head_state)
    more = sum(leaf.size for leaf in jax.tree.leaves(head_state))
    both = dataclasses.replace(shapes, graphdef=graphdef, state=state, num_params=shapes.num_params + more)

    def fill() -> nnx.State:
        architecture = target_name(shapes)
        head = load_head(
            path, shapes.config, architecture, partition=shapes.partition, mesh=shapes.mesh, dtype=shapes.dtype
        )
        return attach(shapes.graphdef, planned.fill(), head.graphdef, head.state)[1]

    return PlannedModel(shapes=both, fill=fill)


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
    graphdef: nnx.GraphDef, state: nnx.State, config: HeadConfig, partition: Partition, dtype: np.dtype
) -> tuple[nnx.GraphDef, nnx.State]:
    """`attach` for a head whose weights are not here: what is compiled for chips that are not here either."""
    return attach(graphdef, state, *split_head(config, partition, dtype))
