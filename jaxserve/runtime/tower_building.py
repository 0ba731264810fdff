"""From a vision tower whose weights are in their files to one that runs: sizes, compile jobs, the parts put together.

A tower is compiled beside the steps of the decoder and has weights of its own. It is the same on all devices of a mesh.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config.schema import Config, VisionConfig
from jaxserve.errors import CapacityError, ConfigError
from jaxserve.models.tower_loading import PlannedTower, tower_of
from jaxserve.runtime.compile import Compiled, Job
from jaxserve.runtime.memory import estimate_temporaries
from jaxserve.runtime.mesh import on_mesh, replicated
from jaxserve.runtime.picture_inputs import PictureRows, PictureSizes, PromptPositions
from jaxserve.runtime.towers import Tower
from jaxserve.runtime.xla_flags import compiler_options
from jaxserve.sched.plan import EncoderPool

PAGE_TOKENS = 64  # embeddings of a page of the pool: a picture has some hundreds
_FIRST_BUCKET, _GROWTH = 256, 4  # patches; a picture pays for up to four times its own, and few shapes are compiled


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TowerPlan:
    """A tower, and what the model's processor of pictures says of its inputs.

    Attributes:
      max_patches, max_tokens: of the largest picture that the processor lets pass.
      positions: of a prompt with pictures; None in families whose tokens are simply counted.
    """

    planned: PlannedTower
    max_patches: int
    max_tokens: int
    positions: PromptPositions | None

    @property
    def buckets(self) -> tuple[int, ...]:
        """Patches of the compiled shapes, ascending."""
        planned = self.planned.config
        if planned.grid is not None:  # all pictures have the same
            return (self.max_patches,)
        buckets, size = [], _FIRST_BUCKET
        while size < self.max_patches:
            buckets.append(size)
            size *= _GROWTH
        step = _FIRST_BUCKET
        return (*buckets, min(size, -(-self.max_patches // step) * step))

    def num_lines(self, bucket: int) -> int:
        """Embeddings that the tower returns for a bucket."""
        return self.planned.config.num_tokens(bucket)

    def temporary_bytes(self, bucket: int, itemsize: int) -> int:
        """Upper estimate of the live temporaries of a picture of a bucket, beside its scores of attention."""
        config = self.planned.config
        return estimate_temporaries(
            tokens=bucket, rows=0, hidden=config.width, ffn=config.mlp.size, vocab=0, itemsize=itemsize
        )

    def rows(self, sizes: PictureSizes, max_rows: int) -> PictureRows:
        """What the rows of a runner have of pictures."""
        return PictureRows(sizes, max_rows, self.positions)


def picture_sizes(config: Config, tower: TowerPlan, *, has_sections: bool) -> PictureSizes:
    """The pool of embeddings. Raises CapacityError for one that the largest picture would not fit into, ConfigError
    where steps cannot have pictures."""
    if config.parallel.pipeline > 1:
        raise ConfigError(
            f"parallel.pipeline is {config.parallel.pipeline}, but the stages of a pipeline take no pictures; use "
            "parallel.tensor for this model"
        )
    planned = tower.planned
    room = config.vision.host_bytes // (config.parallel.data * planned.config.out_size * planned.dtype.itemsize)
    if config.vision.host_bytes and room < tower.max_tokens:
        raise CapacityError(
            f"vision.host_bytes is {config.vision.host_bytes}, room for {room} embeddings of a replica, but the "
            f"largest picture that is allowed has {tower.max_tokens}; raise it, or leave it out"
        )
    return PictureSizes(
        pool=EncoderPool(
            num_pages=_pool_pages(config.vision, tower),
            page_size=PAGE_TOKENS,
            max_patches=config.vision.max_step_patches,
            host_embeddings=room,
        ),
        has_sections=has_sections,
        num_lines=tuple(map(tower.num_lines, tower.buckets)),
    )


def _pool_pages(config: VisionConfig, tower: TowerPlan) -> int:
    asked = 2 * tower.max_tokens if config.pool_tokens is None else config.pool_tokens
    if asked < tower.max_tokens:
        raise CapacityError(
            f"vision.pool_tokens is {asked}, but the largest picture that is allowed has {tower.max_tokens} tokens; "
            f"raise it to {tower.max_tokens} at least, or lower vision.max_pixels"
        )
    return -(-asked // PAGE_TOKENS)


def tower_name(bucket: int) -> str:
    """The name of a bucket's executable in reports."""
    return f"tower {bucket}"


def tower_jobs(tower: TowerPlan, mesh: Mesh, backend: str) -> list[Job]:
    """The executables of a tower on the devices of a mesh: encode(weights, patches uint8 [P, V], arrays) -> [M, D]."""
    planned, everywhere = dataclasses.replace(tower.planned, mesh=mesh), replicated(mesh)
    config, whole = planned.config, PartitionSpec()

    def encode(leaves, patches, arrays):
        return tower_of(planned.graphdef, planned.state, leaves)(patches, arrays)

    def job(bucket: int) -> Job:
        inputs = config.module.inputs(config, _any_grid(tower), bucket)
        arrays = {
            name: jax.ShapeDtypeStruct(np.shape(value), np.asarray(value).dtype, sharding=everywhere)
            for name, value in inputs.items()
        }
        patches = jax.ShapeDtypeStruct((bucket, config.num_values), np.uint8, sharding=everywhere)
        return Job(
            name=tower_name(bucket),
            fn=on_mesh(encode, mesh, (whole, whole, whole), whole),
            args=(planned.weights, patches, arrays),
            donate=(),
            options=compiler_options(backend, mesh.size),
        )

    return [job(bucket) for bucket in reversed(tower.buckets)]


def _any_grid(tower: TowerPlan) -> tuple[int, int, int]:
    """A grid that a bucket has room for: the shapes of a tower's inputs follow from the bucket alone."""
    config = tower.planned.config
    return (1, *config.grid) if config.grid is not None else (1, config.merge, config.merge)


def make_tower(tower: TowerPlan, compiled: Mapping[str, Compiled], mesh: Mesh, weights: Sequence[jax.Array]) -> Tower:
    """The tower that runs."""
    config = tower.planned.config
    return Tower(
        executables={bucket: compiled[tower_name(bucket)].call for bucket in tower.buckets},
        weights=tuple(weights),
        inputs=functools.partial(config.module.inputs, config),
        num_values=config.num_values,
        sharding=NamedSharding(mesh, PartitionSpec()),
        tokens_of=tower.num_lines,
    )
