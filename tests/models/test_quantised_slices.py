"""Every format in the normal form: any slice of codes, scales and zeros is bit for bit that of a loop over elements."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import quantised_oracle as oracle
from safetensors.numpy import save_file

from jaxserve.models.quantised.awq import Awq
from jaxserve.models.quantised.float_quantized import FloatQuantized
from jaxserve.models.quantised.fp8 import Fp8
from jaxserve.models.quantised.gptq import Gptq
from jaxserve.models.quantised.int_quantized import IntQuantized
from jaxserve.models.quantised.mxfp4 import Mxfp4
from jaxserve.models.quantised.mxfp4_packed import Mxfp4Packed
from jaxserve.models.quantised.nvfp4_packed import Nvfp4Packed
from jaxserve.models.quantised.pack_quantized import PackQuantized
from jaxserve.models.quantised.scheme import Format
from jaxserve.models.quantised.slices import QuantisedTensor
from jaxserve.models.safetensors_files import open_tensors

SHAPE = (48, 96)
RAGGED = (40, 160)  # with groups of 64, and blocks of 128


def gptq_format(**changes: Any) -> Gptq:
    fields: dict[str, Any] = {"bits": 4, "group": 32, "sym": False, "desc_act": False, "stored_less": 1}
    return Gptq(**(fields | changes))


def pack_format(bits: int = 4, group: int | None = 32, symmetric: bool = True, by_activation: bool = False):
    return PackQuantized(bits=bits, grid=(1, group), symmetric=symmetric, by_activation=by_activation)


def shuffled(rng: np.random.Generator, num_in: int, group: int) -> np.ndarray:
    return rng.permutation(np.arange(num_in) // group)


Make = Callable[[np.random.Generator], tuple[Format, oracle.Stored]]
CASES: dict[str, Make] = {
    "gptq": lambda r: (gptq_format(), oracle.gptq(r, SHAPE)),
    "gptq_v2": lambda r: (gptq_format(stored_less=0), oracle.gptq(r, SHAPE, less=0)),
    "gptq 8 bits": lambda r: (gptq_format(bits=8), oracle.gptq(r, SHAPE, bits=8)),
    "gptq one group": lambda r: (gptq_format(group=None), oracle.gptq(r, SHAPE, group=-1)),
    "gptq ragged, no g_idx": lambda r: (gptq_format(group=64), oracle.gptq(r, RAGGED, group=64, with_g_idx=False)),
    "gptq desc_act": lambda r: (
        gptq_format(desc_act=True),
        oracle.gptq(r, SHAPE, g_idx=shuffled(r, 96, 32)),
    ),
    "gptq sym": lambda r: (gptq_format(sym=True), oracle.gptq(r, SHAPE, sym_word=0x77777777)),
    "gptq_v2 labelled gptq": lambda r: (
        gptq_format(sym=True),
        oracle.gptq(r, SHAPE, sym_word=0x88888888, less=0),
    ),
    "gptq stored zero 15": lambda r: (gptq_format(), oracle.gptq(r, SHAPE, sym_word=0xFFFFFFFF)),
    "awq": lambda r: (Awq(group=32), oracle.awq(r, SHAPE)),
    "awq one group": lambda r: (Awq(group=None), oracle.awq(r, SHAPE, group=-1)),
    "awq ragged": lambda r: (Awq(group=64), oracle.awq(r, RAGGED, group=64)),
    "pack": lambda r: (pack_format(), oracle.pack_quantized(r, SHAPE)),
    "pack 8 bits, zeros": lambda r: (
        pack_format(8, 32, symmetric=False),
        oracle.pack_quantized(r, SHAPE, bits=8, asymmetric=True),
    ),
    "pack zeros, ends inside words": lambda r: (
        pack_format(4, 16, symmetric=False),
        oracle.pack_quantized(r, (45, 92), group=16, asymmetric=True),
    ),
    "pack channel": lambda r: (pack_format(4, None), oracle.pack_quantized(r, SHAPE, group=None)),
    "pack tensor": lambda r: (
        PackQuantized(bits=4, grid=(None, None), symmetric=True, by_activation=False),
        oracle.pack_quantized(r, SHAPE, group=None, one_scale=True),
    ),
    "pack actorder": lambda r: (
        pack_format(symmetric=False, by_activation=True),
        oracle.pack_quantized(r, SHAPE, asymmetric=True, g_idx=shuffled(r, 96, 32)),
    ),
    "int": lambda r: (IntQuantized(grid=(1, None), symmetric=True), oracle.int_quantized(r, SHAPE)),
    "int zeros": lambda r: (
        IntQuantized(grid=(1, None), symmetric=False),
        oracle.int_quantized(r, SHAPE, asymmetric=True),
    ),
    "int scalar": lambda r: (
        IntQuantized(grid=(None, None), symmetric=True),
        oracle.int_quantized(r, SHAPE, scale_shape=()),
    ),
    "float channel": lambda r: (FloatQuantized(grid=(1, None)), oracle.float8(r, SHAPE)),
    "float one scale": lambda r: (FloatQuantized(grid=(None, None)), oracle.float8(r, SHAPE, scale_shape=(1,))),
    "float blocks": lambda r: (FloatQuantized(grid=(32, 64)), oracle.float8(r, RAGGED, grid=(32, 64))),
    "fp8 scalar": lambda r: (Fp8(block=None), oracle.float8(r, SHAPE, scale_shape=())),
    "fp8 ragged blocks": lambda r: (
        Fp8(block=(128, 128)),
        oracle.float8(r, (192, 160), suffix="weight_scale_inv", grid=(128, 128), dtype=ml_dtypes.bfloat16),
    ),
    "mxfp4": lambda r: (Mxfp4Packed(), oracle.mxfp4_packed(r, SHAPE, extremes=True)),
    "nvfp4": lambda r: (Nvfp4Packed(), oracle.nvfp4_packed(r, SHAPE)),
}


def opened(found: Format, tensors: dict[str, np.ndarray], directory: Path, name: str = "X.weight") -> QuantisedTensor:
    save_file(tensors, directory / "model.safetensors")
    return found.open(name, open_tensors(directory))


def some_index(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[slice, ...]:
    starts = [int(rng.integers(0, size)) for size in shape]
    return tuple(slice(i, int(rng.integers(i + 1, size + 1))) for i, size in zip(starts, shape, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_any_slice_is_the_oracles(case: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(sum(map(ord, case)))
    found, stored = CASES[case](rng)
    tensor = opened(found, stored.named("X"), tmp_path)
    assert tensor.shape == stored.codes.shape
    whole = tuple(slice(0, size) for size in tensor.shape)
    for index in [whole, *(some_index(rng, tensor.shape) for _ in range(25))]:
        part = tensor.read(index)
        np.testing.assert_array_equal(part.codes.astype(np.float32), stored.codes[index])
        np.testing.assert_array_equal(part.scales[:, part.group_of], stored.scales[index])
        zeros = np.zeros_like(part.scales) if part.zeros is None else part.zeros
        np.testing.assert_array_equal(zeros[:, part.group_of], stored.zeros[index])
        for dtype in (np.float32, ml_dtypes.bfloat16):
            np.testing.assert_array_equal(part.dequantise(dtype), stored.weights[index].astype(dtype))
        assert part.scales.dtype == np.float32 and part.codes.dtype.itemsize == 1


def test_any_slice_of_experts_is_the_oracles(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    tensors, weights = oracle.mxfp4_experts(rng, 3, (20, 96))
    tensor = opened(Mxfp4(), {f"X_{suffix}": array for suffix, array in tensors.items()}, tmp_path, "X")
    assert tensor.shape == weights.shape
    for _ in range(25):
        index = some_index(rng, tensor.shape)
        np.testing.assert_array_equal(tensor.read(index).dequantise(np.float32), weights[index])


def test_the_stored_zero_15_means_16(tmp_path: Path) -> None:
    """The word plus 0x11111111 would carry into the neighbour."""
    stored = oracle.gptq(np.random.default_rng(0), SHAPE, sym_word=0xFFFFFFFF)
    part = opened(gptq_format(), stored.named("X"), tmp_path).read((slice(0, 48), slice(0, 96)))
    assert part.zeros is not None and set(part.zeros.reshape(-1)) == {16}


# Of each file of tests/fixtures/quantised: the format it has.
TOOLS: dict[str, Format] = {
    "gptq": gptq_format(),
    "gptq_act_order": gptq_format(desc_act=True),
    "awq": Awq(group=32),
    "pack_quantized": pack_format(),
    "pack_quantized_zeros": pack_format(symmetric=False),
    "int_quantized": IntQuantized(grid=(1, None), symmetric=True),
    "float_quantized": FloatQuantized(grid=(1, None)),
    "mxfp4_pack_quantized": Mxfp4Packed(),
    "nvfp4_pack_quantized": Nvfp4Packed(),
    "fp8": Fp8(block=(32, 64)),
    "gpt_oss": Mxfp4(),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_weights_that_the_tools_have_packed(tool: str, tmp_path: Path) -> None:
    """scripts/make_quantised_fixtures.py had AutoGPTQ, AutoAWQ, compressed-tensors and transformers make them."""
    fixture = Path(__file__).parents[1] / "fixtures" / "quantised" / f"{tool}.safetensors"
    shutil.copyfile(fixture, tmp_path / "model.safetensors")
    tensors, name = open_tensors(tmp_path), "X" if tool == "gpt_oss" else "X.weight"
    names = {found for found in tensors if found != "expected"}
    assert set(TOOLS[tool].required(name)) <= names <= {*TOOLS[tool].required(name), *TOOLS[tool].optional(name)}
    tensor, expected = TOOLS[tool].open(name, tensors), tensors["expected"]
    dense = tensor.read(tuple(slice(0, size) for size in tensor.shape)).dequantise(np.float32)
    wanted = expected.read(tuple(slice(0, size) for size in expected.shape))
    np.testing.assert_array_equal(dense, wanted.swapaxes(1, 2) if tool == "gpt_oss" else wanted)
