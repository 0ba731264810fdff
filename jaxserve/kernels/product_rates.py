"""Whether the CPU's own products of bfloat16 are the right choice on a machine: by rates that a start measures.

With float32 weights and with codes they are taken as faster than XLA's for every number of rows. With bfloat16 it
depends on the instructions that each of them uses on a processor (`vdpbf16ps`, tiles, or none), so a start measures.

The choice is one for the whole model. XLA adds up in an order that depends on the number of rows, so that a choice for
each bucket would give a request other bits in another crowd.
"""

import logging
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels.cpu import machine_code
from jaxserve.kernels.matmul import Matmul, MatmulUse
from jaxserve.kernels.xla_matmul import XLA_MATMUL, DenseWeight

logger = logging.getLogger(__name__)

ROWS = (1, 512)  # of a stream that decodes, and of a prompt
_SHAPE = (2048, 768)
_ROUNDS = 9
_MARGIN = 1.5  # a busy machine must not change the choice from one start to the next


def slower_products(matmul: Matmul, use: MatmulUse) -> str | None:
    """Why XLA's products should be taken instead of `matmul`'s, with the times; None where they should not.

    Where each of them is faster for some rows, the one is taken that loses less where it loses most; XLA's, only if
    that is clear.
    """
    if matmul.name == XLA_MATMUL.name or use.dtype != "bfloat16" or use.storage is not None:
        return None
    if machine_code.missing() is not None:
        return None
    if jax.process_count() > 1:
        logger.info("matmul: rates are not measured, since all %d processes must choose alike", jax.process_count())
        return None
    own, other = (measure_products(one, use.dtype) for one in (matmul, XLA_MATMUL))
    times = ", ".join(
        f"{a * 1e3:.3g} ms for its {b * 1e3:.3g} ms at {n} rows" for a, b, n in zip(own, other, ROWS, strict=True)
    )
    loss = max(a / b for a, b in zip(own, other, strict=True))
    if loss <= _MARGIN * max(b / a for a, b in zip(own, other, strict=True)):
        logger.info("matmul: %r is kept beside xla's products, as measured now: %s", matmul.name, times)
        return None
    return f"xla's products lose less on this processor, as measured now: {matmul.name!r} took {times}"


def measure_products(matmul: Matmul, dtype: str) -> list[float]:
    """Seconds of a product of each of `ROWS`, the best of some."""
    rng = np.random.default_rng(0)
    weight = matmul.convert(DenseWeight(array=jnp.asarray(rng.standard_normal(_SHAPE, np.float32), dtype), num_in=1))
    multiply = jax.jit(lambda weight, x: weight.multiply(x))
    best = []
    for rows in ROWS:
        x = jnp.asarray(rng.standard_normal((rows, _SHAPE[1]), np.float32), dtype)
        multiply(weight, x).block_until_ready()
        seconds = []
        for _ in range(_ROUNDS):
            begin_s = time.perf_counter()
            multiply(weight, x).block_until_ready()
            seconds.append(time.perf_counter() - begin_s)
        best.append(min(seconds))
    return best
