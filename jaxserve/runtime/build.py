"""From a config to one ready runner per replica: sizes and memory first, then weights and executables at once.

Compiling needs shapes alone, so the weights are read meanwhile; and a few buckets hold every plan, so the others may
come while the engine answers (`later`), from another process (`apart`). Replicas are alike: the first one's weights are
copied to the others' devices, and its executables are loaded there. Every derived value lives in the objects made here;
nothing is written back into the config.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxserve.config.schema import Config
from jaxserve.errors import ConfigError
from jaxserve.kernels.cpu import machine_code
from jaxserve.kernels.ops import MATMUL, PAGED_ATTENTION
from jaxserve.kernels.paged_attention import PagedAttention
from jaxserve.kernels.selection import single_head, with_selector
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.loading import LoadedModel, PlannedModel
from jaxserve.models.sharding import TENSOR_PARALLEL, shardings_for, spec_for, specs_for
from jaxserve.models.tower_loading import PlannedTower
from jaxserve.progress import Progress, Quiet
from jaxserve.runtime.adapters import AdapterSizes, AdapterWriter, slot_shardings
from jaxserve.runtime.apart import Orders, StepsApart, plain_settings
from jaxserve.runtime.batch_invariance import check_kernels, check_steps, describe_invariance
from jaxserve.runtime.canonical_pages import SlotForm, slot_form
from jaxserve.runtime.checked_kernels import CheckedKernels
from jaxserve.runtime.compile import (
    Compiled,
    Compiler,
    Job,
    build_replicas,
    make_cache_directory,
    num_threads,
    report_lines,
    use_compile_cache,
)
from jaxserve.runtime.convert_weights import Forms, converted, converted_tower
from jaxserve.runtime.executables import (
    AbstractStage,
    Sizes,
    bucket_layouts,
    device_bytes,
    draft_caches,
    embeddings_name,
    first_buckets,
    flat_weights,
    gather_name,
    head_of,
    make_jobs,
    make_state,
    output_shapes,
    packed_sharding,
    packed_words,
    scatter_name,
    state_job,
    state_specs,
    step_name,
)
from jaxserve.runtime.host_slots import SlotBytes, StagePages
from jaxserve.runtime.kept_weights import KeptWeights
from jaxserve.runtime.later import BackgroundBuckets
from jaxserve.runtime.memory import (
    MemoryPlan,
    check_host_memory,
    device_memory_bytes,
    estimate_temporaries,
    memory_share,
    plan_memory,
    plan_slots,
)
from jaxserve.runtime.mesh import is_here, replicated
from jaxserve.runtime.page_moves import move_counts
from jaxserve.runtime.resolve import (
    attention_uses,
    backend_of,
    choose,
    choose_grouped_matmul,
    draft_uses,
    matmul_uses,
    resolve_adapters,
    resolve_selector,
    resolve_sizes,
)
from jaxserve.runtime.runner import DeviceRunner, Executables, Stage, Weights
from jaxserve.runtime.stage_links import AbstractLinks, StageLinks, link_bytes
from jaxserve.runtime.store import ExecutableStore, can_be_loaded
from jaxserve.runtime.tower_building import TowerPlan, make_tower, picture_sizes, tower_jobs
from jaxserve.runtime.xla_flags import compiler_options
from jaxserve.sched.plan import Bucket

logger = logging.getLogger(__name__)

# Called after each step: its name, and the seconds that it took or its error.
OnBuilt = Callable[[str, float | None, BaseException | None], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuildHooks:
    """Hooks by which a service of several processes adapts a build.

    Attributes:
      one_of_many: all buckets are built before the first step, since all processes must have the same; and none comes
        from a file of its own.
      on_buffer: see `DeviceRunner`.
      agree: turns numbers that fit here, by name (pages, slots), into those that all processes use.
    """

    one_of_many: bool = False
    on_buffer: Callable[[np.ndarray], None] = lambda buffer: None
    agree: Callable[[Mapping[str, int]], Mapping[str, int]] = lambda numbers: numbers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A runner, and facts about its construction.

    Attributes:
      models: the stages with their weights; of several processes, those of this one.
      shapes: of all stages.
      seconds: what took how long; reading weights and making executables go on at once.
      new_weights: makes other weights for it.
      later: buckets that the runner does not have yet, to be started with the engine's loop; None: it has them all.
      page_layout: how the bytes of a host slot are arranged; equal where slots could be exchanged.
      slot_form: see `canonical_pages.slot_form`; None without slots, too.
      renew: gives back the memory of the runner, which must not be used any more, and makes another one of the same
        weights and executables, on the same devices.
    """

    runner: DeviceRunner
    models: tuple[LoadedModel, ...]
    shapes: tuple[AbstractStage, ...]
    memory: MemoryPlan
    compile_report: tuple[str, ...]
    seconds: Mapping[str, float]
    later: BackgroundBuckets | None
    new_weights: "NewWeights"
    page_layout: str = ""
    slot_form: SlotForm | None = None
    renew: "Callable[[], Built]"


