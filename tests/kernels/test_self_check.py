"""The check at start: quiet when an implementation is right, loud when it is a little wrong."""

import dataclasses

import jax.numpy as jnp
import pytest

from jaxserve.errors import ConfigError
from jaxserve.kernels.ops import PAGED_ATTENTION
from jaxserve.kernels.paged_attention import AttentionSpec, AttentionUse
from jaxserve.kernels.xla_attention import XLA_ATTENTION as XLA
from tests.kernels.tpu_interpreter import IMPLEMENTATION, V5E

USE = AttentionUse(
    spec=AttentionSpec(num_query_heads=4, num_kv_heads=2, head_dim=64, scale=0.125),
    page_size=16,
    query_dtype="bfloat16",
    cache_dtype="bfloat16",
)


@pytest.mark.slow
def test_a_right_implementation_passes_with_the_difference_that_rounding_makes():
    assert 1e-5 < PAGED_ATTENTION.check(IMPLEMENTATION, USE, V5E) < 5e-3
    assert (
        PAGED_ATTENTION.check(XLA, dataclasses.replace(USE, query_dtype="float32", cache_dtype="float32"), V5E) < 1e-6
    )


@pytest.mark.parametrize("spoil", [lambda out: out.at[3].set(0), lambda out: out.at[0, 0, 0].set(jnp.nan)])
def test_a_implementation_that_is_wrong_in_one_token_is_refused(spoil):
    def attend(*args):
        out, cache = XLA.attend(*args)
        return spoil(out), cache

    with pytest.raises(ConfigError, match="'xla' is wrong on TPU v5 lite"):
        PAGED_ATTENTION.check(dataclasses.replace(XLA, attend=attend), USE, V5E)
