"""`World`: limits, a cost model and scheduler options for a simulation, from a config and a device, or from a step log.

Sizes that a config leaves open are those of the server, from the same functions; only the number of pages is an
estimate, since nothing is compiled.
"""

import collections
import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.config.schema import Config, ParallelConfig
from jaxserve.errors import ConfigError
from jaxserve.lab.roofline import Work
from jaxserve.lab.simulation.chip_profile import topology_of
from jaxserve.lab.simulation.drafts import SimulatedDrafts
from jaxserve.lab.simulation.fitted import Fitted
from jaxserve.lab.simulation.roofline import RESERVED_BYTES, Roofline
from jaxserve.lab.simulation.simulate import CostModel
from jaxserve.lab.simulation.store import StoreLink, StoreModel, model_of_store
from jaxserve.lab.tower_work import TowerWork
from jaxserve.routing import RouterOptions
from jaxserve.sched import Limits, SchedulerOptions, SpeculationOptions
from jaxserve.sched.plan import HostSlots
from jaxserve.sched.record import LogHeader, StepLog
from jaxserve.values.chips import CHIPS, Topology, parse_topology

if TYPE_CHECKING:
    from jaxserve.models.decoder_config import DecoderConfig
    from jaxserve.models.quantised import Kept
    from jaxserve.models.weights import Path as WeightPath
    from jaxserve.runtime.executables import Sizes