class NewWeights:
    """Makes other weights for the runner of one replica, in the form of those that it has. Any thread."""

    def __init__(self, planned: Sequence[PlannedModel], loaded: Sequence[LoadedModel], forms: Forms) -> None:
        """`planned`: the stages on the devices of the first replica, `loaded`: on those of this one."""
        self._planned, self._forms = planned, forms
        self._meshes = [model.mesh for model in loaded]

    def from_arrays(self, params: Mapping[str, jax.Array]) -> Weights:
        """Of arrays in the checkpoint's sizes. Raises as `PlannedModel.place`."""
        return [
            self._flat(planned, planned.place(params), mesh)
            for planned, mesh in zip(self._planned, self._meshes, strict=True)
        ]

    def from_models(self, planned: Sequence[PlannedModel]) -> Weights:
        """Of another checkpoint. Raises ConfigError when its arrays are not of the same shapes, or its config says that
        something else is computed with them; CheckpointError."""
        models = [converted(model, self._forms) for model in planned]
        for own, other in zip(self._planned, models, strict=True):
            if jax.tree.map(_form_of, own.shapes.state) != jax.tree.map(_form_of, other.shapes.state):
                raise ConfigError(
                    f"{other.shapes.checkpoint.path}: its weights have other shapes or types than those of "
                    f"{own.shapes.checkpoint.path}, for which the steps are compiled; start an engine for it"
                )
            if names := _differing(own.shapes.config, other.shapes.config):
                raise ConfigError(
                    f"{other.shapes.checkpoint.path}: by its config.json it has other {', '.join(names)} than "
                    f"{own.shapes.checkpoint.path}, for which the steps are compiled; start an engine for it, or write "
                    "the weights with the same config"
                )
        return [self._flat(model, model.load().state, mesh) for model, mesh in zip(models, self._meshes, strict=True)]

    @staticmethod
    def _flat(planned: PlannedModel, state: nnx.State, mesh: Mesh) -> tuple[jax.Array, ...]:
        if mesh != planned.shapes.mesh:
            state = _copied(dataclasses.replace(planned.shapes, state=state), mesh).state
        return flat_weights(jax.block_until_ready(state))


def _differing(own: DecoderConfig, other: DecoderConfig) -> list[str]:
    """Names of the fields that say what is computed; how long a sequence may be was decided at the start."""
    names = [field.name for field in dataclasses.fields(own) if field.name != "max_position"]
    return [name for name in names if getattr(own, name) != getattr(other, name)]


def _form_of(leaf: Any) -> tuple[Any, ...]:
    return (leaf.shape, leaf.dtype)


def build_runners(
    config: Config,
    models: Sequence[PlannedModel],
    *,
    others: Sequence[Sequence[Mesh]] = (),
    tower: TowerPlan | None = None,
    content: str | None = None,
    progress: Progress = Quiet(),  # noqa: B008 (stateless)
    say: Callable[[str], None],
    hooks: BuildHooks = BuildHooks(),
    apart: str | None = None,
) -> list[Built]:
    """Sizes the cache, reads the weights, compiles every executable and puts the state on the devices.

    `models` are the stages of a pipeline, most often one, on the devices of the first replica; `others` are the meshes
    of the same stages in each of the other replicas. Those on devices of other processes are built there. `tower`: of a
    model that takes pictures. `content`: a text that differs for weights of other numbers (`kept_weights`); None: they
    are packed at each start. `say` gets the lines of the memory breakdown and the compile report. `apart`: the module
    by which another process compiles the steps that can wait (`StepsApart`), with `store_steps`; None: a thread does.
    Raises CapacityError for sizes that cannot fit, CheckpointError for weights that cannot be read.
    """
    plan, models, forms = _make_plan(config, models, others, tower, content, progress, say, hooks, apart)
    models, tower = [models[number] for number in plan.here], plan.tower
    replicas = [[stage.devices for stage in plan.stages], *([meshes[n] for n in plan.here] for meshes in others)]
    with ThreadPoolExecutor(1, thread_name_prefix="jaxserve-weights") as reader:
        begin_s = time.perf_counter()
        progress.begin("loading weights and compiling steps")
        loading = reader.submit(_load_all, models, others, tower)
        parts = _compile_stages(plan, replicas, progress)
        links = _make_links(plan, progress)
        seconds = {"executables": time.perf_counter() - begin_s}
        if not loading.done():
            progress.begin("loading weights")
        loaded, seconds["weights"] = loading.result()
    first_runs = "" if plan.sizes.backend == "cpu" else ", and running each step before a request waits for it"
    progress.begin(f"placing the KV pages{first_runs}")
    return [
        _place(plan, found, links, one, of_tower, seconds, NewWeights(models, one, forms))
        for found, (one, of_tower) in zip(zip(*parts, strict=True), loaded, strict=True)
    ]


