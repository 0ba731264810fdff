"""From a config to a runner that is ready: sizes and memory first, then weights and executables at once.

Owns the order and what is printed on the way. Compiling needs shapes alone, so the weights are read meanwhile; and the
largest bucket of each kind holds every plan, so the others may come while the engine answers (`later`).
Refuses to start an engine. Everything derived lives in the values made here; nothing is written back into the config.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from jaxserve.config_schema import Config
from jaxserve.errors import ConfigError
from jaxserve.kernels.cpu import machine_code
from jaxserve.kernels.paged_attention import PagedAttention
from jaxserve.models.loading import LoadedModel, PlannedModel
from jaxserve.models.sharding import specs_for
from jaxserve.runtime.compile import (
    Compiled,
    Compiler,
    Job,
    Progress,
    make_cache_directory,
    report_lines,
    use_compile_cache,
)
from jaxserve.runtime.executables import (
    AbstractStage,
    Sizes,
    bucket_jobs,
    bucket_layouts,
    burst_layouts,
    burst_name,
    device_bytes,
    first_buckets,
    flat_weights,
    make_jobs,
    make_state,
    state_job,
    state_specs,
    step_name,
)
from jaxserve.runtime.later import BackgroundBuckets
from jaxserve.runtime.memory import MemoryPlan, device_memory_bytes, estimate_temporaries, plan_memory
from jaxserve.runtime.mesh import replicated
from jaxserve.runtime.packing import packed
from jaxserve.runtime.resolve import backend_of, choose_attention, packing_width, resolve_sizes
from jaxserve.runtime.runner import DeviceRunner, Executables, Stage
from jaxserve.runtime.store import ExecutableStore
from jaxserve.sched.plan import Bucket, Limits

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuildHooks:
    """What a service of several processes adds to a build.

    Attributes:
      one_of_many: all buckets are built before the first step, since all processes must have the same; and none comes
        from a file of its own.
      on_buffer: see `DeviceRunner`.
      agree_on_pages: turns the pages that fit here into the pages that all processes have.
    """

    one_of_many: bool = False
    on_buffer: Callable[[np.ndarray], None] = lambda buffer: None
    agree_on_pages: Callable[[int], int] = lambda num_pages: num_pages


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A runner and what is worth telling about it.

    Attributes:
      models: the stages with their weights.
      seconds: what took how long; reading weights and making executables go on at once.
      later: buckets that the runner does not have yet, to be started by whoever runs it; None: it has them all.
    """

    runner: DeviceRunner
    models: tuple[LoadedModel, ...]
    memory: MemoryPlan
    compile_report: tuple[str, ...]
    seconds: Mapping[str, float]
    later: BackgroundBuckets | None


