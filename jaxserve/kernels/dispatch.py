"""Chooses the body of each op, once, at start.

Owns the registry of bodies, which of them `auto` prefers on each backend, and the default page sizes. Refuses to run
anything, and to fall back later: the body that the log names is the body that runs.

Why at start: a try/except around each call hides which kernel a figure was measured with.
"""

import logging
from collections.abc import Sequence

from jaxserve.errors import ConfigError
from jaxserve.kernels.paged_attention import CACHE_DTYPES, AttentionUse, BodyMaker, Device, PagedAttention
from jaxserve.registry import Registry

logger = logging.getLogger(__name__)

BACKENDS = ("cpu", "gpu", "tpu")
PAGED_ATTENTION: Registry[PagedAttention | BodyMaker] = Registry(
    "paged_attention body",
    "jaxserve.kernels",
    {
        "xla": "jaxserve.kernels.xla_attention:BODY",
        "mosaic_tpu": "jaxserve.kernels.pallas.tpu_body:make_body",
        "mosaic_gpu": "jaxserve.kernels.pallas.gpu_body:make_body",
        "numba_cpu": "jaxserve.kernels.cpu.body:make_body",
    },
)
_REGISTRIES = {"paged_attention": PAGED_ATTENTION}

# What `auto` takes on each backend: the first that does not refuse.
_PREFERRED = {"cpu": ("numba_cpu", "xla"), "gpu": ("mosaic_gpu", "xla"), "tpu": ("mosaic_tpu", "xla")}
_PAGE_SIZES = {"cpu": 64, "gpu": 64, "tpu": 128}


def resolve(
    *,
    device: Device,
    op: str = "paged_attention",
    uses: Sequence[AttentionUse] = (),
    choice: str | PagedAttention = "auto",
) -> PagedAttention:
    """The body that runs `op` on `device`.

    `choice` is 'auto', a name known to the registry, 'package.module:BODY', or the body itself. `uses` are what the
    body will be asked for, checked here.

    Raises ConfigError when the op, the backend or the body is unknown, or the body named cannot run a use.
    """
    if op not in _REGISTRIES:
        raise ConfigError(f"no kernel op is called {op!r}; known: {', '.join(_REGISTRIES)}")
    _check_backend(device.backend)
    for use in uses:
        _check_use(use)
    if isinstance(choice, str) and choice == "auto":
        return _best(op, device, uses)
    body = _body(op, choice, device)
    refusals = _refusals(body, uses)
    if refusals:
        raise ConfigError(f"kernels.{op} names {body.name!r}, which cannot run this model: {'; '.join(refusals)}")
    logger.info("%s on %s: body %r, since kernels.%s names it", op, device.kind, body.name, op)
    return body


def _best(op: str, device: Device, uses: Sequence[AttentionUse]) -> PagedAttention:
    passed_over = []
    for name in _PREFERRED[device.backend]:
        body = _body(op, name, device)
        refusals = _refusals(body, uses)
        if not refusals:
            reason = "; ".join(passed_over) or f"it is the body made for {device.backend}"
            logger.info("%s on %s: body %r, since %s", op, device.kind, name, reason)
            return body
        passed_over.append(f"{name!r} cannot run this model ({'; '.join(refusals)})")
    raise ConfigError(f"no body of {op} runs this model on {device.kind}: {'; '.join(passed_over)}")


def _body(op: str, choice: str | PagedAttention, device: Device) -> PagedAttention:
    found = _REGISTRIES[op].get(choice)
    if isinstance(found, PagedAttention):
        return found
    body = found(device) if callable(found) else found
    if not isinstance(body, PagedAttention):
        raise ConfigError(f"{choice!r} is a {type(found).__name__}, but {op} needs a PagedAttention value or a maker")
    return body


def _refusals(body: PagedAttention, uses: Sequence[AttentionUse]) -> list[str]:
    found = (body.refuses(use) for use in uses)
    return list(dict.fromkeys(reason for reason in found if reason is not None))


def default_page_size(backend: str) -> int:
    """Tokens of a KV page where the config gives none. The CPU's is measured: docs/attention-cpu.md."""
    _check_backend(backend)
    return _PAGE_SIZES[backend]


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ConfigError(f"no kernels for backend {backend!r}; known: {', '.join(BACKENDS)}")


def _check_use(use: AttentionUse) -> None:
    spec = use.spec
    if spec.num_query_heads % spec.num_kv_heads:
        raise ConfigError(
            f"{spec.num_query_heads} query heads do not divide by {spec.num_kv_heads} key/value heads; "
            "check num_attention_heads and num_key_value_heads of the checkpoint"
        )
    if spec.window is not None and spec.window < 1:
        raise ConfigError(f"attention window is {spec.window}, but must be at least 1 token")
    if use.cache_dtype not in CACHE_DTYPES:
        raise ConfigError(f"cache dtype {use.cache_dtype!r} is not one of {', '.join(CACHE_DTYPES)}")
