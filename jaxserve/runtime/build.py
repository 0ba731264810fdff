"""From a config to a runner that is ready: sizes, memory, weights, compiled executables, in this order.

Owns the order and what is printed on the way. Refuses to start an engine. Everything derived lives in the values made
here; nothing is written back into the config.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config_schema import Config
from jaxserve.errors import ConfigError
from jaxserve.kernels import dispatch
from jaxserve.kernels.paged_attention import AttentionUse, Device, PagedAttention
from jaxserve.kernels.self_check import check_body
from jaxserve.kernels.xla_attention import BODY as REFERENCE
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.layers import attention_spec
from jaxserve.models.loading import LoadedModel
from jaxserve.models.sharding import specs_for
from jaxserve.runtime.buckets import DEFAULTS, make_buckets
from jaxserve.runtime.compile import Compiled, Progress, compile_all, report_lines, use_compile_cache
from jaxserve.runtime.executables import (
    AbstractStage,
    Sizes,
    bucket_layouts,
    device_bytes,
    flat_weights,
    make_jobs,
    make_state,
    state_shardings,
    state_specs,
    step_name,
)
from jaxserve.runtime.memory import MemoryPlan, device_memory_bytes, estimate_temporaries, plan_memory
from jaxserve.runtime.mesh import replicated
from jaxserve.runtime.runner import DeviceRunner, Executables, Stage
from jaxserve.runtime.step import DeviceState
from jaxserve.sched.plan import Limits

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuildHooks:
    """What a service of several processes adds to a build.

    Attributes:
      on_buffer: see `DeviceRunner`.
      agree_on_pages: turns the pages that fit here into the pages that all processes have.
    """

    on_buffer: Callable[[np.ndarray], None] = lambda buffer: None
    agree_on_pages: Callable[[int], int] = lambda num_pages: num_pages


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A runner and what is worth telling about it."""

    runner: DeviceRunner
    memory: MemoryPlan
    compile_report: tuple[str, ...]


def backend_of(device: jax.Device) -> str:  # pyright: ignore[reportInvalidTypeForm]
    """'cpu', 'gpu' or 'tpu'."""
    return "gpu" if device.platform in {"cuda", "rocm"} else device.platform


def describe(device: jax.Device) -> Device:  # pyright: ignore[reportInvalidTypeForm]
    """What a kernel body may know of `device`."""
    backend = backend_of(device)
    capability = device.compute_capability.split(".") if backend == "gpu" else None
    return Device(
        backend=backend,
        kind=device.device_kind,
        compute_capability=None if capability is None else (int(capability[0]), int(capability[1])),
    )


def attention_uses(model: DecoderConfig, sizes: Sizes, dtype: np.dtype) -> tuple[AttentionUse, ...]:
    """What the layers of a model will ask of a paged attention body. `model` has the sizes of one device."""
    return tuple(
        AttentionUse(
            spec=attention_spec(model, window),
            page_size=sizes.page_size,
            query_dtype=jnp.dtype(dtype).name,
            cache_dtype=jnp.dtype(sizes.cache_dtype).name,
        )
        for window in dict.fromkeys(model.windows)
    )


def resolve_sizes(config: Config, model: DecoderConfig, weights_dtype: np.dtype, backend: str) -> Sizes:
    """Fills in what the config leaves open. Raises ConfigError for combinations that cannot work."""
    if backend not in DEFAULTS:
        raise ConfigError(f"JAX runs on {backend!r} here; this version runs on {', '.join(DEFAULTS)}")
    defaults = DEFAULTS[backend]
    max_model_len = config.model.max_len or model.max_position
    if max_model_len > model.max_position:
        raise ConfigError(
            f"model.max_len is {max_model_len}, but the checkpoint is made for {model.max_position} tokens "
            "(max_position_embeddings); lower it, or change the checkpoint's rope scaling"
        )
    max_rows = config.sched.max_rows or min(defaults.max_rows, config.sched.max_step_tokens or defaults.max_rows)
    max_step_tokens = config.sched.max_step_tokens or max(defaults.max_step_tokens, max_rows)
    if max_step_tokens < max_rows:
        raise ConfigError(
            f"sched.max_step_tokens is {max_step_tokens}, less than sched.max_rows {max_rows}: a step must hold one "
            "token of every row; raise the one or lower the other"
        )
    max_mixed_tokens = config.sched.max_mixed_tokens
    if max_mixed_tokens is None:
        max_mixed_tokens = defaults.max_mixed_tokens
    return Sizes(
        backend=backend,
        page_size=config.cache.page_size or dispatch.default_page_size(backend),
        max_rows=max_rows,
        max_model_len=max_model_len,
        buckets=make_buckets(
            max_rows, max_step_tokens, config.runtime.token_buckets, config.runtime.row_buckets, defaults.growth
        ),
        cache_dtype=weights_dtype if config.cache.dtype == "auto" else jnp.dtype(config.cache.dtype),
        max_mixed_tokens=max_mixed_tokens or None,
    )


