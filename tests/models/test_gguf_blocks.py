"""Element types of GGUF: any slice is that of a loop over elements, and the weights are those that gguf reads."""

from pathlib import Path

import gguf_files
import gguf_oracle as oracle
import numpy as np
import pytest
from test_quantised_slices import some_index

from jaxserve.files.gguf_file import read_gguf
from jaxserve.models.gguf.blocks import BLOCKS
from jaxserve.models.quantised.slices import QuantisedSlice
from jaxserve.models.safetensors_files import TensorSource

FIXTURES = Path(__file__).parent.parent / "fixtures" / "gguf"


def opened(path: Path, name: str):
    """A quantised tensor of a file."""
    tensor = read_gguf(path).tensors[name]
    shape = (*tensor.shape[:-1], tensor.shape[-1] // tensor.block, tensor.block_bytes)
    source = TensorSource(name=name, file=tensor.file, shape=shape, dtype="uint8", start=tensor.start)
    return BLOCKS[tensor.type].open(name, {name: source})


def by_element(found: QuantisedSlice) -> tuple[np.ndarray, ...]:
    """Codes, scales and offsets, each [..., out, in]."""
    scales = found.scales[..., found.group_of]
    offsets = np.zeros_like(scales) if found.offsets is None else found.offsets[..., found.group_of]
    return found.codes.astype(np.float32), scales, offsets


@pytest.mark.parametrize("kind", BLOCKS)
def test_any_slice_is_the_oracles(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(sum(map(ord, kind)))
    shape = (3, 5, 512) if kind in ("Q6_K", "MXFP4") else (6, 512)  # experts, too
    stored = oracle.random_weight(rng, kind, shape)
    path = gguf_files.write(tmp_path / "x.gguf", {"a": 1}, {"pad": np.zeros(3, np.float32), "X": stored.packed})
    tensor = opened(path, "X")
    assert (tensor.name, tensor.shape) == ("X", shape)
    assert oracle.GROUPS.get(kind, 32) == tensor.format.group
    whole = tuple(slice(0, size) for size in shape)
    for index in (whole, *(some_index(rng, shape) for _ in range(20))):
        found = tensor.read(index)
        wanted = stored.codes[index], stored.scales[index], stored.offsets[index]
        for array, expected in zip(by_element(found), wanted, strict=True):
            np.testing.assert_array_equal(array, expected)
        np.testing.assert_array_equal(found.dequantise(np.float32), stored.weights[index])
        touched = -(-index[-1].stop // tensor.format.group) - index[-1].start // tensor.format.group
        assert found.scales.shape[-1] == touched


@pytest.mark.parametrize("kind", [*BLOCKS, "F16", "BF16"])
def test_weights_are_those_that_gguf_reads(kind: str) -> None:
    """Files that the library itself has written, with what its `dequantize` makes of them."""
    file = read_gguf(FIXTURES / "blocks.gguf")
    expected, tensor = (file.tensors[f"{kind}.{end}"] for end in ("expected", "weight"))
    assert file.metadata["general.alignment"] == 64 and expected.shape == tensor.shape
    whole = tuple(slice(0, size) for size in tensor.shape)
    numbers = TensorSource(name="", file=tensor.file, shape=expected.shape, dtype="float32", start=expected.start).read(
        whole
    )
    if kind in BLOCKS:
        found = opened(FIXTURES / "blocks.gguf", f"{kind}.weight").read(whole).dequantise(np.float32)
    else:
        dtype = {"F16": "float16", "BF16": "bfloat16"}[kind]
        source = TensorSource(name="", file=tensor.file, shape=tensor.shape, dtype=dtype, start=tensor.start)
        found = source.read(whole).astype(np.float32)
    np.testing.assert_array_equal(found, numbers)