def build_runner(
    config: Config,
    models: Sequence[PlannedModel],
    *,
    progress: Progress,
    say: Callable[[str], None],
    hooks: BuildHooks = BuildHooks(),
) -> Built:
    """Sizes the cache, reads the weights, compiles every executable and puts the state on the devices.

    `models` are the stages of a pipeline, most often one. `say` gets the lines of the memory breakdown and the compile
    report. Raises CapacityError for sizes that cannot fit, CheckpointError for weights that cannot be read.
    """
    directory = make_cache_directory(config.runtime.compile_cache)
    shapes = [planned.shapes for planned in models]
    partition, dtype = shapes[0].partition, shapes[0].dtype
    device = shapes[0].mesh.local_devices[0]
    sizes = resolve_sizes(config, partition.model, dtype, backend_of(device))
    if directory is not None and sizes.backend == "cpu" and machine_code.missing() is None:
        machine_code.keep_machine_code(directory)
    width = packing_width(config, shapes[0].mesh, dtype)
    if width is not None:
        models = [packed(planned, width) for planned in models]
        shapes = [planned.shapes for planned in models]
    attention = choose_attention(config, partition.local, sizes, dtype, device)
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
    memory = plan_stage_memory(config, sizes, stages, attention, _total_bytes(device, sizes, shapes))
    memory = dataclasses.replace(memory, num_pages=hooks.agree_on_pages(memory.num_pages))
    for line in memory.lines():
        say(line)
    # Neither where processes share a device, nor for a kernel from elsewhere, whose source the key does not cover.
    stores = not hooks.one_of_many and attention.attend.__module__.startswith("jaxserve.")
    if directory is not None and not stores:
        use_compile_cache(directory)
    plan = _BuildPlan(
        config=config,
        sizes=sizes,
        attention=attention,
        memory=memory,
        hooks=hooks,
        store=directory / "executables" if directory is not None and stores else None,
    )
    with ThreadPoolExecutor(1, thread_name_prefix="jaxserve-weights") as reader:
        begin_s = time.perf_counter()
        loading = reader.submit(_load_all, models)
        parts = _compile_stages(plan, stages, progress)
        seconds = {"executables": time.perf_counter() - begin_s}
        loaded, seconds["weights"] = loading.result()
    report = [line for number, part in enumerate(parts) for line in _report(part.compiled, number, len(parts))]
    now = first_buckets(sizes) if parts[0].later else sizes.buckets
    runner = DeviceRunner(
        limits=sizes.limits(memory.num_pages).with_buckets(now),
        layouts=dict(bucket_layouts(sizes)),
        burst_layouts=burst_layouts(sizes),
        stages=[
            Stage(
                executables=_executables(part.compiled, now),
                weights=flat_weights(model.state),
                state=part.compiled["make_state"].call(),
                sharding=replicated(model.mesh),
            )
            for part, model in zip(parts, loaded, strict=True)
        ],
        num_parts=1 if len(stages) == 1 else config.parallel.microbatches or len(stages),
        vocab_size=partition.vocab_size,
        on_buffer=hooks.on_buffer,
    )
    later = _build_later(runner, parts[0], memory) if parts[0].later else None
    return Built(
        runner=runner, models=loaded, memory=memory, compile_report=tuple(report), seconds=seconds, later=later
    )