def store_steps(
    config: Config,
    models: Sequence[PlannedModel],
    *,
    tower: TowerPlan | None,
    orders: Orders,
    tell: OnBuilt,
) -> None:
    """Compiles the steps of `orders` into the store, without weights: the work of a process beside the one that serves.

    Raises ConfigError when the programs would not be those of that process.
    """
    config = config.model_copy(update={"kernels": config.kernels.model_copy(update={"self_check": False})})
    plan, _, _ = _make_plan(
        config, models, (), tower, None, Quiet(), logger.debug, BuildHooks(), None, orders.total_bytes
    )
    [stage] = plan.stages
    store = _open_store(plan, stage, 1)
    if store is None or store.digest != orders.digest:
        raise ConfigError("the programs that would be compiled here are not those of the process that serves")
    compiler = Compiler(stage.devices, store)
    jobs = {job.name: job for job in _jobs(plan, stage, ())[0]}
    for name in orders.names:
        try:
            made = compiler.build_one(jobs[name])
        except Exception as error:  # the boundary of a step: the others may do
            tell(name, None, error)
        else:
            tell(name, made.seconds, None)


def _make_plan(
    config: Config,
    models: Sequence[PlannedModel],
    others: Sequence[Sequence[Mesh]],
    tower: TowerPlan | None,
    content: str | None,
    progress: Progress,
    say: Callable[[str], None],
    hooks: BuildHooks,
    apart: str | None,
    total_bytes: int | None = None,
) -> tuple["_BuildPlan", list[PlannedModel], Forms]:
    """The sizes and kernels, and the models in the form that these kernels take.

    `total_bytes`: of a device, for everything; None: as much as there is now.
    """
    directory = make_cache_directory(config.runtime.compile_cache)
    shapes = [planned.shapes for planned in models]
    partition, dtype = shapes[0].partition, shapes[0].dtype
    here = [number for number, part in enumerate(shapes) if is_here(part.mesh)]
    device = shapes[here[0]].mesh.local_devices[0]
    sizes = resolve_sizes(config, partition.model, dtype, backend_of(device))
    sizes = dataclasses.replace(sizes, adapters=resolve_adapters(config, partition))
    if tower is not None:
        pictures = picture_sizes(config, tower, has_sections=partition.model.has_sections)
        sizes = dataclasses.replace(sizes, pictures=pictures)
    if directory is not None and sizes.backend == "cpu" and machine_code.missing() is None:
        machine_code.keep_machine_code(directory)
        if config.kernels.paged_attention in ("auto", "numba_cpu"):
            machine_code.make_beside("attention", sizes.cache_dtype.name)
    checked = None
    if directory is not None and sizes.backend == "cpu":
        checked = CheckedKernels(folder=directory / "checked")
    progress.begin(_kernels_phase(sizes, directory))
    adapted = sizes.adapters is not None
    matmul = choose(
        MATMUL, config, matmul_uses(dtype, shapes[0].mesh, shapes[0].kept, adapters=adapted), device, checked
    )
    grouped = choose_grouped_matmul(config, partition, dtype, shapes[0].kept, device, checked)
    forms = Forms(matmul=matmul, grouped_matmul=grouped)
    products = {"matmul": matmul} | ({} if grouped is None else {"grouped_matmul": grouped})
    packers = [product.convert for product in products.values()]
    kept = None
    if directory is not None and content is not None and _are_ours(packers):
        kept = KeptWeights(folder=directory / "weights", max_bytes=config.runtime.kept_weights_bytes, content=content)
    models = [converted(planned, forms, kept) for planned in models]
    if tower is not None:
        tower = dataclasses.replace(tower, planned=converted_tower(tower.planned, forms))
    shapes = [planned.shapes for planned in models]
    selector, uses = resolve_selector(config, sizes.page_size), attention_uses(partition.local, sizes, dtype)
    heads = () if selector is None else tuple(map(single_head, uses))
    drafts = draft_uses(sizes, partition.devices, dtype)
    attention = choose(PAGED_ATTENTION, config, (*uses, *heads, *drafts), device, checked)
    sources = (attention.attend, *(() if selector is None else (type(selector),)))
    if selector is not None:
        attention = with_selector(attention, selector, uses)
    say(describe_invariance(sizes.backend, attention, products))
    if config.runtime.batch_invariant:
        check_kernels(sizes.backend, attention, products)
    stages = [
        AbstractStage(
            graphdef=part.graphdef,
            state=part.state,
            partition=part.partition,
            layers=part.layers,
            mesh=part.mesh,
            dtype=part.dtype,
        )
        for part in shapes
    ]
    replicas = [[stage.devices for stage in stages], *others]
    here_bytes = _total_bytes(replicas) if total_bytes is None else total_bytes
    memory = plan_stage_memory(config, sizes, stages, attention, here_bytes, tower)
    agreed = hooks.agree({"pages": memory.num_pages, "slots": memory.limits.slots.num_slots})
    memory = memory.with_numbers(agreed["pages"], agreed["slots"])
    shared = len(_local_devices(replicas)) * memory.held_bytes if sizes.backend == "cpu" else 0
    if total_bytes is None:  # else another process has it all by now
        check_host_memory(config.cache.host_bytes, config.vision.host_bytes if tower is not None else 0, shared)
    for line in memory.lines():
        say(line)
    # Neither where processes share a device, nor for a kernel from elsewhere, whose source the key does not cover.
    stores = not hooks.one_of_many and _are_ours((*sources, *packers))
    if directory is not None and not stores:
        use_compile_cache(directory)
    plan = _BuildPlan(
        config=config,
        sizes=sizes,
        attention=attention,
        memory=memory,
        all_stages=stages,
        here=here,
        hooks=hooks,
        tower=tower,
        store=directory / "executables" if directory is not None and stores else None,
        shown=not isinstance(progress, Quiet),
        total_bytes=here_bytes,
        apart=apart,
    )
    return plan, models, forms