def build_runner(
    config: Config,
    loaded: Sequence[LoadedModel],
    *,
    progress: Progress,
    say: Callable[[str], None],
    hooks: BuildHooks = BuildHooks(),
) -> Built:
    """Sizes the cache, compiles every executable and puts the state on the devices.

    `loaded` are the stages of a pipeline, most often one. `say` gets the lines of the memory breakdown and the compile
    report. Raises CapacityError for sizes that cannot fit.
    """
    use_compile_cache(config.runtime.compile_cache)
    partition, dtype = loaded[0].partition, loaded[0].dtype
    device = loaded[0].mesh.local_devices[0]
    sizes = resolve_sizes(config, partition.model, dtype, backend_of(device))
    attention = _choose_attention(config, partition.local, sizes, dtype, device)
    stages = [
        AbstractStage(
            graphdef=part.graphdef,
            state=jax.eval_shape(lambda state: state, part.state),
            partition=part.partition,
            layers=part.layers,
            mesh=part.mesh,
            dtype=part.dtype,
        )
        for part in loaded
    ]
    memory = plan_stage_memory(config, sizes, stages, attention, _total_bytes(device, sizes, loaded))
    memory = dataclasses.replace(memory, num_pages=hooks.agree_on_pages(memory.num_pages))
    for line in memory.lines():
        say(line)
    compiled = _compile_stages(config, sizes, stages, attention, memory, progress)
    report = [line for number, part in enumerate(compiled) for line in _report(part, number, len(compiled))]
    runner = DeviceRunner(
        limits=Limits(
            max_rows=sizes.max_rows,
            num_pages=memory.num_pages,
            page_size=sizes.page_size,
            max_model_len=sizes.max_model_len,
            buckets=sizes.buckets,
            max_mixed_tokens=sizes.max_mixed_tokens,
        ),
        layouts=dict(bucket_layouts(sizes)),
        stages=[
            Stage(
                executables=_executables(part, sizes),
                weights=flat_weights(model.state),
                state=_initial_state(stage, attention, sizes, memory.num_pages),
                sharding=replicated(stage.mesh),
            )
            for part, stage, model in zip(compiled, stages, loaded, strict=True)
        ],
        num_parts=1 if len(stages) == 1 else config.parallel.microbatches or len(stages),
        vocab_size=partition.vocab_size,
        on_buffer=hooks.on_buffer,
    )
    return Built(runner=runner, memory=memory, compile_report=tuple(report))


def _compile_stages(
    config: Config,
    sizes: Sizes,
    stages: Sequence[AbstractStage],
    attention: PagedAttention,
    memory: MemoryPlan,
    progress: Progress,
) -> list[Mapping[str, Compiled]]:
    jobs = [make_jobs(stage, sizes, attention, memory.num_pages) for stage in stages]
    total, before, compiled = sum(map(len, jobs)), 0, []
    for part, stage in zip(jobs, stages, strict=True):

        def tell(done: int, _: int, newest: Compiled, before: int = before) -> None:
            progress(before + done, total, newest)

        compiled.append(compile_all(part, config.runtime.compile_threads, tell, stage.mesh))
        before += len(part)
        memory.check_temporaries(max(c.temporary_bytes for c in compiled[-1].values()))
    return compiled


def _report(compiled: Mapping[str, Compiled], number: int, num_stages: int) -> list[str]:
    title = [f"stage {number + 1} of {num_stages}"] if num_stages > 1 else []
    return [*title, *report_lines(compiled)]


def _executables(compiled: Mapping[str, Compiled], sizes: Sizes) -> Executables:
    configure, masks = compiled.get("configure_row"), compiled.get("write_masks")
    return Executables(
        steps={b: compiled[step_name(b)].call for b in sizes.buckets},
        copy_pages=compiled["copy_pages"].call,
        write_tables=compiled["write_tables"].call,
        configure_row=None if configure is None else configure.call,
        write_masks=None if masks is None else masks.call,
    )


def _initial_state(stage: AbstractStage, attention: PagedAttention, sizes: Sizes, num_pages: int) -> DeviceState:
    make = functools.partial(make_state, stage, attention, sizes, num_pages)
    return jax.jit(make, out_shardings=state_shardings(stage, attention, sizes))()


def _choose_attention(
    config: Config,
    local_model: DecoderConfig,
    sizes: Sizes,
    dtype: np.dtype,
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
) -> PagedAttention:
    uses = attention_uses(local_model, sizes, dtype)
    described = describe(device)
    attention = dispatch.resolve(device=described, choice=config.kernels.paged_attention, uses=uses)
    if config.kernels.self_check and attention is not REFERENCE:
        with jax.default_device(device):
            difference = max(check_body(attention, use, described) for use in uses)
        logger.info("paged_attention: %r agrees with the reference to %.1e on this device", attention.name, difference)
    return attention


def _total_bytes(
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
    sizes: Sizes,
    loaded: Sequence[LoadedModel],
) -> int:
    """Bytes that a device has for everything, weights included."""
    found = device_memory_bytes(device)
    if sizes.backend != "cpu":
        return found
    # One memory for all CPU devices; what is available was read after the weights had been loaded.
    num_devices = sum(len(part.mesh.local_devices) for part in loaded)
    return found // num_devices + max(device_bytes(part.state, specs_for(part.state), part.mesh) for part in loaded)


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
