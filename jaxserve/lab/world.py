"""What a simulation runs on: limits, a cost model, scheduler options, from a config and a device or from a step log.

Owns that choice. Refuses the models of cost (`roofline`, `fitted`). Sizes that a config leaves open are those of the
server, from the same functions; only the number of pages is an estimate, since nothing is compiled.
"""

import dataclasses
from pathlib import Path

from jaxserve.chips import parse_topology
from jaxserve.config_schema import Config
from jaxserve.errors import ConfigError
from jaxserve.lab.fitted import Fitted
from jaxserve.lab.roofline import Roofline
from jaxserve.routing import RouterOptions
from jaxserve.sched import Limits, SchedulerOptions
from jaxserve.sched.record import StepLog
from jaxserve.sched.simulate import CostModel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One replica on paper. `about` says in a few words what it is, for titles and files."""

    limits: Limits
    cost_model: CostModel
    options: SchedulerOptions
    router_options: RouterOptions
    about: str


def world_of_device(config: Config, topology_name: str, tensor: int | None = None) -> World:
    """The model of a config on a device such as 'v5e:2x2', by published peaks. Weights need not be there.

    `tensor` None takes parallel.tensor where that is more than 1, else all devices. Loads JAX, and starts no device.
    Raises ConfigError, CheckpointError for a config.json that cannot be read, CapacityError when nothing fits.
    """
    import jax.numpy as jnp  # seconds; a world of a step log needs none of this

    from jaxserve.assemble import router_options, scheduler_options
    from jaxserve.models.checkpoint import read_checkpoint
    from jaxserve.models.loading import choose_dtype, decoder_config
    from jaxserve.runtime.resolve import resolve_sizes

    topology = parse_topology(topology_name)
    checkpoint = read_checkpoint(config.model.path)
    model = decoder_config(checkpoint)[1]
    dtype = choose_dtype(config.model.dtype, topology.chip.backend, checkpoint)
    sizes = resolve_sizes(config, model, jnp.dtype(dtype), topology.chip.backend)
    if tensor is None:
        tensor = config.parallel.tensor if config.parallel.tensor > 1 else topology.num_devices
    roofline = Roofline(
        topology,
        model,
        tensor=tensor,
        dtype=dtype.name,
        cache_dtype="float8" if sizes.cache_dtype.itemsize == 1 else sizes.cache_dtype.name,
    )
    pages = config.cache.num_pages
    if config.cache.memory_bytes is not None and pages is None:
        raise ConfigError(
            "cache.memory_bytes is set, but nothing is placed here that could be divided into pages; "
            "set cache.num_pages, which a server logs at its start and `jaxserve plan` tells"
        )
    if pages is None:
        fitting = roofline.num_pages(sizes.page_size, memory_fraction=config.cache.memory_fraction)
        enough = 2 * sizes.max_rows * -(-sizes.max_model_len // sizes.page_size)  # as a server takes no more
        pages = min(fitting, enough)
    name = config.model.name or Path(config.model.path).name
    return World(
        limits=sizes.limits(pages),
        cost_model=roofline,
        options=scheduler_options(config),
        router_options=router_options(config),
        about=f"{name} in {dtype.name} on {topology.name}, tensor {tensor}, by published peaks",
    )


def world_of_log(path: Path, config: Config) -> World:
    """The device that wrote a step log, by its own times; scheduler options are those of the config.

    Raises StepLogError for a log that cannot be read, ConfigError for one that is too short.
    """
    from jaxserve.assemble import router_options, scheduler_options

    with StepLog(path) as log:
        fitted = Fitted(log)
        header = log.header
    return World(
        limits=header.limits,
        cost_model=fitted,
        options=scheduler_options(config),
        router_options=router_options(config),
        about=f"{header.model} as fitted to {fitted.num_records} steps of {path.name} ({_off(fitted)})",
    )


def _off(fitted: Fitted) -> str:
    errors = fitted.errors["device"]
    parts = [f"{error.median:.0%} for {kind} steps" for kind, error in errors.items()]
    return f"device time off by {' and '.join(parts)} at the median"