def _are_ours(functions: Sequence[Any]) -> bool:
    return all(function.__module__.startswith("jaxserve.") for function in functions)


def _place(
    plan: "_BuildPlan",
    parts: Sequence["_Part"],
    links: StageLinks | None,
    loaded: tuple[LoadedModel, ...],
    tower_weights: tuple[jax.Array, ...],
    seconds: Mapping[str, float],
    new_weights: NewWeights,
    weights: Weights | None = None,
) -> Built:
    """One replica of what is compiled and loaded, with its state: the parts and models of its stages.

    `weights`: others than those of `loaded`, which it has got since.
    """
    if weights is None:
        weights = [flat_weights(model.state) for model in loaded]
    config, sizes, memory = plan.config, plan.sizes, plan.memory
    num_stages = len(plan.all_stages)
    report = [
        line
        for number, part in zip(plan.here, parts, strict=True)
        for line in _report(part.compiled, number, num_stages)
    ]
    now = first_buckets(sizes) if parts[0].later else sizes.buckets
    pictures, tower = sizes.pictures, plan.tower
    stages: list[Stage | None] = [None] * num_stages
    for number, part, model, own in zip(plan.here, parts, loaded, weights, strict=True):
        stages[number] = Stage(
            executables=_executables(
                part.compiled,
                sizes.adapters,
                model.mesh,
                now,
                memory.move_counts,
                () if pictures is None else pictures.num_lines,
            ),
            weights=own,
            make_state=part.compiled["make_state"].call,
            state=part.compiled["make_state"].call(),
            sharding=replicated(model.mesh),
        )
    runner = DeviceRunner(
        limits=memory.limits.with_buckets(now),
        layouts=dict(bucket_layouts(sizes)),
        stages=stages,
        links=links,
        num_parts=1 if num_stages == 1 else config.parallel.microbatches or num_stages,
        vocab_size=loaded[0].partition.vocab_size,
        on_buffer=plan.hooks.on_buffer,
        slots=_slot_bytes(plan, loaded) if memory.limits.slots.num_slots else None,
        tower=None if tower is None else make_tower(tower, parts[0].compiled, loaded[0].mesh, tower_weights),
        pictures=None if tower is None or pictures is None else tower.rows(pictures, sizes.max_rows),
    )
    if sizes.backend != "cpu":
        runner.warm_up()
    if memory.limits.slots.num_slots:
        runner.time_moves()
    if sizes.speculation is not None:
        runner.time_steps()
    later = _build_later(runner, parts[0], memory, plan.shown) if parts[0].later else None

    def renew() -> Built:
        weights = runner.close()
        return _place(plan, parts, links, loaded, tower_weights, seconds, new_weights, weights)

    return Built(
        runner=runner,
        models=loaded,
        shapes=tuple(plan.all_stages),
        memory=memory,
        compile_report=tuple(report),
        seconds=seconds,
        later=later,
        new_weights=new_weights,
        page_layout=_page_layout(plan, loaded) if memory.limits.slots.num_slots else "",
        slot_form=_slot_form(plan, loaded) if memory.limits.slots.num_slots else None,
        renew=renew,
    )


