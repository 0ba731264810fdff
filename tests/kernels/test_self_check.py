"""The check at start: quiet when a body is right, loud when it is a little wrong."""

import dataclasses

import jax.numpy as jnp
import pytest

from jaxserve.errors import ConfigError
from jaxserve.kernels.paged_attention import AttentionSpec, AttentionUse
from jaxserve.kernels.self_check import check_body
from tests.kernels.tpu_interpreter import BODY, V5E

USE = AttentionUse(
    spec=AttentionSpec(num_query_heads=4, num_kv_heads=2, head_dim=64, scale=0.125),
    page_size=16,
    query_dtype="bfloat16",
    cache_dtype="bfloat16",
)


def test_a_right_body_passes_with_the_difference_that_rounding_makes():
    assert 1e-5 < check_body(BODY, USE, V5E) < 5e-3
    assert check_body(BODY, dataclasses.replace(USE, query_dtype="float32", cache_dtype="float32"), V5E) < 1e-6


@pytest.mark.parametrize("spoil", [lambda out: out.at[3].set(0), lambda out: out.at[0, 0, 0].set(jnp.nan)])
def test_a_body_that_is_wrong_in_one_token_is_refused(spoil):
    def attend(*args):
        out, cache = BODY.attend(*args)
        return spoil(out), cache

    with pytest.raises(ConfigError, match="'mosaic_tpu' is wrong on TPU v5 lite"):
        check_body(dataclasses.replace(BODY, attend=attend), USE, V5E)
