"""Orbax directories: the way there and back is exact, and restoring fills shardings directly."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import hf_oracle
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.errors import CheckpointError
from jaxserve.models import load_model, orbax_io
from jaxserve.models.checkpoint import CheckpointKind, read_checkpoint


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama_llama3 (bfloat16, old config spelling) with stand-ins for tokenizer files, as an Orbax directory."""
    root = tmp_path_factory.mktemp("orbax")
    source = Path(shutil.copytree(hf_oracle.FIXTURES / "llama_llama3", root / "hf"))
    (source / "tokenizer.model").write_bytes(b"\x00pieces")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    assert orbax_io.convert(source, root / "orbax") is CheckpointKind.ORBAX
    return root / "orbax"


@pytest.mark.parametrize("name", ["llama_llama3", "qwen2", "llama_mha_tied_bias", "qwen3"])
def test_round_trip_keeps_every_byte(name: str, tmp_path: Path) -> None:
    source = hf_oracle.FIXTURES / name
    orbax_io.convert(source, tmp_path / "orbax")
    assert orbax_io.convert(tmp_path / "orbax", tmp_path / "hf") is CheckpointKind.HUGGING_FACE
    before, after = tensors_of(source), tensors_of(tmp_path / "hf")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype
        assert tensor.tobytes() == after[key].tobytes(), key
    assert (tmp_path / "hf" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert not (tmp_path / "hf" / "jaxserve_orbax.json").exists()


def test_small_files_come_along(converted: Path) -> None:
    assert (converted / "tokenizer.model").read_bytes() == b"\x00pieces"
    assert (converted / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not list(converted.glob("*.safetensors"))
    assert read_checkpoint(converted).kind is CheckpointKind.ORBAX
    assert read_checkpoint(converted).eos_token_ids == (2,)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_restored_model_equals_the_loaded_one(converted: Path, num_devices: int, dtype: str) -> None:
    mesh = None if num_devices == 1 else jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
    direct = load_model(hf_oracle.FIXTURES / "llama_llama3", dtype=dtype, mesh=mesh)
    restored = load_model(converted, dtype=dtype, mesh=mesh)
    assert jax.tree.structure(direct.state) == jax.tree.structure(restored.state)
    for a, b in zip(jax.tree.leaves(direct.state), jax.tree.leaves(restored.state), strict=True):
        assert a.dtype == b.dtype == dtype
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_large_models_are_cut_into_indexed_files(converted: Path, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orbax_io, "MAX_FILE_BYTES", 30_000)
    orbax_io.convert(converted, tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    before, after = tensors_of(hf_oracle.FIXTURES / "llama_llama3"), tensors_of(tmp_path / "hf")
    assert {k: v.tobytes() for k, v in before.items()} == {k: v.tobytes() for k, v in after.items()}
    load_model(tmp_path / "hf")


def test_a_target_in_use_is_refused_and_kept(converted: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(CheckpointError, match="exists already"):
        orbax_io.convert(converted, tmp_path)
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    source = Path(shutil.copytree(hf_oracle.FIXTURES / "llama", tmp_path / "hf"))
    (source / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="model.safetensors"):
        orbax_io.convert(source, tmp_path / "orbax")
    assert not (tmp_path / "orbax").exists()


def test_broken_orbax_directories(converted: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(converted, tmp_path / "broken"))
    marker = broken / "jaxserve_orbax.json"
    marker.write_text(json.dumps({"layout_version": 99}))
    with pytest.raises(CheckpointError, match="layout_version is 99"):
        load_model(broken)
    shutil.copy(converted / marker.name, marker)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(CheckpointError, match="shapes disagree"):
        load_model(broken)
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"weights are missing: layers.2"):
        load_model(broken)
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(CheckpointError, match=r"weights are unknown: layers.1"):
        load_model(broken)
    (broken / "config.json").write_text(json.dumps(config))
    shutil.rmtree(broken / "weights")
    with pytest.raises(CheckpointError, match="weights is missing"):
        load_model(broken)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_damaged_orbax_data(converted: Path, tmp_path: Path, damage: str) -> None:
    """In a process of its own, since a failed restore leaves tasks behind that complain when collected."""
    broken = Path(shutil.copytree(converted, tmp_path / "broken"))
    for file in (f for f in (broken / "weights").rglob("d/*") if f.is_file()):
        if damage == "truncate":
            file.write_bytes(file.read_bytes()[:20])
        else:
            file.unlink()
    code = f"""
from jaxserve.errors import CheckpointError
from jaxserve.models import load_model
try:
    load_model({str(broken)!r})
except CheckpointError as error:
    assert "weights" in str(error), error
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "refused", done.stderr