def _page_layout(plan: "_BuildPlan", loaded: Sequence[LoadedModel]) -> str:
    parts = [
        f"layers {stage.layers.start} to {stage.layers.stop - 1} on {len(model.mesh.local_devices)} devices x "
        f"{packed_words(stage, plan.attention, plan.sizes)} words"
        for stage, model in zip(plan.stages, loaded, strict=True)
    ]
    return f"{plan.attention.name}, {plan.sizes.page_size} tokens, {', '.join(parts)}"


def _slot_form(plan: "_BuildPlan", loaded: Sequence[LoadedModel]) -> SlotForm | None:
    if len(plan.here) < len(plan.all_stages):
        return None  # a slot has not all layers of a page
    return slot_form(_placed_stages(plan, loaded), plan.attention, plan.sizes, loaded[0].cache_scales)


def _placed_stages(plan: "_BuildPlan", loaded: Sequence[LoadedModel]) -> list[AbstractStage]:
    """The stages on the devices of one replica."""
    return [dataclasses.replace(stage, mesh=model.mesh) for stage, model in zip(plan.stages, loaded, strict=True)]


def _slot_bytes(plan: "_BuildPlan", loaded: Sequence[LoadedModel]) -> SlotBytes:
    packed = [
        StagePages(sharding=packed_sharding(stage), words=packed_words(stage, plan.attention, plan.sizes))
        for stage in _placed_stages(plan, loaded)
    ]
    return SlotBytes(plan.memory.limits.slots.num_slots, packed)


def _kernels_phase(sizes: Sizes, cache: Path | None) -> str:
    if sizes.backend != "cpu" or machine_code.missing() is not None:
        return "choosing kernels"
    if cache is not None and machine_code.is_kept():
        return "reading Numba's kernels"
    return "Numba compiles kernels" + (" (once: they are kept)" if cache is not None else "")


def _load_all(
    models: Sequence[PlannedModel], others: Sequence[Sequence[Mesh]], tower: TowerPlan | None
) -> tuple[list[tuple[tuple[LoadedModel, ...], tuple[jax.Array, ...]]], float]:
    """The stages of each replica and its tower, read once, with the seconds that it took."""
    begin_s = time.perf_counter()
    first = tuple(model.load() for model in models)
    weights = () if tower is None else tower.planned.fill(first[0].mesh)
    copies = [
        (
            tuple(_copied(model, mesh) for model, mesh in zip(first, meshes, strict=True)),
            tuple(jax.device_put(weights, NamedSharding(meshes[0], PartitionSpec()))),
        )
        for meshes in others
    ]
    return [(first, weights), *jax.block_until_ready(copies)], time.perf_counter() - begin_s


