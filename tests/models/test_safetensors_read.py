"""Slices of tensors, read from the file by offsets."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxserve.errors import CheckpointError
from jaxserve.hosts.fingerprint import checkpoint_digest
from jaxserve.models.safetensors_files import open_tensors


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    save_file(ARRAYS, path / "model.safetensors")
    return path


def _array(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape).astype(dtype)


ARRAYS = {
    "line": _array((7,), np.float32),
    "matrix": _array((5, 6), ml_dtypes.bfloat16),
    "cube": _array((3, 4, 5), np.float16),
    "empty": _array((0, 4), np.float32),
}


@settings(max_examples=200)
@given(data=st.data())
def test_a_slice_is_that_of_numpy(directory: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(ARRAYS)))
    array, index = ARRAYS[name], []
    for size in array.shape:
        start = data.draw(st.integers(0, size))
        index.append(slice(start, data.draw(st.integers(start, size))))
    found = open_tensors(directory)[name].read(tuple(index))
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found.astype(np.float32), array[tuple(index)].astype(np.float32))


def test_weights_shared_with_the_directory_above(tmp_path: Path) -> None:
    """They are read, and are part of what tells the checkpoint from others."""
    inner = tmp_path / "inner"
    inner.mkdir()
    save_file({"line": ARRAYS["line"]}, tmp_path / "model.safetensors")
    save_file({"cube": ARRAYS["cube"]}, inner / "more.safetensors")
    index = {"weight_map": {"line": "../model.safetensors", "cube": "more.safetensors"}}
    (inner / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = open_tensors(inner)
    assert sorted(tensors) == ["cube", "line"]
    np.testing.assert_array_equal(tensors["line"].read((slice(None),)), ARRAYS["line"])
    before = checkpoint_digest(inner, config_only=False)
    assert before == checkpoint_digest(inner, config_only=False)
    save_file({"line": ARRAYS["line"] + 1}, tmp_path / "model.safetensors")
    assert before != checkpoint_digest(inner, config_only=False)


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(ARRAYS, file)
    tensors = open_tensors(tmp_path)
    file.write_bytes(file.read_bytes()[:-20])
    last = max(tensors.values(), key=lambda tensor: tensor.start)
    with pytest.raises(CheckpointError, match="stops short"):
        last.read(tuple(slice(0, size) for size in last.shape))
