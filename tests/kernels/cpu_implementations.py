"""What the tests of all implementations that run on a CPU share: the cases that each runs, and the oracle's verdict."""

import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import xla_attention, xla_batched
from jaxserve.kernels.cases import Case, Inputs
from jaxserve.kernels.cpu.implementation import CpuPages, make_attention
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.oracle import attend_row
from jaxserve.kernels.paged_attention import AttentionSpec, AttentionUse, LayerCache, PagedAttention
from jaxserve.kernels.xla_batched import KVPages
from jaxserve.kernels.xla_softmax import PageArrays

CPU = Device(backend="cpu", kind="cpu")
NUMBA = make_attention(CPU)
XLA_BATCHED = xla_batched.make_attention(CPU)
IMPLEMENTATIONS = (xla_attention.XLA_ATTENTION, XLA_BATCHED, NUMBA)


def cache_of(implementation: PagedAttention, keys: np.ndarray, values: np.ndarray) -> LayerCache:
    """The cache that holds these numbers, [pages, K, page, H] in float32, in the documented layout."""
    keys, values = (jnp.asarray(x, jnp.float32) for x in (keys, values))
    if implementation is XLA_BATCHED:
        return KVPages(keys=keys, values=values)
    if implementation is NUMBA:
        return CpuPages(keys=keys.swapaxes(2, 3), values=values, dtype="float32")
    return PageArrays(keys=keys.swapaxes(2, 3), values=values)


def runs(implementation: PagedAttention, spec: AttentionSpec, page_size: int) -> bool:
    """Whether the implementation takes layers and pages of these sizes, in float32."""
    use = AttentionUse(spec=spec, page_size=page_size, query_dtype="float32", cache_dtype="float32")
    return implementation.refuses(use) is None


def _batched(implementation: PagedAttention, case: Case) -> bool:
    del case
    return implementation is XLA_BATCHED


def pairs(cases: Iterable[Case], slow: Callable[[PagedAttention, Case], bool] = _batched) -> list:
    """Parameters (implementation, case): what an implementation refuses, as this processor's may, is left out.

    Those that are `slow` run with `-m slow` alone: by default the one that is not made for CPUs.
    """
    return [
        pytest.param(
            implementation,
            case,
            id=f"{implementation.name}-{case.name}",
            marks=pytest.mark.slow if slow(implementation, case) else (),
        )
        for case in cases
        for implementation in IMPLEMENTATIONS
        if implementation.refuses(case.use) is None
    ]


@functools.cache
def _attend(implementation: PagedAttention, quickly: bool) -> Callable:
    options = {"xla_backend_optimization_level": 0} if quickly else None
    return jax.jit(implementation.attend, static_argnums=5, compiler_options=options)


def run_with_cache(implementation: PagedAttention, inputs: Inputs, spec: AttentionSpec, quickly: bool = False):
    """`quickly`: compiled without most of LLVM's work, for what is compared with a tolerance."""
    i = inputs
    return _attend(implementation, quickly)(i.q, i.k, i.v, i.cache, i.batch, spec, i.sinks, i.alibi_slopes, i.scales)


def run(implementation: PagedAttention, inputs: Inputs, spec: AttentionSpec, quickly: bool = False) -> np.ndarray:
    return np.asarray(run_with_cache(implementation, inputs, spec, quickly)[0])


def check(case: Case, inputs: Inputs, out: np.ndarray) -> None:
    """Each row against the oracle on its whole sequence; padding must be finite."""
    assert np.isfinite(out).all()
    token = 0
    for row, (q_len, context) in enumerate(case.rows):
        q = inputs.q[token : token + q_len]
        want = attend_row(q, inputs.keys[row], inputs.values[row], case.spec, inputs.sinks, inputs.alibi_slopes)
        np.testing.assert_allclose(
            out[token : token + q_len], want, rtol=1e-5, atol=1e-5, err_msg=f"{case.name} row {row} of {context}"
        )
        token += q_len