def _copied(model: LoadedModel, mesh: Mesh) -> LoadedModel:
    """The model on other devices; the copies are on their way."""
    state = jax.device_put(model.state, shardings_for(model.state, mesh))
    return dataclasses.replace(model, state=state, mesh=mesh)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _BuildPlan:
    """What is decided before anything is compiled: the sizes. `here`: the numbers of the stages that this process has;
    the others are of other processes. `shown`: an end that waits for a compile says so. `total_bytes`: of a device.
    `apart`: see `build_runners`."""

    config: Config
    sizes: Sizes
    attention: PagedAttention
    memory: MemoryPlan
    all_stages: Sequence[AbstractStage]
    here: Sequence[int]
    hooks: BuildHooks
    tower: TowerPlan | None
    store: Path | None
    shown: bool
    total_bytes: int
    apart: str | None

    @property
    def stages(self) -> list[AbstractStage]:
        """Those of this process."""
        return [self.all_stages[number] for number in self.here]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The executables of a stage, and the buckets that are still to be built. `apart` None: by a thread."""

    compiled: Mapping[str, Compiled]
    later: Mapping[Bucket, Job]
    compiler: Compiler
    apart: StepsApart | None


def _compile_stages(plan: _BuildPlan, replicas: Sequence[Sequence[Mesh]], progress: Progress) -> list[list[_Part]]:
    """For each stage of this process, the parts of each replica, whose meshes of these stages are given."""
    config, sizes, stages = plan.config, plan.sizes, plan.stages
    waiting: tuple[Bucket, ...] = ()
    asked = config.runtime.background_buckets
    if asked and (len(stages) > 1 or plan.hooks.one_of_many):
        raise ConfigError(
            "runtime.background_buckets is true, but the stages of a pipeline and the processes of several hosts must "
            "have the same step shapes at each step; leave it out, or set it to false"
        )
    # On other backends compilers measure on the device, whose memory the pages fill by then: not shown to work yet.
    if (sizes.backend == "cpu" if asked is None else asked) and len(stages) == 1 and not plan.hooks.one_of_many:
        waiting = tuple(b for b in sizes.buckets if b not in first_buckets(sizes))
    jobs = [
        [_jobs(plan, dataclasses.replace(stage, mesh=meshes[number]), waiting) for meshes in replicas]
        for number, stage in enumerate(stages)
    ]
    threads = num_threads(config.runtime.compile_threads, sizes.backend)
    total, before, parts = sum(len(now) for stage in jobs for now, _ in stage), 0, []
    for number, (stage, mine) in enumerate(zip(stages, jobs, strict=True)):

        def tell(done: int, _: int, newest: Compiled, before: int = before) -> None:
            progress.count(before + done, total, newest.name)

        store = _open_store(plan, stage, len(replicas))
        meshes = [replica[number] for replica in replicas]
        compilers = [Compiler(mesh, _of_replica(store, mesh)) for mesh in meshes]
        now, later = [one for one, _ in mine], [more for _, more in mine]
        apart = _steps_apart(plan, store) if waiting else None
        ahead = [*later[0].values()] if apart is None else []
        compiled = build_replicas(compilers, now, threads, tell, ahead=ahead)
        parts.append(
            [
                _Part(compiled=c, later=m, compiler=by, apart=apart)
                for c, m, by in zip(compiled, later, compilers, strict=True)
            ]
        )
        before += sum(map(len, now))
        if config.runtime.batch_invariant and sizes.backend != "cpu":
            check_steps({step_name(b): compiled[0][step_name(b)].call.as_text() or "" for b in sizes.buckets})
        programs = compiled[0].values()
        code_bytes = 0 if sizes.backend == "cpu" else sum(c.code_bytes for c in programs)  # the system's own, on a CPU
        plan.memory.check_compiled(max(c.temporary_bytes for c in programs), code_bytes)
    return parts


def _steps_apart(plan: _BuildPlan, store: ExecutableStore | None) -> StepsApart | None:
    """The process that compiles the steps that can wait; None where a thread has to, which the log explains."""
    if plan.sizes.backend != "cpu":
        reason = f"a second process cannot use the {plan.sizes.backend}"
    elif plan.apart is None or store is None or plan.store is None:
        reason = "no store on disk would bring its executables here (runtime.compile_cache)"
    else:
        orders = Orders(
            config=plan.config, total_bytes=plan.total_bytes, digest=store.digest, settings=plain_settings()
        )
        return StepsApart(plan.apart, orders)
    logger.info("a thread of this process compiles the other step shapes, not a process of its own: %s", reason)
    return None


def _make_links(plan: _BuildPlan, progress: Progress) -> StageLinks | None:
    """To the stages of other processes; None where there are none."""
    stages = plan.all_stages
    if len(plan.here) == len(stages):
        return None
    shapes = AbstractLinks(
        meshes=[stage.devices for stage in stages],
        hidden=jax.ShapeDtypeStruct((stages[0].partition.model.hidden_size,), stages[0].dtype),
        outputs=output_shapes(stages[-1], plan.attention, plan.sizes),
    )
    progress.begin("compiling the links between stages")
    options = compiler_options(plan.sizes.backend, sum(mesh.size for mesh in shapes.meshes))
    compiled = shapes.compile(
        options, num_threads(plan.config.runtime.compile_threads, plan.sizes.backend), lambda *_: None
    )
    return StageLinks(shapes, compiled)


def _jobs(plan: _BuildPlan, stage: AbstractStage, waiting: Sequence[Bucket]) -> tuple[list[Job], Mapping[Bucket, Job]]:
    """The jobs that a stage needs before it begins, and the steps of the buckets that wait."""
    num_pages = plan.memory.num_pages
    jobs = make_jobs(stage, plan.sizes, plan.attention, num_pages, plan.memory.move_counts)
    of_name = {job.name: job for job in jobs}
    later = {bucket: of_name[step_name(bucket)] for bucket in waiting}
    now = [job for job in jobs if job not in later.values()]
    if plan.tower is not None:
        now += tower_jobs(plan.tower, stage.devices, plan.sizes.backend)
    return [*now, state_job(stage, plan.attention, plan.sizes, num_pages)], later


def _open_store(plan: _BuildPlan, stage: AbstractStage, num_replicas: int) -> ExecutableStore | None:
    """None where executables are of no use to anybody else: neither to a later start nor to another replica."""
    if plan.store is None and num_replicas == 1:
        return None
    weights = jax.tree_util.tree_leaves_with_path(stage.weights)
    # One program is of one bucket, which is in its name; and the limit of mixed steps is the scheduler's alone.
    sizes = dataclasses.replace(plan.sizes, buckets=(), max_mixed_tokens=None)
    facts = [
        plan.attention.name,
        repr(sizes),
        str(plan.memory.num_pages),
        str(plan.sizes.widest),  # a row has as many masks
        repr(stage.graphdef),
        repr(jax.tree.structure(stage.state)),  # the form of each weight
        repr((stage.partition, stage.layers, stage.dtype, stage.mesh.shape)),
        *(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype} {leaf.sharding.spec}" for path, leaf in weights),
        *(() if plan.tower is None else _tower_facts(plan.tower.planned)),
    ]
    devices = list(stage.devices.devices.flat)
    return ExecutableStore(plan.store, facts, devices, plan.config.runtime.compile_cache_bytes)


def _of_replica(store: ExecutableStore | None, mesh: Mesh) -> ExecutableStore | None:
    """The store for the devices of one replica; None where each start compiles for them."""
    devices = [*mesh.devices.flat]
    if store is None:
        return None
    if not can_be_loaded(devices):
        logger.info("each start compiles for the devices %s: libtpu cannot load executables there", devices)
        return None
    return store.on(devices)


def _tower_facts(planned: PlannedTower) -> tuple[str, ...]:
    """What the program of a tower follows from."""
    return repr(planned.graphdef), repr(jax.tree.structure(planned.state)), repr(planned.weights)


def _build_later(runner: DeviceRunner, part: _Part, memory: MemoryPlan, shown: bool) -> BackgroundBuckets:
    return BackgroundBuckets(
        limits=runner.limits,
        jobs=part.later,
        compiler=part.compiler,
        check=lambda compiled: memory.check_compiled(compiled.temporary_bytes, 0),
        admit=lambda bucket, compiled: runner.add_bucket(bucket, compiled.call),
        apart=part.apart,
        shown=shown,
    )


def _report(compiled: Mapping[str, Compiled], number: int, num_stages: int) -> list[str]:
    title = [f"stage {number + 1} of {num_stages}"] if num_stages > 1 else []
    return [*title, *report_lines(compiled)]


def _executables(
    compiled: Mapping[str, Compiled],
    adapters: AdapterSizes | None,
    mesh: Mesh,
    buckets: Sequence[Bucket],
    move_counts: Sequence[int],
    line_counts: Sequence[int] = (),
) -> Executables:
    writer = None
    if adapters is not None:
        writer = AdapterWriter(compiled["write_adapter"].call, slot_shardings(adapters, mesh))
    optional = ("configure_row", "write_masks", "tell_tokens", "enter_rows", "leave_rows")
    return Executables(
        steps={b: compiled[step_name(b)].call for b in buckets},
        copy_pages=compiled["copy_pages"].call,
        write_tables=compiled["write_tables"].call,
        **{name: compiled[name].call if name in compiled else None for name in optional},
        gather_pages={count: compiled[gather_name(count)].call for count in move_counts},
        scatter_pages={count: compiled[scatter_name(count)].call for count in move_counts},
        write_embeddings={count: compiled[embeddings_name(count)].call for count in line_counts},
        write_adapter=writer,
    )


def _total_bytes(replicas: Sequence[Sequence[Mesh]]) -> int:
    """Bytes that a device has for everything, weights included: the least that one has where each has its own, an equal
    share of the one memory that all CPU devices have."""
    devices = _local_devices(replicas)
    if backend_of(devices[0]) == "cpu":
        return device_memory_bytes(devices[0]) // len(devices)
    return min(map(device_memory_bytes, devices))


def _local_devices(replicas: Sequence[Sequence[Mesh]]) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
    return [device for meshes in replicas for mesh in meshes for device in mesh.local_devices]


def _num_devices_here(mesh: Mesh | AbstractMesh) -> int:
    return len(mesh.local_devices) if isinstance(mesh, Mesh) else mesh.size


def plan_stage_memory(
    config: Config,
    sizes: Sizes,
    stages: Sequence[AbstractStage],
    attention: PagedAttention,
    total_bytes: int,
    tower: TowerPlan | None = None,
) -> MemoryPlan:
    """The memory of the fullest device: pages are as many in all stages, so the worst of each item counts.

    `tower` is the one of `sizes.pictures`; the pool of embeddings is part of the state.
    """
    cache = config.cache
    local, largest = stages[0].partition.local, max(sizes.buckets, key=lambda bucket: bucket.tokens)
    weights, pages, rows, adapters = [], [], [], 0
    for stage in stages:
        shapes = jax.eval_shape(functools.partial(make_state, stage, attention, sizes, 1))
        specs = state_specs(stage, attention, sizes)
        weights.append(device_bytes(stage.state, specs_for(stage.state), stage.mesh))
        pages.append(device_bytes(shapes.caches, specs.caches, stage.mesh) // 2)  # the one page and the dummy
        rest, rest_specs = (dataclasses.replace(tree, caches=()) for tree in (shapes, specs))
        rows.append(device_bytes(rest, rest_specs, stage.mesh))
        if sizes.adapters is not None:
            adapters = device_bytes(shapes.adapters, specs.adapters, stage.mesh)
    counts = move_counts(max(pages)) if cache.host_bytes else ()
    slot_bytes = 0
    if counts:  # each device packs its part of a page into words of its own
        slot_bytes = sum(4 * packed_words(stage, attention, sizes) * _num_devices_here(stage.mesh) for stage in stages)
    slots = plan_slots(cache, slot_bytes, config.parallel.data, counts)
    links = 0
    if not all(_num_devices_here(stage.mesh) for stage in stages):
        links = link_bytes({b.tokens for b in sizes.buckets}, local.hidden_size * stages[0].dtype.itemsize)
    planned = plan_memory(
        total_bytes=total_bytes,
        share=memory_share(config.cache, sizes.backend),
        weight_bytes=max(weights) + (0 if tower is None else tower.planned.num_bytes),
        temporary_bytes=max(
            estimate_temporaries(
                tokens=largest.tokens,
                rows=sizes.max_rows,
                hidden=local.hidden_size,
                ffn=max(mlp.width for mlp in local.mlps),
                vocab=local.vocab_size,
                itemsize=4,  # matmul results are float32 before they are rounded
            ),
            0 if tower is None else tower.temporary_bytes(tower.buckets[-1], 4),
        )
        + links,
        state_bytes=max(rows),
        page_bytes=max(pages),
        limits=dataclasses.replace(sizes.limits(0), slots=slots),
        page_groups=sizes.page_groups,
        num_pages=cache.num_pages,
        memory_bytes=cache.memory_bytes,
        move_counts=counts,
    )
    planned = dataclasses.replace(planned, adapter_bytes=adapters)
    if head_of(sizes) is None:
        return planned
    [stage] = stages
    head = nnx.from_flat_state([entry for entry in nnx.to_flat_state(stage.state) if entry[0][0] == "head"])
    shapes = jax.eval_shape(lambda: draft_caches(stage, attention, sizes, 1))
    specs = jax.tree.map(lambda _: spec_for((None, "kv_heads"), TENSOR_PARALLEL), shapes)
    return dataclasses.replace(
        planned,
        draft_weight_bytes=device_bytes(head, specs_for(head), stage.mesh),
        draft_page_bytes=device_bytes(shapes, specs, stage.mesh) // 2,
    )
