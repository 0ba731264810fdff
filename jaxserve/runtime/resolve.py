"""What a config leaves open, decided for a model and a device: sizes, and which body computes attention.

Owns these decisions, which need no weights. Refuses memory (`memory`) and the order of a start (`build`).
"""

import logging

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.config_schema import Config
from jaxserve.errors import ConfigError
from jaxserve.kernels import dispatch
from jaxserve.kernels.cpu import machine_code
from jaxserve.kernels.paged_attention import AttentionUse, Device, PagedAttention
from jaxserve.kernels.self_check import check_body
from jaxserve.kernels.xla_attention import BODY as REFERENCE
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.layers import attention_spec
from jaxserve.runtime.buckets import DEFAULTS, make_buckets
from jaxserve.runtime.executables import Sizes

logger = logging.getLogger(__name__)


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
    if config.sched.burst > 1 and config.parallel.pipeline > 1:
        raise ConfigError(
            f"sched.burst is {config.sched.burst} and parallel.pipeline is {config.parallel.pipeline}, but a burst runs"
            " on one stage: the token of each step starts the next one; set sched.burst to 1, or use parallel.tensor"
        )
    max_mixed_tokens = config.sched.max_mixed_tokens
    if max_mixed_tokens and not config.sched.chunked_prefill:
        raise ConfigError(
            f"sched.max_mixed_tokens is {max_mixed_tokens} and sched.chunked_prefill is false, but a prompt that must "
            "not be cut cannot keep to a limit; leave one of them out"
        )
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
        max_burst=config.sched.burst,
        max_mixed_tokens=max_mixed_tokens or None,
    )


def choose_attention(
    config: Config,
    local_model: DecoderConfig,
    sizes: Sizes,
    dtype: np.dtype,
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
) -> PagedAttention:
    uses = attention_uses(local_model, sizes, dtype)
    described = describe(device)
    attention = dispatch.resolve(device=described, choice=config.kernels.paged_attention, uses=uses)
    for use in uses:
        attention.prepare(use)
    if config.kernels.self_check and attention is not REFERENCE:
        with jax.default_device(device):
            error = max(check_body(attention, use, described) for use in uses)
        logger.info("paged_attention: %r is right to %.1e on this device", attention.name, error)
    return attention


def packing_width(
    config: Config,
    mesh: Mesh,
    dtype: np.dtype,
) -> int | None:
    """Columns of a panel of packed weights; None where XLA multiplies weights as they are. Raises ConfigError."""
    choice, backend = config.kernels.matmul, backend_of(mesh.local_devices[0])
    reason = None
    if backend != "cpu":
        reason = f"it runs on CPUs alone, and this is a {backend}"
    elif mesh.size > 1:
        reason = f"{mesh.size} devices share each weight, and packed ones are never cut; set parallel.tensor to 1"
    elif dtype.name not in machine_code.DTYPES:
        reason = f"weights are {dtype.name}"
    else:
        reason = machine_code.missing()
    if choice == "xla" or (choice == "auto" and reason is not None):
        logger.info("matmul on %s: 'xla', since %s", backend, "kernels.matmul names it" if choice == "xla" else reason)
        return None
    if reason is not None:
        raise ConfigError(f"kernels.matmul names 'numba_cpu', but {reason}")
    machine_code.provide("matmul", dtype.name)
    from jaxserve.kernels.cpu.target import find_target

    width = find_target().width
    logger.info("matmul on cpu: 'numba_cpu', weights packed in panels of %d columns", width)
    return width
