"""A model's executables for a device that is not here, from its config.json alone.

The planner judges whether they fit and how fast they would be; `traffic` counts the bytes that they move.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from jaxserve.config.schema import Config
from jaxserve.errors import ConfigError
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.grouped_matmul import GroupedMatmul
from jaxserve.kernels.matmul import Matmul
from jaxserve.kernels.ops import GROUPED_MATMUL, MATMUL, PAGED_ATTENTION
from jaxserve.kernels.paged_attention import PagedAttention
from jaxserve.kernels.selection import single_head, with_selector
from jaxserve.lab.compiled.topology import absent_devices, device_of_topology
from jaxserve.models.cache_scales import with_cache
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.partition import Partition
from jaxserve.models.quantised import Kept
from jaxserve.models.weights import Path
from jaxserve.runtime.compile import Compiled, compile_all, num_threads
from jaxserve.runtime.convert_weights import Forms
from jaxserve.runtime.executables import AbstractStage, Sizes, head_of, make_jobs
from jaxserve.runtime.mesh import abstract_meshes, layer_ranges, make_meshes
from jaxserve.runtime.resolve import (
    attention_uses,
    draft_uses,
    grouped_uses,
    matmul_uses,
    resolve_adapters,
    resolve_selector,
    resolve_sizes,
)
from jaxserve.runtime.tower_building import TowerPlan, picture_sizes, tower_jobs
from jaxserve.values.chips import parse_topology

PlanTower = Callable[[Mesh | AbstractMesh, np.dtype], TowerPlan | None]
Keep = Callable[[Partition, str], Mapping[Path, Kept]]  # which parameters of a model cut so are codes on a backend


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AbsentModel:
    """One replica of a model on devices that are not here: all that is known before anything is compiled.

    `kept`: parameters that are codes, by their paths in the whole model. `tower`: of a model that takes pictures.
    """

    config: Config
    device: Device
    sizes: Sizes
    attention: PagedAttention
    matmul: Matmul
    grouped_matmul: GroupedMatmul | None
    kept: Mapping[Path, Kept]
    stages: tuple[AbstractStage, ...]
    tower: TowerPlan | None = None


def place_ahead(
    config: Config,
    model: DecoderConfig,
    *,
    topology: str,
    dtype: str = "bfloat16",
    to_compile: bool = True,
    keep: Keep = lambda partition, backend: {},
    plan_tower: PlanTower = lambda mesh, dtype: None,
) -> AbsentModel:
    """The model that a server with `config` would put on the devices of `topology`; takes well under a second.

    `to_compile` False only counts, and needs no compiler for these devices. `keep` says which parameters are
    codes, `plan_tower` which tower is beside the model (`assemble.pictures.plan_pictures`). Raises ConfigError for a
    topology that cannot be compiled for here, or has too few devices, and what resolving the config raises.
    """
    device = device_of_topology(topology)
    weights_dtype: np.dtype = jnp.dtype(dtype)
    meshes: Any  # of devices, or of their number alone
    if to_compile:
        meshes = make_meshes(config.parallel, absent_devices(topology))[0]
    else:
        meshes = abstract_meshes(config.parallel, parse_topology(topology).num_devices)
    sizes = resolve_sizes(config, model, weights_dtype, device.backend)
    tower = plan_tower(meshes[0], weights_dtype)
    if tower is not None:
        pictures = picture_sizes(config, tower, has_sections=model.has_sections)
        sizes = dataclasses.replace(sizes, pictures=pictures)
    model = with_cache(model, sizes.cache_dtype.name)  # scales have no place in plans but their bytes
    partition = Partition.of(model, config.parallel.tensor, config.parallel.expert)
    sizes = dataclasses.replace(sizes, adapters=resolve_adapters(config, partition))
    selector, uses = resolve_selector(config, sizes.page_size), attention_uses(partition.local, sizes, weights_dtype)
    heads = () if selector is None else tuple(map(single_head, uses))
    attention = PAGED_ATTENTION.resolve(
        device=device,
        choice=config.kernels.paged_attention,
        uses=(*uses, *heads, *draft_uses(sizes, partition.devices, weights_dtype)),
    )
    if selector is not None:
        attention = with_selector(attention, selector, uses)
    kept = keep(partition, device.backend)
    uses = grouped_uses(partition, weights_dtype, kept)
    choice = config.kernels.grouped_matmul
    grouped = GROUPED_MATMUL.resolve(device=device, choice=choice, uses=uses) if uses else None
    matmul = MATMUL.resolve(
        device=device, choice=config.kernels.matmul, uses=matmul_uses(weights_dtype, meshes[0], kept)
    )
    ranges = layer_ranges(model.num_layers, len(meshes))
    stages = tuple(
        _in_forms(AbstractStage.of(partition, layers, mesh, weights_dtype, kept, head_of(sizes)), matmul, grouped)
        for layers, mesh in zip(ranges, meshes, strict=True)
    )
    return AbsentModel(
        config=config,
        device=device,
        sizes=sizes,
        attention=attention,
        matmul=matmul,
        grouped_matmul=grouped,
        kept=kept,
        stages=stages,
        tower=tower,
    )


def inner_layers(absent: AbsentModel) -> AbsentModel:
    """One layer of each kind alone, as a stage in the middle of a pipeline has them: no embedding, no sampling.

    The first layer is left out, so that the stage is none. Raises ConfigError where the others lack one of the kinds
    or the last layer is among them.
    """
    whole = absent.stages[0]
    layers = whole.partition.model.layers
    kinds = len(set(layers))
    if len(absent.stages) > 1 or len(layers) < kinds + 2 or len(set(layers[1 : 1 + kinds])) < kinds:
        raise ConfigError(
            f"{kinds} successive layers of {len(layers)}, neither first nor last, do not have all their {kinds} kinds; "
            "compile the whole model"
        )
    stage = AbstractStage.of(whole.partition, range(1, 1 + kinds), whole.mesh, whole.dtype, absent.kept)
    return dataclasses.replace(absent, stages=(_in_forms(stage, absent.matmul, absent.grouped_matmul),))


def _in_forms(stage: AbstractStage, matmul: Matmul, grouped: GroupedMatmul | None) -> AbstractStage:
    """The stage with its weights as the products want them."""
    forms = Forms(matmul=matmul, grouped_matmul=grouped)
    return dataclasses.replace(stage, state=nnx.map_state(lambda _, variable: forms.shapes(variable), stage.state))


def compile_stage(
    absent: AbsentModel, *, num_pages: int, stage: int = 0, only: Collection[str] | None = None
) -> Mapping[str, Compiled]:
    """Every executable of one stage, by name; or those named in `only`."""
    jobs = make_jobs(absent.stages[stage], absent.sizes, absent.attention, num_pages)
    if absent.tower is not None and stage == 0:
        jobs += tower_jobs(absent.tower, absent.stages[0].devices, absent.device.backend)
    jobs = [job for job in jobs if only is None or job.name in only]
    threads = num_threads(absent.config.runtime.compile_threads, absent.device.backend)
    return compile_all(jobs, threads, lambda *_: None, absent.stages[stage].devices)
