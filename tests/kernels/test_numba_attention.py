"""What only machine code can get wrong: sizes of groups and blocks, the exponential, rows that hold no numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numba import njit

from jaxserve.kernels.cases import REAL, Case, make_inputs, small
from jaxserve.kernels.cpu.attention import exp
from jaxserve.kernels.oracle import TOLERANCE, relative_error
from jaxserve.kernels.paged_attention import AttentionBatch, AttentionSpec, KVScales
from tests.kernels.cpu_implementations import NUMBA, check, run, runs

# --- the exponential ------------------------------------------------------------------------------------------------


@njit
def exp_all(x, out):
    for i in range(len(x)):
        out[i] = exp(x[i])


def exp_of(x) -> np.ndarray:
    x = np.asarray(x, np.float32)
    out = np.full_like(x, np.nan)
    exp_all(x, out)
    return out


def test_exp_is_right_to_the_last_two_places():
    edges = np.nextafter(np.float32(-87), np.float32([0, -100]))
    x = np.concatenate([np.linspace(-100, 0, 200_001, dtype=np.float32), edges, np.float32([-87.0, -0.0, -1e-30])])
    found, exact = exp_of(x).astype(np.float64), np.exp(x.astype(np.float64))
    above = x >= -87
    assert above.sum() > 170_000 and (~above).sum() > 25_000
    assert (np.abs(found[above] / exact[above] - 1) <= 3e-7).all()
    assert (found[~above] == 0).all()


def test_exp_of_what_is_no_number():
    assert np.isnan(exp_of([np.nan])).all()
    np.testing.assert_array_equal(exp_of([0.0, -np.inf, -1e30, -3e38]), [1, 0, 0, 0])


# --- sizes ----------------------------------------------------------------------------------------------------------

ROWS = ((1, 1), (1, 33), (1, 96), (2, 2), (3, 40), (37, 37), (40, 100))


def _sized(heads: int, kv_heads: int, head_dim: int, page_size: int, window: int | None = None) -> Case:
    return Case(
        name=f"{heads}/{kv_heads}/{head_dim}/{page_size}/{window}",
        spec=AttentionSpec(
            num_query_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5, window=window
        ),
        rows=ROWS,
        page_size=page_size,
        padding_rows=1,
        padding_tokens=4,
    )


SIZES = [
    _sized(1, 1, 16, 16),
    _sized(3, 1, 48, 16),  # a tile has an odd number of queries; a head is narrower than a wide block
    _sized(5, 5, 80, 48),  # a wide block and a narrow one
    _sized(14, 2, 96, 112),
    _sized(80, 1, 32, 16),  # one token of a group is more than a tile is meant to hold
    _sized(65, 1, 16, 32, window=3),
    _sized(4, 2, 144, 64, window=1),
]


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in SIZES if NUMBA.refuses(c.use) is None])
def test_groups_heads_and_pages_of_any_size(case):
    inputs = make_inputs(case, NUMBA, poison=True)
    check(case, inputs, run(NUMBA, inputs, case.spec))


FULL_SIZE = (
    "phi3-mini/busy/64/bfloat16",
    "gpt-oss/ragged/64/bfloat16",
    "llama3-70b-tp8/ragged/64/bfloat16",
    "gemma2-9b/busy/64/bfloat16",
    "mpt-7b-alibi/ragged/128",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [pytest.param(small(REAL[name]), id=name) for name in FULL_SIZE if NUMBA.refuses(REAL[name].use) is None],
)
def test_models_of_full_size(case):
    inputs = make_inputs(case, NUMBA, poison=True)
    assert relative_error(case, inputs, run(NUMBA, inputs, case.spec)) < TOLERANCE[case.query_dtype]


# --- numbers that are none, and large ones --------------------------------------------------------------------------

WIDE = _sized(4, 2, 32, 16)
numba_runs = pytest.mark.skipif(not runs(NUMBA, WIDE.spec, WIDE.page_size), reason="no vectors this narrow here")


@numba_runs
def test_what_is_no_number_stays_in_its_row():
    inputs = make_inputs(WIDE, NUMBA)
    clean = run(NUMBA, inputs, WIDE.spec)
    first = 1  # the row of one token and context 33
    spoilt = dataclasses.replace(inputs, q=inputs.q.at[first, 0, 5].set(jnp.nan).at[first, 3, 1].set(jnp.inf))
    out = run(NUMBA, spoilt, WIDE.spec)
    assert np.isnan(out[first, 0]).all() and not np.isfinite(out[first, 3]).any()
    np.testing.assert_array_equal(out[first, 1:3], clean[first, 1:3])
    np.testing.assert_array_equal(np.delete(out, first, 0), np.delete(clean, first, 0))


@numba_runs
def test_large_scores():
    """The largest score of a row grows from page to page, and weights of earlier pages vanish."""
    inputs = make_inputs(WIDE, NUMBA)
    inputs = dataclasses.replace(inputs, q=inputs.q * 60)
    out, token = run(NUMBA, inputs, WIDE.spec), 0
    for row, (q_len, context) in enumerate(ROWS):
        scores = np.einsum(
            "qkgh,skh->kgqs",
            np.asarray(inputs.q[token : token + q_len], np.float64).reshape(q_len, 2, 2, 32),
            np.asarray(inputs.keys[row], np.float64),
        )
        scores *= WIDE.spec.scale
        hidden = np.arange(context) > np.arange(context - q_len, context)[:, None]
        scores = np.where(hidden, -np.inf, scores)
        assert context == 1 or scores.max() > 60
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        want = np.einsum("kgqs,skh->qkgh", weights, np.asarray(inputs.values[row], np.float64)).reshape(q_len, 4, 32)
        np.testing.assert_allclose(out[token : token + q_len], want, rtol=1e-3, atol=1e-4)
        token += q_len


@numba_runs
def test_a_row_has_the_same_bits_in_a_mixed_step_and_alone_in_a_decode_step():
    inputs = make_inputs(WIDE, NUMBA)
    crowd = run(NUMBA, inputs, WIDE.spec)
    for row in (0, 1, 2):  # each of one token, which is also token number `row`
        alone = AttentionBatch(
            positions=inputs.batch.positions[row : row + 1],
            token_rows=jnp.zeros(1, jnp.int32),
            q_starts=jnp.arange(2, dtype=jnp.int32),
            context_lens=inputs.batch.context_lens[row : row + 1],
            block_tables=inputs.batch.block_tables[row : row + 1],
            page_size=WIDE.page_size,
            decode_only=True,
        )
        q, k, v = (x[row : row + 1] for x in (inputs.q, inputs.k, inputs.v))
        out = run(NUMBA, dataclasses.replace(inputs, q=q, k=k, v=v, batch=alone), WIDE.spec)
        np.testing.assert_array_equal(out[0], crowd[row])


@numba_runs
def test_a_step_without_any_row():
    """What a bucket of padding alone gives: zeros, and a cache whose pages are untouched."""
    inputs = make_inputs(WIDE, NUMBA)
    batch = dataclasses.replace(
        inputs.batch,
        **{
            name: jnp.zeros_like(getattr(inputs.batch, name))
            for name in ("positions", "q_starts", "context_lens", "block_tables")
        },
        token_rows=jnp.full_like(inputs.batch.token_rows, len(inputs.batch.context_lens)),
    )
    i = inputs
    out, cache = jax.jit(NUMBA.attend, static_argnums=5)(i.q, i.k, i.v, i.cache, batch, WIDE.spec)
    assert (np.asarray(out) == 0).all()
    for leaf, before in zip(jax.tree.leaves(cache), jax.tree.leaves(i.cache), strict=True):
        np.testing.assert_array_equal(leaf[1:], before[1:])


# --- numbers of eight bits -------------------------------------------------------------------------------------------


@numba_runs
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_every_code_is_widened_exactly(dtype):
    """A row of one token gives its value back: the weight of the only key is 1."""
    codes = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)).astype(np.float32)
    case = dataclasses.replace(_sized(2, 2, 128, 16), rows=((1, 1),), cache_dtype=dtype, padding_rows=0)
    inputs = make_inputs(case, NUMBA)
    scales = KVScales(keys=jnp.ones(2), values=jnp.asarray([1.0, 0.25]))
    v = jnp.asarray(codes.reshape(1, 2, 128)) * scales.values[:, None]
    out = run(NUMBA, dataclasses.replace(inputs, v=v, scales=scales), case.spec)
    is_kept = codes > -128 if dtype == "int8" else np.isfinite(codes)
    np.testing.assert_array_equal(out.reshape(-1)[is_kept], np.asarray(v).reshape(-1)[is_kept])
    if dtype != "int8":
        np.testing.assert_array_equal(np.isnan(out.reshape(-1)), np.isnan(codes))