_UNPRICED = ("model.seed", "model.random_weights", "checkpoint")  # settings that change tokens, and no time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A server on paper.

    Attributes:
      limits, cost_model, options: of one replica.
      drafts: says which drafts are right; None where no step has drafts.
      about: a few words about it, for titles and files.
      replicas: engines behind its one door, `parallel.data`.
      store: behind the host slots of each; None: none.
    """

    limits: Limits
    cost_model: CostModel
    options: SchedulerOptions
    router_options: RouterOptions
    about: str
    drafts: SimulatedDrafts | None = None
    replicas: int = 1
    store: StoreModel | None = None


def world_of_device(
    config: Config,
    device: Topology | str,
    tensor: int | None = None,
    *,
    acceptance: Sequence[float] = (),
    store_link: StoreLink | None = None,
) -> World:
    """The model of a config on devices such as 'v5e:2x2', by published peaks. Weights need not be there.

    `device`: a name as `chips.parse_topology` takes it, or a topology of a `Chip` of your own.
    `tensor` None takes parallel.tensor where that is more than 1, else all devices that a replica of parallel.data has.
    `acceptance` has the `rates` of `SimulatedDrafts`, where speculation.method makes drafts: nothing here knows them.
    `store_link`: of the store that the config names; see `model_of_store`.
    A model that takes pictures has its tower and pool, which a config.json alone does not describe: its directory also
    has the preprocessor_config.json. Weights that are kept as codes have the bytes that `jaxserve plan` gives them.
    Loads JAX, and starts no device.
    Raises ConfigError, also for stages of a pipeline, CheckpointError for a file of the model that is missing or cannot
    be read, CapacityError when nothing fits.
    """
    import jax.numpy as jnp  # seconds; a world of a step log needs none of this

    from jaxserve.assemble import router_options, scheduler_options
    from jaxserve.assemble.pictures import plan_pictures
    from jaxserve.models.checkpoint import configured_checkpoint
    from jaxserve.models.loading import choose_dtype, decoder_config, plan_kept
    from jaxserve.models.partition import Partition
    from jaxserve.models.quantised import configured_quantisation
    from jaxserve.runtime.memory import enough_pages, memory_share, reserved_share
    from jaxserve.runtime.mesh import abstract_meshes
    from jaxserve.runtime.resolve import resolve_sizes
    from jaxserve.runtime.tower_building import picture_sizes

    topology = parse_topology(device) if isinstance(device, str) else device
    tensor = _tensor(config, topology, tensor)
    checkpoint = configured_checkpoint(config.model)
    family, model = decoder_config(checkpoint)
    dtype = choose_dtype(config.model.dtype, topology.chip.backend, checkpoint)
    sizes = resolve_sizes(config, model, jnp.dtype(dtype), topology.chip.backend)
    tower = plan_pictures(config, abstract_meshes(ParallelConfig(), 1)[0], jnp.dtype(dtype))
    wanted, partition = configured_quantisation(config.model), Partition.of(model, tensor)
    kept = plan_kept(checkpoint, family, partition, wanted, topology.chip.backend)
    pool_bytes = 0
    if tower is not None:
        pictures = picture_sizes(config, tower, has_sections=model.has_sections)
        sizes = dataclasses.replace(sizes, pictures=pictures)
        pool_bytes = pictures.pool_lines * model.hidden_size * dtype.itemsize
    roofline = Roofline(
        topology,
        model,
        tensor=tensor,
        dtype=dtype.name,
        cache_dtype="float8" if sizes.cache_dtype.name.startswith("float8") else sizes.cache_dtype.name,
        stored=_work_of_codes(config, model, topology, tensor, dtype.name, kept) if kept else None,
        tower=None if tower is None else TowerWork.of(tower.planned),
        patch_buckets=() if tower is None else tower.buckets,
    )
    pages = config.cache.num_pages
    if config.cache.memory_bytes is not None and pages is None:
        raise ConfigError(
            "cache.memory_bytes is set, but nothing is placed here that could be divided into pages; "
            "set cache.num_pages, which a server logs at its start and `jaxserve plan` tells"
        )
    if pages is None:
        backend = topology.chip.backend
        share, reserved = memory_share(config.cache, backend), reserved_share(config.cache, backend)
        fitting = roofline.num_pages(
            sizes.page_size,
            page_layers=sizes.page_groups.num_slots(range(model.num_layers)),
            memory_fraction=reserved * share.fraction,
            cache_fraction=reserved * share.cache,
            reserved_bytes=RESERVED_BYTES + pool_bytes,
        )
        pages = min(fitting, enough_pages(sizes.limits(fitting)))  # as a server takes no more
    limits = dataclasses.replace(sizes.limits(pages), slots=_slots(config, roofline, sizes, model.num_layers, tensor))
    if sizes.speculation is not None:
        limits = roofline.step_ms(limits)
    name = config.model.name or Path(config.model.path).name
    replicas = config.parallel.data
    codes = {one.storage.code for found in kept.values() for one in found.each if one.storage}
    cut = f"tensor {tensor}" if replicas == 1 else f"{replicas} replicas of tensor {tensor}"
    return World(
        limits=limits,
        drafts=_drafts(limits, acceptance),
        cost_model=roofline,
        options=scheduler_options(config),
        router_options=router_options(config),
        about=f"{name} in {' and '.join(sorted({dtype.name, *codes}))} on {topology.name}, {cut}, by published peaks",
        replicas=replicas,
        store=model_of_store(config.store, limits.slots.page_bytes, store_link),
    )


def _work_of_codes(
    config: Config,
    model: "DecoderConfig",
    topology: Topology,
    tensor: int,
    dtype: str,
    kept: "Mapping[WeightPath, Kept]",
) -> Work:
    """The work of a step whose weights are codes, in the form that the products of this device want."""
    from jaxserve.lab.compiled.ahead import place_ahead
    from jaxserve.lab.planner.fit import with_settings
    from jaxserve.lab.planner.make import step_work

    if CHIPS.get(topology.chip.name) is not topology.chip:
        raise ConfigError(
            f"weights would be kept as codes, and nothing is known of how {topology.name} computes with them; set "
            "model.quantization=none, or name a device that jaxserve knows"
        )
    config = with_settings(config, "parallel", tensor=tensor)
    return step_work(
        place_ahead(config, model, topology=topology.name, dtype=dtype, to_compile=False, keep=lambda *_: kept)
    )


def worlds_of_devices(
    config: Config,
    devices: str,
    tensor: int | None = None,
    *,
    acceptance: Sequence[float] = (),
    store_link: StoreLink | None = None,
) -> list[World]:
    """A world for each server of a fleet: 'h200:1' is one, 'h200:1*2,a100:1*4' are six of two kinds.

    A device may be a file, as 'my-chip.yaml:1' (`chip_profile`). Servers of one kind share their world. The rest is
    that of `world_of_device`. Raises ConfigError.
    """
    worlds: list[World] = []
    for part in devices.split(","):
        name, _, count = part.strip().partition("*")
        if count and not re.fullmatch(r"[1-9]\d{0,5}", count):
            raise ConfigError(f"{part.strip()!r} is no device and number of servers; write h200:1*2")
        one = world_of_device(config, topology_of(name), tensor, acceptance=acceptance, store_link=store_link)
        worlds += [one] * int(count or 1)
    return worlds


def about_fleet(worlds: Sequence[World]) -> str:
    """A few words about all servers, for titles."""
    counts = collections.Counter(one.about for one in worlds)
    if len(worlds) == 1:
        return worlds[0].about
    return "\n".join(f"{count} x {about}" for about, count in counts.items())


def world_of_log(
    path: Path | Sequence[Path],
    config: Config,
    *,
    acceptance: Sequence[float] = (),
    store_link: StoreLink | None = None,
) -> World:
    """The device that wrote a step log, by its own times; scheduler options are those of the config.

    Several logs are of one model on equal devices, at other loads or with other shapes: the costs are fitted to all,
    the server has the limits of the first. `Fitted.left_out` then says how well each is predicted from the others.

    Steps of several tokens a row are those of the log, as far as it has enough of them, and no more than
    `speculation` asks for, where the config has it. `acceptance` replaces the rates at which the log's drafts were
    right. The store, if any, is that of the config.

    Raises StepLogError for a log that cannot be read, ConfigError for one that is too short, for logs of unlike
    engines, for a layout over devices other than that of the engine that wrote it, or for speculation that it lacks.
    """
    from jaxserve.assemble import router_options, scheduler_options

    paths = [path] if isinstance(path, Path) else list(path)
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(StepLog(one)) for one in paths]
        header = logs[0].header
        _check_layout(config, header)
        for other, log in zip(paths[1:], logs[1:], strict=True):
            _check_alike(header, paths[0], log.header, other)
        fitted = Fitted(*logs, load_ms=[log.header.limits.slots.load_ms for log in logs])
    limits, options = _shapes_of_log(config, header, fitted)
    replicas = config.parallel.data
    name = header.model if replicas == 1 else f"{replicas} replicas of {header.model}"
    of = paths[0].name if len(paths) == 1 else f"{len(paths)} logs"
    return World(
        limits=limits,
        drafts=_drafts(limits, acceptance or fitted.drafts.rates),
        cost_model=fitted,
        options=dataclasses.replace(scheduler_options(config), speculation=options),
        router_options=router_options(config),
        about=f"{name} as fitted to {fitted.num_records} steps of {of} ({_off(fitted)})",
        replicas=replicas,
        store=model_of_store(config.store, limits.slots.page_bytes, store_link),
    )


def _slots(config: Config, roofline: Roofline, sizes: "Sizes", num_layers: int, tensor: int) -> HostSlots:
    """The host slots of a replica, with times of the link that the cost model assumes."""
    from jaxserve.runtime.memory import plan_slots
    from jaxserve.runtime.page_moves import move_counts

    own_bytes = roofline.page_bytes(sizes.page_size, sizes.page_groups.num_slots(range(num_layers)))
    counts = move_counts(own_bytes) if config.cache.host_bytes else ()
    slots = plan_slots(config.cache, own_bytes * tensor, config.parallel.data, counts)
    page_ms = 1e3 * own_bytes / roofline.assumed.host_bandwidth  # each device has a link of its own
    return slots._replace(load_ms=page_ms, save_ms=page_ms) if slots.num_slots else slots


def _drafts(limits: Limits, acceptance: Sequence[float]) -> SimulatedDrafts | None:
    """What accepts drafts on a device of these limits."""
    if all(bucket.width == 1 for bucket in limits.buckets):
        if acceptance:
            raise ConfigError(
                "a rate of acceptance was given, but no step of the simulated server has drafts; set "
                "speculation.method, or leave the rate out"
            )
        return None
    if not acceptance:
        raise ConfigError(
            "speculation.method makes drafts, and how many of them are right depends on texts that a simulation does "
            "not have; give --acceptance, such as 0.8 or 0.8,0.7,0.6 by place, or the --step-log of a server that "
            "speculates"
        )
    return SimulatedDrafts(rates=tuple(acceptance))


def _shapes_of_log(config: Config, header: LogHeader, fitted: Fitted) -> tuple[Limits, SpeculationOptions]:
    """Limits with the shapes that the log can tell of, and the part of them that the config allows."""
    asked, limits = config.speculation, header.limits
    if fitted.knows("wide"):
        limits = fitted.step_ms(limits)
    else:
        limits = limits.with_buckets(b for b in limits.buckets if b.plain)
    width, rounds = (max(getattr(b, name) for b in limits.buckets) for name in ("width", "rounds"))
    options = SpeculationOptions(
        width=width, rounds=rounds, adaptive=asked.adaptive, device_drafts=asked.method != "grammar"
    )
    if asked.method == "none" and asked.rounds == 1:
        return limits, options
    if asked.method == "none":
        limits = limits.with_buckets(
            (b for b in limits.buckets if b.width == 1), dict(zip(limits.buckets, limits.step_ms, strict=False))
        )
        width = 1
    wanted = 1 if asked.method == "none" else asked.width
    if width < wanted or rounds < asked.rounds:
        raise ConfigError(
            f"speculation asks for {wanted} tokens of a row in each of {asked.rounds} rounds, and the step log has "
            f"enough steps of up to {width} and {rounds}; leave it out, to have those of the log, or record a log of "
            "a server with these settings"
        )
    return limits, dataclasses.replace(options, width=wanted, rounds=asked.rounds)


def _tensor(config: Config, topology: Topology, tensor: int | None) -> int:
    """Devices that share every layer of a replica. Raises ConfigError for layouts that have no cost model."""
    parallel = config.parallel
    if parallel.pipeline != 1:
        raise ConfigError(
            f"parallel.pipeline is {parallel.pipeline}, but simulations know steps of one stage only: nothing says "
            "how long stages wait for each other; simulate with --set parallel.pipeline=1, and a tensor that takes the "
            "devices of all stages, or give the step log of an engine with these stages"
        )
    _check_axes(config)
    if tensor is None:
        tensor = parallel.tensor if parallel.tensor > 1 else max(1, topology.num_devices // parallel.data)
    if tensor * parallel.data > topology.num_devices:
        raise ConfigError(
            f"tensor x parallel.data is {tensor} x {parallel.data}, but {topology.name} has {topology.num_devices} "
            "devices; lower one of them, or name a larger topology"
        )
    return tensor


def _check_axes(config: Config) -> None:
    if config.parallel.expert != 1:
        raise ConfigError(
            f"parallel.expert is {config.parallel.expert}, but the times of a simulated device know no parts of "
            "experts; set it to 1 and use parallel.tensor"
        )


def _check_layout(config: Config, header: LogHeader) -> None:
    """A log's times hold for the layout that they were taken with; a config that names none takes it over."""
    _check_axes(config)
    for axis in ("tensor", "pipeline"):
        asked, logged = getattr(config.parallel, axis), header.settings.get(f"parallel.{axis}", "1")
        if asked != 1 and str(asked) != logged:
            raise ConfigError(
                f"parallel.{axis} is {asked}, but the engine that wrote the step log had {logged}, and its times hold "
                "for that alone; leave it out, or give a log of such an engine"
            )


def _check_alike(header: LogHeader, path: Path, other: LogHeader, other_path: Path) -> None:
    """Raises ConfigError for engines whose steps have no common price."""
    facts = [
        {"model": one.model} | {name: value for name, value in one.settings.items() if not name.startswith(_UNPRICED)}
        for one in (header, other)
    ]
    unlike = sorted(name for name in {*facts[0], *facts[1]} if facts[0].get(name) != facts[1].get(name))
    if unlike:
        values = ", ".join(f"{name} {facts[0].get(name)} and {facts[1].get(name)}" for name in unlike[:4])
        raise ConfigError(
            f"{path.name} and {other_path.name} are of unlike engines ({values}), whose steps have no common cost; "
            "give logs of one model on equal devices"
        )


def _off(fitted: Fitted) -> str:
    errors = fitted.errors["device"]
    parts = [f"{error.median:.0%} for {kind} steps" for kind, error in errors.items()]
    text = f"device time off by {' and '.join(parts)} at the median"
    if fitted.left_out:
        worst = max((error.median for log in fitted.left_out for error in log.values()), default=None)
        text += ", by no log that others predict" if worst is None else f", by {worst:.0%} in a log left out, at worst"
    return text
