"""GPTQ, AWQ and rounding to nearest against loops in float64 that share no code with them."""

import ml_dtypes
import numpy as np
import pytest

from jaxserve.kernels.storage import Storage
from jaxserve.quantise import awq, gptq
from jaxserve.quantise.rounding import Rounded, output_error, to_nearest

MOST = {"int4": (-8, 7, 7.5), "int8": (-128, 127, 127.0)}


def correlated(rng: np.random.Generator, tokens: int, depth: int) -> np.ndarray:
    """Inputs [T, K] that go together, some of them larger than others: what GPTQ and AWQ are for."""
    mixed = rng.normal(size=(tokens, depth)) @ (rng.normal(size=(depth, depth)) / np.sqrt(depth) + 0.5 * np.eye(depth))
    return mixed * np.exp(rng.normal(size=depth))


def nearest(x: np.ndarray, scale: np.ndarray, code: str) -> np.ndarray:
    if code == "float8_e4m3fn":
        return np.clip(x / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    low, high, _ = MOST[code]
    return np.clip(np.rint(x / scale), low, high)


def scale_of(part: np.ndarray, code: str, dtype: str) -> np.ndarray:
    reach = 448.0 if code == "float8_e4m3fn" else MOST[code][2]
    return (np.abs(part).max(axis=1) / reach).astype(np.dtype(dtype)).astype(np.float64)


def naive_gptq(
    matrix: np.ndarray, gram: np.ndarray, storage: Storage, dtype: str, damping: float
) -> tuple[np.ndarray, np.ndarray]:
    """Column by column with the inverse of what is left, as the derivation has it: no blocks, no factor. Codes, and
    the numbers that they mean."""
    weights, hessian = matrix.astype(np.float64), gram.astype(np.float64)
    depth = len(hessian)
    hessian += damping * np.mean(np.diag(hessian)) * np.eye(depth)
    inverse = np.linalg.inv(hessian)
    codes, numbers = np.zeros_like(weights), np.zeros_like(weights)
    scale = scale_of(weights, storage.code, dtype)
    for column in range(depth):
        if storage.group and column % storage.group == 0:
            scale = scale_of(weights[:, column : column + storage.group], storage.code, dtype)
        codes[:, column] = nearest(weights[:, column], scale, storage.code)
        numbers[:, column] = codes[:, column] * scale
        error = (weights[:, column] - numbers[:, column]) / inverse[column, column]
        weights -= np.outer(error, inverse[column])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return codes, numbers


@pytest.mark.parametrize(
    ("storage", "dtype", "depth"),
    [
        (Storage(code="int4", group=32), "bfloat16", 96),
        (Storage(code="int4", group=64), "float16", 128),
        (Storage(code="int4"), "float32", 160),  # a scale for each row: blocks of 128, the last of them padded
        (Storage(code="int8"), "bfloat16", 96),
        (Storage(code="float8_e4m3fn"), "float32", 96),
    ],
)
def test_gptq_is_the_naive_one(storage: Storage, dtype: str, depth: int) -> None:
    rng = np.random.default_rng(0)
    inputs, matrix = correlated(rng, 4 * depth, depth), (rng.normal(size=(48, depth)) * 0.05).astype(np.float32)
    gram = inputs.T @ inputs
    codes, numbers = naive_gptq(matrix, gram, storage, dtype, 0.01)
    found = gptq.solve(matrix, gram.astype(np.float32), storage, dtype, damping=0.01)
    # A number half way between two codes may go either way in float32, and takes the columns behind it along.
    assert (found.codes.astype(np.float64) == codes).mean() > 0.98
    by_oracle, ours = (output_error(matrix, w.astype(np.float32), gram) for w in (numbers, found.numbers()))
    assert ours == pytest.approx(by_oracle, rel=0.01)
    by_nearest = output_error(matrix, to_nearest(matrix, storage, dtype).numbers(), gram)
    assert ours < 0.8 * by_nearest


def test_gptq_without_correlation_is_rounding_to_nearest() -> None:
    rng = np.random.default_rng(1)
    matrix, storage = rng.normal(size=(16, 64)).astype(np.float32), Storage(code="int4", group=32)
    found = gptq.solve(matrix, np.diag(rng.uniform(1, 2, 64)).astype(np.float32), storage, "bfloat16")
    expected = to_nearest(matrix, storage, "bfloat16")
    np.testing.assert_array_equal(found.codes, expected.codes)
    np.testing.assert_array_equal(found.scales, expected.scales)


def test_gptq_takes_inputs_that_are_always_0() -> None:
    """A quarter of the inputs never occurs, and there are fewer tokens than inputs."""
    rng = np.random.default_rng(2)
    inputs = correlated(rng, 20, 64)
    inputs[:, ::4] = 0
    matrix = rng.normal(size=(8, 64)).astype(np.float32)
    storage = Storage(code="int4", group=32)
    gram = (inputs.T @ inputs).astype(np.float32)
    found = gptq.solve(matrix, gram, storage, "float32")
    assert np.isfinite(found.scales).all()
    by_nearest = output_error(matrix, to_nearest(matrix, storage, "float32").numbers(), gram)
    assert output_error(matrix, found.numbers(), gram) < by_nearest


def test_all_inputs_0() -> None:
    matrix, storage = np.ones((4, 32), np.float32), Storage(code="int4", group=32)
    found = gptq.solve(matrix, np.zeros((32, 32), np.float32), storage, "bfloat16")
    np.testing.assert_array_equal(found.codes, to_nearest(matrix, storage, "bfloat16").codes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("code", ["int4", "int8", "float8_e4m3fn"])
def test_nearest(code: str, dtype: str) -> None:
    rng = np.random.default_rng(3)
    matrix = (rng.normal(size=(6, 64)) * 10.0 ** rng.integers(-3, 3, (6, 1))).astype(np.float32)
    matrix[2] = 0
    storage = Storage(code=code, group=32 if code == "int4" else None)
    found = to_nearest(matrix, storage, dtype)
    size = storage.group or 64
    for row in range(6):
        for group in range(64 // size):
            part = matrix[row : row + 1, group * size : (group + 1) * size].astype(np.float64)
            # The division is one of float32, before the dtype of the file rounds its result.
            reach = np.float32(448.0 if code == "float8_e4m3fn" else MOST[code][2])
            scale = (np.abs(part).max().astype(np.float32) / reach).astype(np.dtype(dtype)).astype(np.float32)
            scale = scale if scale > 0 else np.float32(1)
            assert found.scales[row, group] == scale
            steps = (part.astype(np.float32) / scale).astype(np.float64)
            codes = found.codes[row, group * size : (group + 1) * size].astype(np.float64)
            np.testing.assert_array_equal(codes, nearest(steps, np.float64(1), code)[0])


def test_a_scale_too_small_for_its_dtype_is_of_zeros() -> None:
    """float16 ends at 6e-8: the numbers are nothing beside what a file can say."""
    found = to_nearest(np.full((2, 32), 1e-8, np.float32), Storage(code="int4", group=32), "float16")
    np.testing.assert_array_equal(found.codes, 0)
    np.testing.assert_array_equal(found.scales, 1)


def naive_awq_loss(matrix: np.ndarray, inputs: np.ndarray, scales: np.ndarray, group: int) -> float:
    """Of the products themselves, token by token in float64."""
    wide = matrix.astype(np.float64) * scales
    rounded = np.zeros_like(wide)
    for start in range(0, wide.shape[1], group):
        part = wide[:, start : start + group]
        step = np.abs(part).max(axis=1, keepdims=True) / 7.5
        rounded[:, start : start + group] = np.clip(np.rint(part / step), -8, 7) * step
    return float(np.square((inputs / scales) @ rounded.T - inputs @ matrix.T.astype(np.float64)).sum())


def test_awq_finds_the_best_ratio() -> None:
    rng = np.random.default_rng(4)
    inputs = correlated(rng, 256, 64)
    inputs[:, :4] *= 20
    matrices = [rng.normal(size=(rows, 64)).astype(np.float32) for rows in (32, 8)]
    magnitude = np.abs(inputs).mean(axis=0).astype(np.float32)
    gram = (inputs.T @ inputs).astype(np.float32)
    storage = Storage(code="int4", group=32)
    found = awq.search_scales([(matrix, storage) for matrix in matrices], gram, magnitude)
    losses = []
    for ratio in np.linspace(0, 1, 21):
        raw = (magnitude / magnitude.max()) ** ratio
        scales = raw / np.sqrt(raw.max() * raw.min())
        losses.append((sum(naive_awq_loss(m, inputs, scales, 32) for m in matrices), scales))
    best, expected = min(losses, key=lambda pair: pair[0])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert best < 0.8 * losses[0][0]


def test_rounded_numbers() -> None:
    rounded = Rounded(codes=np.array([[1, -2, 3, 4]], np.int8), scales=np.array([[0.5, 2.0]], np.float32))
    np.testing.assert_array_equal(rounded.numbers(), [[0.5, -1, 6, 8]])
