"""Does the chosen body work on this very device? One small batch, at start, against float64.

Owns that batch and the verdict. Refuses to choose another body: a kernel that is wrong here is a fact to be told.

Why at every start: a kernel is proven for a device, a driver and a version of the compiler, and all three change
under a server. Wrong attention is not a crash; it is fluent nonsense.
"""

import jax
import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.kernels.cases import Case, make_inputs
from jaxserve.kernels.oracle import relative_error
from jaxserve.kernels.paged_attention import AttentionUse, Device, PagedAttention

_LIMIT = {"bfloat16": 1e-2, "float32": 1e-4}  # queries and weights are rounded, by each body in its own way


def check_body(body: PagedAttention, use: AttentionUse, device: Device) -> float:
    """The relative error of `body` over decode rows, whole prompts and a later piece.

    Raises ConfigError where it is more than rounding explains.
    """
    page = use.page_size
    rows = ((1, 1), (1, page), (1, 2 * page + 3), (5, 5), (33, page + 40))
    case = Case(
        name="self check",
        spec=use.spec,
        rows=rows,
        page_size=page,
        query_dtype=use.query_dtype,
        cache_dtype=use.cache_dtype,
        padding_rows=1,
        padding_tokens=-sum(n for n, _ in rows) % 32,
    )
    inputs = make_inputs(case, body)
    attend = jax.jit(body.attend, static_argnums=5, donate_argnums=3)
    out, _ = attend(inputs.q, inputs.k, inputs.v, inputs.cache, inputs.batch, case.spec, None, None, inputs.scales)
    error = relative_error(case, inputs, np.asarray(out))
    limit = _LIMIT[use.query_dtype]
    if error > limit:
        raise ConfigError(
            f"the paged attention body {body.name!r} is wrong on {device.kind}: it is off by {error:.2g} of the right "
            f"result, where rounding explains {limit:.2g}; set kernels.paged_attention: xla, which is slower and "
            "right, and report this with the versions of jax and the driver"
        )
    return error
