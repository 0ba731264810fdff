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

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.kernels import dispatch
from jaxserve.kernels.paged_attention import AttentionUse, Device, PagedAttention
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.layers import attention_spec
from jaxserve.models.loading import LoadedModel
from jaxserve.runtime.buckets import DEFAULTS, make_buckets
from jaxserve.runtime.compile import Job, Progress, compile_all, report_lines, use_compile_cache
from jaxserve.runtime.memory import MemoryPlan, device_memory_bytes, estimate_temporaries, plan_memory
from jaxserve.runtime.pack import Layout
from jaxserve.runtime.row_state import NUM_ROW_FIELDS, init_sampling_state, row_state_size
from jaxserve.runtime.runner import COPY_SLOTS, TABLE_SLOTS, DeviceRunner, Executables
from jaxserve.runtime.step import DeviceState, configure_row, make_copy_pages, make_step, write_tables
from jaxserve.sched.plan import Bucket, Limits

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Everything that follows from config, checkpoint and backend before memory is known."""

    backend: str
    page_size: int
    max_rows: int
    max_model_len: int
    buckets: tuple[Bucket, ...]
    cache_dtype: np.dtype


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
    attention = dispatch.resolve(
        device=describe(device),
        choice=config.kernels.paged_attention,
        uses=attention_uses(model, sizes, loaded.dtype),
    )
    make_state = functools.partial(_make_state, model, attention, sizes)
    memory = _plan_memory(config, sizes, loaded, jax.eval_shape(functools.partial(make_state, 1)))
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
    make_state = functools.partial(make_state, memory.num_pages)
    abstract_state = _with_sharding(jax.eval_shape(make_state), sharding)
    layouts = {
        b: Layout.of(b, max_rows=limits.max_rows, num_params=NUM_ROW_FIELDS, page_size=limits.page_size)
        for b in sizes.buckets
    }
    jobs = _jobs(loaded, layouts, limits, attention, abstract_state, sharding)
    compiled = compile_all(jobs, config.runtime.compile_threads, progress)
    memory.check_temporaries(max(c.temporary_bytes for c in compiled.values()))
    report = tuple(report_lines(compiled))
    runner = DeviceRunner(
        limits=limits,
        layouts=layouts,
        executables=Executables(
            steps={b: compiled[_step_name(b)].call for b in sizes.buckets},
            copy_pages=compiled["copy_pages"].call,
            write_tables=compiled["write_tables"].call,
            configure_row=compiled["configure_row"].call,
        ),
        weights=loaded.state,
        state=jax.jit(make_state, out_shardings=sharding)(),
        vocab_size=model.vocab_size,
        buffer_sharding=sharding,
    )
    return Built(runner=runner, memory=memory, compile_report=report)


def _make_state(model: DecoderConfig, attention: PagedAttention, sizes: Sizes, num_pages: int) -> DeviceState:
    columns = -(-sizes.max_model_len // sizes.page_size)
    return DeviceState(
        caches=tuple(
            attention.init_cache(num_pages, sizes.page_size, model.num_kv_heads, model.head_dim, sizes.cache_dtype)
            for _ in range(model.num_layers)
        ),
        block_tables=jnp.zeros((sizes.max_rows + 1, columns), jnp.int32),
        sampling=init_sampling_state(sizes.max_rows, model.vocab_size),
    )


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


def _step_name(bucket: Bucket) -> str:
    return f"{'decode' if bucket.decode_only else 'mixed'} {bucket.tokens}x{bucket.rows}"


def _jobs(
    loaded: LoadedModel,
    layouts: dict[Bucket, Layout],
    limits: Limits,
    attention: PagedAttention,
    abstract_state: DeviceState,
    sharding: jax.sharding.Sharding,
) -> list[Job]:
    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)

    weights = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding), loaded.state)
    steps = [
        Job(
            name=_step_name(bucket),
            fn=make_step(loaded.graphdef, layout, attention, limits.page_size),
            args=(weights, abstract_state, ints(layout.size)),
            donate=(1,),
        )
        # The largest first: it takes longest, and the pool should not end on it.
        for bucket, layout in sorted(layouts.items(), reverse=True)
    ]
    payload = ints(row_state_size(loaded.config.vocab_size))
    return [
        *steps,
        Job(name="copy_pages", fn=make_copy_pages(attention), args=(abstract_state, ints(COPY_SLOTS, 2)), donate=(0,)),
        Job(name="write_tables", fn=write_tables, args=(abstract_state, ints(TABLE_SLOTS, 3)), donate=(0,)),
        Job(name="configure_row", fn=configure_row, args=(abstract_state, ints(), payload), donate=(0,)),
    ]


def _with_sharding(tree: DeviceState, sharding: jax.sharding.Sharding) -> DeviceState:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)
