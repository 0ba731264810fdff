"""Chooses the body of each op, once, at start.

Owns the registry of bodies, what `auto` means on each backend, and the CPU's default page size. Refuses to run
anything, and to fall back: a body that was named is the body that runs, or the start fails.

Why at start: a try/except around each call hides which kernel a figure was measured with.
"""

import logging
from collections.abc import Iterable

from jaxserve.errors import ConfigError
from jaxserve.kernels.paged_attention import AttentionSpec, PagedAttention
from jaxserve.registry import Registry

logger = logging.getLogger(__name__)

BACKENDS = ("cpu", "gpu", "tpu")
PAGED_ATTENTION: Registry[PagedAttention] = Registry(
    "paged_attention body", "jaxserve.kernels", {"xla": "jaxserve.kernels.xla_attention:BODY"}
)
_REGISTRIES = {"paged_attention": PAGED_ATTENTION}

# Best body of each backend with the reason that the log gives.
_AUTO = {
    "paged_attention": {
        "cpu": ("xla", "it is the body tuned for CPUs"),
        "gpu": ("xla", "no body written for GPUs is built in; expect reference speed"),
        "tpu": ("xla", "no body written for TPUs is built in; expect reference speed"),
    }
}
_PAGE_SIZES = {"cpu": 64, "gpu": 64, "tpu": 128}


def resolve(
    *,
    op: str = "paged_attention",
    backend: str,
    cases: Iterable[AttentionSpec] = (),
    choice: str | PagedAttention = "auto",
) -> PagedAttention:
    """The body that runs `op` on `backend` ('cpu', 'gpu', 'tpu').

    `choice` is 'auto', a name known to the registry, 'package.module:BODY', or the body itself. `cases` are
    what the body will be asked for, checked here.

    Raises ConfigError when the op, the backend or the body is unknown, or the body cannot run a case.
    """
    if op not in _REGISTRIES:
        raise ConfigError(f"no kernel op is called {op!r}; known: {', '.join(_REGISTRIES)}")
    _check_backend(backend)
    reason = "kernels.paged_attention names it"
    if isinstance(choice, str) and choice == "auto":
        choice, reason = _AUTO[op][backend]
    body = _REGISTRIES[op].get(choice)
    if not isinstance(body, PagedAttention):
        raise ConfigError(f"{choice!r} is a {type(body).__name__}, but {op} needs a PagedAttention value")
    for case in cases:
        _check_case(case)
    logger.info("%s on %s: body %r, since %s", op, backend, body.name, reason)
    return body


def default_page_size(backend: str) -> int:
    """Tokens of a KV page where the config gives none. The CPU's is measured: docs/attention-cpu.md."""
    _check_backend(backend)
    return _PAGE_SIZES[backend]


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ConfigError(f"no kernels for backend {backend!r}; known: {', '.join(BACKENDS)}")


def _check_case(case: AttentionSpec) -> None:
    if case.num_query_heads % case.num_kv_heads:
        raise ConfigError(
            f"{case.num_query_heads} query heads do not divide by {case.num_kv_heads} key/value heads; "
            "check num_attention_heads and num_key_value_heads of the checkpoint"
        )
    if case.window is not None and case.window < 1:
        raise ConfigError(f"attention window is {case.window}, but must be at least 1 token")