def _load_all(models: Sequence[PlannedModel]) -> tuple[tuple[LoadedModel, ...], float]:
    """With the seconds that it took."""
    begin_s = time.perf_counter()
    loaded = tuple(model.load() for model in models)
    return loaded, time.perf_counter() - begin_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _BuildPlan:
    """What is decided before anything is compiled."""

    config: Config
    sizes: Sizes
    attention: PagedAttention
    memory: MemoryPlan
    hooks: BuildHooks
    store: Path | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What was compiled for a stage, and what of it is still to come."""

    compiled: Mapping[str, Compiled]
    later: Mapping[Bucket, Sequence[Job]]
    compiler: Compiler


def _compile_stages(plan: _BuildPlan, stages: Sequence[AbstractStage], progress: Progress) -> list[_Part]:
    config, sizes, num_pages = plan.config, plan.sizes, plan.memory.num_pages
    jobs = [
        [*make_jobs(stage, sizes, plan.attention, num_pages), state_job(stage, plan.attention, sizes, num_pages)]
        for stage in stages
    ]
    waiting: dict[Bucket, Sequence[Job]] = {}
    asked = config.runtime.background_buckets
    if asked and (len(stages) > 1 or plan.hooks.one_of_many):
        raise ConfigError(
            "runtime.background_buckets is true, but the stages of a pipeline and the processes of several hosts must "
            "have the same step shapes at each step; leave it out, or set it to false"
        )
    # Elsewhere compilers measure on the device, whose memory the pages have by then: not shown to work yet.
    if (sizes.backend == "cpu" if asked is None else asked) and len(stages) == 1 and not plan.hooks.one_of_many:
        waiting = {b: bucket_jobs(b, jobs[0]) for b in sizes.buckets if b not in first_buckets(sizes)}
    ahead = [job for bucket in waiting.values() for job in bucket]
    jobs[0] = [job for job in jobs[0] if job not in ahead]
    total, before, parts = sum(map(len, jobs)), 0, []
    for now, stage in zip(jobs, stages, strict=True):

        def tell(done: int, _: int, newest: Compiled, before: int = before) -> None:
            progress(before + done, total, newest)

        compiler = Compiler(stage.mesh, _open_store(plan, stage))
        compiled = compiler.build(now, config.runtime.compile_threads, tell, ahead=ahead)
        parts.append(_Part(compiled=compiled, later=waiting, compiler=compiler))
        before += len(now)
        plan.memory.check_temporaries(max(c.temporary_bytes for c in compiled.values()))
    return parts


def _open_store(plan: _BuildPlan, stage: AbstractStage) -> ExecutableStore | None:
    if plan.store is None:
        return None
    weights = jax.tree_util.tree_leaves_with_path(stage.weights)
    facts = [
        plan.attention.name,
        repr(plan.sizes),
        str(plan.memory.num_pages),
        repr(stage.graphdef),
        repr((stage.partition, stage.layers, stage.dtype, stage.mesh.shape)),
        *(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype} {leaf.sharding.spec}" for path, leaf in weights),
    ]
    return ExecutableStore(plan.store, facts, devices=list(stage.mesh.devices.flat))


def _build_later(runner: DeviceRunner, part: _Part, memory: MemoryPlan) -> BackgroundBuckets:
    def admit(bucket: Bucket, parts: Mapping[str, Compiled]) -> Limits:
        burst = parts.get(burst_name(bucket))
        return runner.add_bucket(bucket, parts[step_name(bucket)].call, None if burst is None else burst.call)

    return BackgroundBuckets(
        limits=runner.limits,
        jobs=part.later,
        compiler=part.compiler,
        check=lambda compiled: memory.check_temporaries(compiled.temporary_bytes),
        admit=admit,
    )


def _report(compiled: Mapping[str, Compiled], number: int, num_stages: int) -> list[str]:
    title = [f"stage {number + 1} of {num_stages}"] if num_stages > 1 else []
    return [*title, *report_lines(compiled)]


def _executables(compiled: Mapping[str, Compiled], buckets: Sequence[Bucket]) -> Executables:
    configure, masks = compiled.get("configure_row"), compiled.get("write_masks")
    return Executables(
        steps={b: compiled[step_name(b)].call for b in buckets},
        bursts={b: compiled[burst_name(b)].call for b in buckets if burst_name(b) in compiled},
        copy_pages=compiled["copy_pages"].call,
        write_tables=compiled["write_tables"].call,
        configure_row=None if configure is None else configure.call,
        write_masks=None if masks is None else masks.call,
    )


def _total_bytes(
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
    sizes: Sizes,
    shapes: Sequence[LoadedModel],
) -> int:
    """Bytes that a device has for everything, weights included."""
    found = device_memory_bytes(device)
    if sizes.backend != "cpu":
        return found
    return found // sum(len(part.mesh.local_devices) for part in shapes)  # one memory for all CPU devices


def plan_stage_memory(
    config: Config,
    sizes: Sizes,
    stages: Sequence[AbstractStage],
    attention: PagedAttention,
    total_bytes: int,
) -> MemoryPlan:
    """The memory of the fullest device: pages are as many in all stages, so the worst of each item counts."""
    local, largest = stages[0].partition.local, max(sizes.buckets)
    weights, pages, rows = [], [], []
    for stage in stages:
        shapes = jax.eval_shape(functools.partial(make_state, stage, attention, sizes, 1))
        specs = state_specs(stage, attention, sizes)
        weights.append(device_bytes(stage.state, specs_for(stage.state), stage.mesh))
        pages.append(device_bytes(shapes.caches, specs.caches, stage.mesh) // 2)  # the one page and the dummy
        rest, rest_specs = (dataclasses.replace(tree, caches=()) for tree in (shapes, specs))
        rows.append(device_bytes(rest, rest_specs, stage.mesh))
    return plan_memory(
        total_bytes=total_bytes,
        fraction=config.cache.memory_fraction,
        weight_bytes=max(weights),
        temporary_bytes=estimate_temporaries(
            tokens=largest.tokens,
            rows=sizes.max_rows,
            hidden=local.hidden_size,
            ffn=local.ffn_size,
            vocab=local.vocab_size,
            itemsize=4,  # matmul results are float32 before they are rounded
        ),
        state_bytes=max(rows),
        page_bytes=max(pages),
        page_size=sizes.page_size,
        max_rows=sizes.max_rows,
        max_model_len=sizes.max_model_len,
        num_pages=config.cache.num_pages,
        memory_bytes=config.cache.memory_bytes,
    )
