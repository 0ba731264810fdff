"""What `jaxserve quantize` writes: read by our loader it is the rounded weights to the bit, for every family."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from quantise_parts import model, run, stored, write_texts
from safetensors.numpy import save_file

from jaxserve.kernels.coded_experts import CodedExperts
from jaxserve.kernels.coded_weight import CodedWeight
from jaxserve.kernels.composed_weight import SideBySide, numbers_of
from jaxserve.kernels.storage import Storage
from jaxserve.models import load_model, read_checkpoint
from jaxserve.models.quantised import Quantisation
from jaxserve.quantise.choice import SCHEMES
from jaxserve.quantise.rounding import to_nearest
from jaxserve.quantise.source import open_source

GROUP = 16


def dense_twin(source: Path, quantised: Path, directory: Path) -> Path:
    """The float checkpoint with its weights rounded as the report says, computed from `source` alone."""
    report = json.loads((quantised / "quality.json").read_text())
    opened = open_source(read_checkpoint(source))
    tensors = {
        name: opened.tensors[name].read((slice(None),) * len(opened.tensors[name].shape)) for name in opened.tensors
    }
    said = report["beside_layers"] | {k: v for layer in report["layers"] for k, v in layer["weights"].items()}
    for module, found in said.items():
        name = f"{module}.weight"
        how = SCHEMES[found["scheme"]]
        storage = Storage(code=how.code, group=found.get("group"))
        scale_dtype = tensors[name].dtype.name if how.format == "pack-quantized" else "float32"
        tensors[name] = to_nearest(tensors[name].astype(np.float32), storage, scale_dtype).numbers()
    directory.mkdir()
    (directory / "config.json").write_text((source / "config.json").read_text())
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def parameters(directory: Path, **options: object) -> dict[tuple, np.ndarray]:
    loaded = load_model(directory, dtype="float32", **options)
    found = {}
    for path, variable in nnx.to_flat_state(loaded.state):
        value = variable.get_raw_value()
        coded = isinstance(value, CodedWeight | CodedExperts | SideBySide)
        found[path] = numbers_of(value).astype(np.float32) if coded else np.asarray(jax.tree.leaves(value)[0])
    return found


def assert_same(quantised: Path, twin: Path) -> None:
    expected = parameters(twin)
    for options in ({}, {"quantisation": Quantisation(scheme="none")}):
        found = parameters(quantised, **options)
        assert found.keys() == expected.keys()
        for path, array in expected.items():
            np.testing.assert_array_equal(found[path], array, err_msg=str(path))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme(scheme: str, tmp_path: Path) -> None:
    source = model(tmp_path / "source", "llama")
    data = write_texts(tmp_path / "texts.jsonl", 128)
    group = {"group": GROUP} if scheme == "int4" else {}
    report = run(source, tmp_path / "out", data, scheme=scheme, head="int8", embedding="int8", **group)
    assert_same(tmp_path / "out", dense_twin(source, tmp_path / "out", tmp_path / "twin"))
    assert report == json.loads((tmp_path / "out/quality.json").read_text())
    assert not (tmp_path / "out.partial").exists()
    left = {file.name for file in source.iterdir()} - {file.name for file in (tmp_path / "out").iterdir()}
    assert left == {"model.safetensors"}
    assert {f.suffix for f in (tmp_path / "out").iterdir()} <= {".json", ".model", ".safetensors", ".npz"}


# Those whose files differ in how weights lie in them: fused, cut by heads, experts, more than one table.
FAMILIES = ["bloom", "falcon_mqa", "gemma2", "mpt", "opt_350m", "phi3", "qwen3_moe"]
ALIKE = [
    "falcon_11b", "falcon_new", "gemma", "gemma3", "mistral_window", "mixtral", "olmo2", "opt", "phi", "qwen2",
    "qwen2_moe", "qwen3", "starcoder2",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", ALIKE)
def test_families_with_files_alike(family: str, tmp_path: Path) -> None:
    check_family(family, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tmp_path: Path) -> None:
    check_family(family, tmp_path)


def check_family(family: str, tmp_path: Path) -> None:
    source = model(tmp_path / "source", family)
    data = write_texts(tmp_path / "texts.jsonl", 96, count=6)
    report = run(source, tmp_path / "out", data, scheme="int8")
    assert_same(tmp_path / "out", dense_twin(source, tmp_path / "out", tmp_path / "twin"))
    assert 0 < report["quality"]["kl_mean"] < 0.05


def test_mixed_schemes_by_rules(tmp_path: Path) -> None:
    source = model(tmp_path / "source", "llama")
    rules = {
        r"model\.layers\.0\..*": "none",
        r".*\.down_proj": "int8-a8",
        r".*\.[kv]_proj": "fp8",
        r"model\.embed_tokens": "int8",
    }
    data = write_texts(tmp_path / "texts.jsonl", 128)
    report = run(source, tmp_path / "out", data, scheme="int4", group=GROUP, rules=rules)
    table = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert table["format"] == "mixed-precision"
    formats = {name: group["format"] for group in table["config_groups"].values() for name in group["targets"]}
    assert formats["model.layers.1.mlp.down_proj"] == "int-quantized"
    assert formats["model.layers.1.self_attn.k_proj"] == "float-quantized"
    assert formats["model.layers.1.self_attn.q_proj"] == formats["model.embed_tokens"] == "pack-quantized"
    assert "model.layers.0.mlp.up_proj" in table["ignore"] and "lm_head" in table["ignore"]
    assert not report["layers"][0]["weights"]
    assert_same(tmp_path / "out", dense_twin(source, tmp_path / "out", tmp_path / "twin"))


def unpacked(words: np.ndarray, shape: tuple[int, int], bits: int) -> np.ndarray:
    """What each stored bit means, element by element."""
    codes = np.zeros(shape, int)
    for row in range(shape[0]):
        for column in range(shape[1]):
            bit = column * bits
            word = int(words[row, bit // 32]) & 0xFFFFFFFF
            codes[row, column] = ((word >> (bit % 32)) & (2**bits - 1)) - 2 ** (bits - 1)
    return codes


@pytest.mark.parametrize(("scheme", "bits"), [("int4", 4), ("int8", 8)])
def test_packed_words(scheme: str, bits: int, tmp_path: Path) -> None:
    source = model(tmp_path / "source", "llama")
    data = write_texts(tmp_path / "texts.jsonl", 128, count=4)
    group = {"group": GROUP} if scheme == "int4" else {}
    run(source, tmp_path / "out", data, scheme=scheme, **group)
    tensors, name = stored(tmp_path / "out"), "model.layers.1.mlp.down_proj"
    floats = stored(source)[f"{name}.weight"]
    assert tensors[f"{name}.weight_shape"].tolist() == [48, 80]
    codes = unpacked(tensors[f"{name}.weight_packed"], (48, 80), bits)
    scales = tensors[f"{name}.weight_scale"]
    assert scales.shape == (48, 80 // GROUP if scheme == "int4" else 1)
    wide = np.repeat(scales, 80 // scales.shape[1], axis=1)
    assert np.abs(codes * wide - floats).max() <= wide.max() * 0.5001
    assert codes.min() >= -(2 ** (bits - 1)) and codes.max() < 2 ** (bits - 1)
