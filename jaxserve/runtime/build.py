"""From a config to a runner that is ready: sizes, memory, weights, compiled executables, in this order.

Owns the order and what is printed on the way. Refuses to start an engine. Everything derived lives in the values made
here; nothing is written back into the config.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable

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
from jaxserve.runtime.buckets import DEFAULTS, make_buckets
from jaxserve.runtime.compile import Progress, compile_all, report_lines, use_compile_cache
from jaxserve.runtime.executables import AbstractModel, Sizes, bucket_layouts, make_jobs, make_state, step_name
from jaxserve.runtime.memory import MemoryPlan, device_memory_bytes, estimate_temporaries, plan_memory
from jaxserve.runtime.runner import DeviceRunner, Executables
from jaxserve.runtime.step import DeviceState
from jaxserve.sched.plan import Limits

logger = logging.getLogger(__name__)


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
    """What the layers of a model will ask of a paged attention body."""
    return tuple(
        AttentionUse(
            spec=attention_spec(model, window),
            page_size=sizes.page_size,
            query_dtype=jnp.dtype(dtype).name,
            cache_dtype=jnp.dtype(sizes.cache_dtype).name,
        )
        for window in dict.fromkeys(model.windows)
    )


def device_of(loaded: LoadedModel) -> jax.Device:  # pyright: ignore[reportInvalidTypeForm]
    """The device that holds the weights."""
    (device,) = jax.tree.leaves(loaded.state)[0].sharding.device_set
    return device


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
    return Sizes(
        backend=backend,
        page_size=config.cache.page_size or dispatch.default_page_size(backend),
        max_rows=max_rows,
        max_model_len=max_model_len,
        buckets=make_buckets(
            max_rows, max_step_tokens, config.runtime.token_buckets, config.runtime.row_buckets, defaults.growth
        ),
        cache_dtype=weights_dtype if config.cache.dtype == "auto" else jnp.dtype(config.cache.dtype),
    )


def build_runner(
    config: Config,
    loaded: LoadedModel,
    *,
    progress: Progress,
    say: Callable[[str], None],
) -> Built:
    """Sizes the cache, compiles every executable and puts the state on the device.

    `say` gets the lines of the memory breakdown and the compile report. Raises CapacityError for sizes that cannot
    fit.
    """
    use_compile_cache(config.runtime.compile_cache)
    device = device_of(loaded)
    backend = backend_of(device)
    model = loaded.config
    sizes = resolve_sizes(config, model, loaded.dtype, backend)
    attention = _choose_attention(config, model, sizes, loaded.dtype, device)
    initial_state = functools.partial(make_state, model, attention, sizes)
    memory = _plan_memory(config, sizes, loaded, jax.eval_shape(functools.partial(initial_state, 1)))
    for line in memory.lines():
        say(line)
    limits = Limits(
        max_rows=sizes.max_rows,
        num_pages=memory.num_pages,
        page_size=sizes.page_size,
        max_model_len=sizes.max_model_len,
        buckets=sizes.buckets,
    )
    sharding = jax.sharding.SingleDeviceSharding(device)
    weights = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding), loaded.state)
    abstract = AbstractModel(graphdef=loaded.graphdef, weights=weights, config=model)
    jobs = make_jobs(abstract, sizes, attention, memory.num_pages, sharding)
    compiled = compile_all(jobs, config.runtime.compile_threads, progress)
    memory.check_temporaries(max(c.temporary_bytes for c in compiled.values()))
    report = tuple(report_lines(compiled))
    runner = DeviceRunner(
        limits=limits,
        layouts=dict(bucket_layouts(sizes)),
        executables=Executables(
            steps={b: compiled[step_name(b)].call for b in sizes.buckets},
            copy_pages=compiled["copy_pages"].call,
            write_tables=compiled["write_tables"].call,
            configure_row=compiled["configure_row"].call,
        ),
        weights=loaded.state,
        state=jax.jit(functools.partial(initial_state, memory.num_pages), out_shardings=sharding)(),
        vocab_size=model.vocab_size,
        buffer_sharding=sharding,
    )
    return Built(runner=runner, memory=memory, compile_report=report)


def _choose_attention(
    config: Config,
    model: DecoderConfig,
    sizes: Sizes,
    dtype: np.dtype,
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
) -> PagedAttention:
    uses = attention_uses(model, sizes, dtype)
    described = describe(device)
    attention = dispatch.resolve(device=described, choice=config.kernels.paged_attention, uses=uses)
    if config.kernels.self_check and attention is not REFERENCE:
        with jax.default_device(device):
            difference = max(check_body(attention, use, described) for use in uses)
        logger.info("paged_attention: %r agrees with the reference to %.1e on this device", attention.name, difference)
    return attention


def _plan_memory(config: Config, sizes: Sizes, loaded: LoadedModel, one_page: DeviceState) -> MemoryPlan:
    """`one_page` is the state, abstract or not, of a pool of one page; all but the cache is as large in every pool."""
    model = loaded.config
    weight_bytes = _num_bytes(loaded.state)
    largest = max(sizes.buckets)
    total_bytes = device_memory_bytes(device_of(loaded))
    if sizes.backend == "cpu":
        total_bytes += weight_bytes  # what is available was read after the weights had been loaded
    return plan_memory(
        total_bytes=total_bytes,
        fraction=config.cache.memory_fraction,
        weight_bytes=weight_bytes,
        temporary_bytes=estimate_temporaries(
            tokens=largest.tokens,
            rows=sizes.max_rows,
            hidden=model.hidden_size,
            ffn=model.ffn_size,
            vocab=model.vocab_size,
            itemsize=4,  # matmul results are float32 before they are rounded
        ),
        state_bytes=_num_bytes((one_page.block_tables, one_page.sampling)),
        page_bytes=_num_bytes(one_page.caches) // 2,  # the one page and the dummy
        page_size=sizes.page_size,
        max_rows=sizes.max_rows,
        max_model_len=sizes.max_model_len,
        num_pages=config.cache.num_pages,
        memory_bytes=config.cache.memory_bytes,
    )


def _num_bytes(tree: object) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
