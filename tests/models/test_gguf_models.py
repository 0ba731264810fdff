"""Models from GGUF files have the configs and the parameters of the checkpoints that they were made of."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf_files
import gguf_models
import hf_oracle
import jax
import numpy as np
import pytest
from quantised_models import numbers_of
from test_loading import mesh_of

from jaxserve.config.schema import ModelConfig, ParallelConfig
from jaxserve.errors import CheckpointError
from jaxserve.files.gguf_file import read_gguf
from jaxserve.hosts.fingerprint import checkpoint_digest
from jaxserve.models import configured_checkpoint, decoder_config, load_model, orbax_io, read_checkpoint
from jaxserve.models.checkpoint import CheckpointKind
from jaxserve.models.decoder_config import RopeScaling
from jaxserve.models.gguf.architectures import ARCHITECTURES
from jaxserve.models.quantised import Quantisation, describe_quantisation
from jaxserve.models.rope import inverse_frequencies
from jaxserve.models.sharding import arrays_of
from jaxserve.runtime.mesh import make_meshes

# The fixture of each architecture, and what its config has that GGUF has no key for.
CASES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 24}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 20, "sliding_window_pattern": 2}),
    "gpt-oss": ("gpt_oss", {"swiglu_limit": 0.7}),
    "llama": ("llama", {}),
    "llama with biases": ("llama_mha_tied_bias", {}),
    "llama linear": ("llama_linear", {}),
    "llama yarn": ("llama_yarn", {}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "starcoder2": ("starcoder2", {"sliding_window": 20}),
}


def checkpoint_of(path: Path, **overrides: Any):
    return configured_checkpoint(ModelConfig(path=str(path), overrides=overrides))


def assert_same_parameters(found: Any, wanted: Any) -> None:
    found, wanted = (arrays_of(load_model(one, dtype="float32").state) for one in (found, wanted))
    assert found.keys() == wanted.keys()
    for path, array in wanted.items():
        np.testing.assert_allclose(np.asarray(found[path]), np.asarray(array), rtol=0, atol=1e-7, err_msg=str(path))


@pytest.mark.parametrize("case", CASES)
def test_configs_and_parameters_are_those_of_the_original(case: str, tmp_path: Path) -> None:
    fixture, overrides = CASES[case]
    path = gguf_models.from_fixture(tmp_path / "model.gguf", case.split()[0], fixture)
    checkpoint = checkpoint_of(path, **overrides)
    assert checkpoint.kind is CheckpointKind.GGUF
    original = read_checkpoint(gguf_models.FIXTURES / fixture)
    assert decoder_config(checkpoint)[1] == decoder_config(original)[1]
    assert_same_parameters(checkpoint, original)


def test_every_architecture_of_the_table_is_tested() -> None:
    assert {case.split()[0] for case in CASES} | {"qwen3moe"} == set(ARCHITECTURES)


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    """Mixtral is called llama in GGUF."""
    mixtral = gguf_models.FIXTURES / "mixtral"
    path = gguf_models.from_fixture(tmp_path / "mixtral.gguf", "llama", "mixtral")
    checkpoint = checkpoint_of(path, sliding_window=read_checkpoint(mixtral).config.get("sliding_window"))
    assert decoder_config(checkpoint)[1] == decoder_config(read_checkpoint(mixtral))[1]
    assert_same_parameters(checkpoint, mixtral)


def test_experts_of_qwen3(tmp_path: Path) -> None:
    """The fixture has a layer without experts, which GGUF does not have: a model of its sizes."""
    config = read_checkpoint(gguf_models.FIXTURES / "qwen3_moe").config | {"decoder_sparse_step": 1}
    rng = np.random.default_rng(0)
    shapes = {
        "ffn_gate_inp": (4, 48),
        "ffn_gate_exps": (4, 24, 48),
        "ffn_up_exps": (4, 24, 48),
        "ffn_down_exps": (4, 48, 24),
        "attn_q": (64, 48),
        "attn_k": (32, 48),
        "attn_v": (32, 48),
        "attn_output": (48, 64),
        **dict.fromkeys(("attn_norm", "ffn_norm"), (48,)),
        **dict.fromkeys(("attn_q_norm", "attn_k_norm"), (16,)),
    }
    assert {f"blk.0.{name}.weight" for name in shapes} < set(gguf_models.NAMES["qwen3moe"].values())
    tensors = {f"blk.{i}.{name}.weight": rng.normal(size=shape) for i in (0, 1) for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": rng.normal(size=(128, 48)) for name in ("token_embd", "output")}
    tensors = {name: array.astype(np.float32) for name, array in tensors.items()}
    tensors["output_norm.weight"] = np.ones(48, np.float32)
    metadata = gguf_models.metadata_of("qwen3moe", config)
    model = load_model(gguf_files.write(tmp_path / "model.gguf", metadata, tensors))
    found = arrays_of(model.state)
    np.testing.assert_array_equal(found["layers", 1, "mlp", "gate_up"][:, 0], tensors["blk.1.ffn_gate_exps.weight"])
    np.testing.assert_array_equal(found["layers", 1, "mlp", "gate_up"][:, 1], tensors["blk.1.ffn_up_exps.weight"])
    np.testing.assert_array_equal(found["layers", 0, "mlp", "down"], tensors["blk.0.ffn_down_exps.weight"])
    assert model.config.layers[0].mlp.renormalise  # pyright: ignore[reportAttributeAccessIssue]


def test_rows_of_grouped_heads_are_in_their_order_again() -> None:
    """A file that gguf itself has written, in the order of llama.cpp, and its rows as they were before."""
    model = load_model(gguf_models.FIXTURES / "gguf" / "llama.gguf", dtype="float32")
    original = np.load(gguf_models.FIXTURES / "gguf" / "llama.npz")
    kernel = numbers_of(model)["layers", 0, "attention", "qkv", "kernel"]
    by_head = kernel.reshape(2, 4, 12, 32)  # of each key/value head two queries, the key and the value
    np.testing.assert_array_equal(by_head[:, :2].reshape(-1, 32), original["attn_q"])
    np.testing.assert_array_equal(by_head[:, 2].reshape(-1, 32), original["attn_k"])


def test_quantised_weights_on_any_number_of_devices(tmp_path: Path) -> None:
    pair = gguf_models.quantised_pair(tmp_path)
    for dtype, devices in (("float32", 1), ("bfloat16", 1), ("float32", 2), ("float32", 4)):
        mesh = mesh_of(devices)
        coded = load_model(pair.quantised, dtype=dtype, mesh=mesh)
        widened = load_model(pair.quantised, dtype=dtype, mesh=mesh, quantisation=Quantisation(scheme="none"))
        wanted = arrays_of(load_model(pair.dense, dtype=dtype, mesh=mesh).state)
        for found in (numbers_of(coded), numbers_of(widened)):
            for path, array in wanted.items():
                same = found[path].astype(np.float32).astype(dtype)
                np.testing.assert_array_equal(same, np.asarray(array), err_msg=str(path))
        assert coded.kept, "Q4_0, Q5_0, Q6_K, Q8_0 and MXFP4 are codes"
    said, *notes = describe_quantisation(read_checkpoint(pair.quantised), np.dtype("float32"), {})
    assert "GGUF with Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q6_K, MXFP4" in said and not notes


def test_logits_are_those_of_the_float_weights(tmp_path: Path) -> None:
    pair = gguf_models.quantised_pair(tmp_path)
    prompt, logits = np.arange(3, 40, dtype=np.int32), []
    for path, devices, scheme in ((pair.dense, 1, "none"), (pair.quantised, 2, "none"), (pair.quantised, 2, "auto")):
        model = load_model(path, dtype="float32", mesh=mesh_of(devices), quantisation=Quantisation(scheme=scheme))
        driver = hf_oracle.Driver(model, num_rows=1, max_len=64, page_size=16)
        logits.append(driver.prefill([prompt], [[]])[0])
    exact, widened, rounded = logits
    assert np.abs(exact).max() > 0.1
    assert np.abs(widened - exact).max() < 1e-4
    assert 1e-4 < np.abs(rounded - exact).max() < 0.05 * np.abs(exact).max()


def test_quantised_experts_of_gpt_oss(tmp_path: Path) -> None:
    """MXFP4, as the published files have them, cut by experts and by columns."""
    import gguf_oracle as oracle

    path = gguf_models.from_fixture(tmp_path / "float.gguf", "gpt-oss", "gpt_oss", attention__sliding_window=20)
    file = read_gguf(path)
    rng = np.random.default_rng(1)
    dense: dict[str, np.ndarray] = {}
    stored: dict[str, Any] = {}
    sizes = {"gate": (6, 64, 96), "up": (6, 64, 96), "down": (6, 96, 64)}
    config = dict(read_checkpoint(gguf_models.FIXTURES / "gpt_oss").config)
    config |= {"hidden_size": 96, "intermediate_size": 64}
    for tensor in file.tensors.values():
        kind = tensor.name.split("ffn_")[-1].split("_exps")[0]
        if tensor.name.endswith("_exps.weight"):
            found = oracle.random_weight(rng, "MXFP4", sizes[kind])
            dense[tensor.name], stored[tensor.name] = found.weights, found.packed
            continue
        # Everything else keeps its kind, at the sizes of this model.
        shape = tuple(96 if n == 48 else 64 if n == 24 else n for n in tensor.shape)
        stored[tensor.name] = dense[tensor.name] = rng.normal(size=shape).astype(np.float32)
    metadata = gguf_models.metadata_of("gpt-oss", config)
    files = [gguf_files.write(tmp_path / f"{name}.gguf", metadata, t) for name, t in (("a", dense), ("b", stored))]
    for tensor, expert in ((1, 1), (4, 1), (2, 2)):
        mesh = make_meshes(ParallelConfig(tensor=tensor, expert=expert), jax.devices())[0][0]
        wanted, coded = (load_model(file, dtype="float32", mesh=mesh) for file in files)
        # Over four devices a share of 64 columns is 16: a group that is kept.
        assert {found.storage and found.storage.code for found in coded.kept.values()} == {"float4_e2m1fn"}
        found = numbers_of(coded)
        for path, array in arrays_of(wanted.state).items():
            np.testing.assert_array_equal(found[path].astype(np.float32), np.asarray(array), err_msg=str(path))


def test_factors_of_llama3(tmp_path: Path) -> None:
    """The converter writes what each frequency is divided by, and not the fields of config.json."""
    original = decoder_config(read_checkpoint(gguf_models.FIXTURES / "llama_llama3"))[1].ropes[0]
    plain = inverse_frequencies(type(original)(theta=original.theta, rotary_dim=original.rotary_dim))
    path = gguf_models.from_fixture(tmp_path / "a.gguf", "llama", "llama_llama3")
    factors = (plain / inverse_frequencies(original)).astype(np.float32)
    tensors = {name: np.zeros(t.shape, np.float32) for name, t in read_gguf(path).tensors.items()}
    metadata = dict(read_gguf(path).metadata)
    gguf_files.write(path, metadata, tensors | {"rope_freqs.weight": factors})
    model = load_model(path)
    assert model.config.ropes[0].scaling is RopeScaling.FACTORS
    np.testing.assert_allclose(inverse_frequencies(model.config.ropes[0]), inverse_frequencies(original), rtol=3e-7)


def test_a_directory_with_one_file_and_a_file_in_parts(tmp_path: Path) -> None:
    """Any part may be named; the digest, which hosts compare, is of all."""
    whole = gguf_models.from_fixture(tmp_path / "whole" / "model.gguf", "llama", "llama")
    parts = tmp_path / "parts"
    file = read_gguf(whole)
    names = [*file.tensors]
    arrays = {
        name: np.fromfile(t.file, "<f4", np.prod(t.shape, dtype=int), offset=t.start)
        for name, t in file.tensors.items()
    }
    for number, share in enumerate((names[:9], names[9:])):
        split = {"split.no": number, "split.count": 2, "split.tensors.count": len(names)}
        tensors = {name: arrays[name].reshape(file.tensors[name].shape) for name in share}
        metadata = split | (dict(file.metadata) if number == 0 else {})
        gguf_files.write(parts / f"model-{number + 1:05d}-of-00002.gguf", metadata, tensors, alignment=64)
    second = parts / "model-00002-of-00002.gguf"
    for path in (whole, whole.parent, parts, second):
        assert_same_parameters(path, whole)
    assert read_checkpoint(second).path == second and read_checkpoint(parts).path == parts
    digests = {checkpoint_digest(second, False), checkpoint_digest(parts / "model-00001-of-00002.gguf", False)}
    assert len(digests) == 1 and digests != {checkpoint_digest(whole, False)}
    (parts / "model-00001-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match="2 parts, of which model-00001-of-00002.gguf are missing"):
        read_checkpoint(second)
    shutil.copy(second, whole.parent / "model-00001-of-00001.gguf")
    with pytest.raises(CheckpointError, match="split.no is 1 and split.count 2"):
        read_checkpoint(whole.parent / "model-00001-of-00001.gguf")
    with pytest.raises(
        CheckpointError, match="has 2 GGUF files: model-00001-of-00001.gguf, model.gguf; set model.path"
    ):
        read_checkpoint(whole.parent)


def test_ids_and_sampling_of_the_metadata(tmp_path: Path) -> None:
    more = {
        "tokenizer.ggml.tokens": ["a", "<|eot_id|>", "<|im_end|>", "<end_of_turn>"],
        "tokenizer.ggml.token_type": [1, 3, 1, 3],  # the second <|im_end|> is no control token
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.ggml.eot_token_id": 1,
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
    }
    path = gguf_models.from_fixture(tmp_path / "model.gguf", "llama", "llama")
    metadata, tensors = read_gguf(path).metadata, read_gguf(path).tensors
    arrays = {name: np.zeros(t.shape, np.float16 if len(t.shape) > 1 else np.float32) for name, t in tensors.items()}
    checkpoint = read_checkpoint(gguf_files.write(path, {**metadata, **more}, arrays))
    assert checkpoint.eos_token_ids == (1, 3, 7)
    assert checkpoint.default_sampling == {"temperature": 0.6, "top_k": 20}
    assert checkpoint.config["dtype"] == "float16"


def test_convert_refuses(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="llama.gguf is a GGUF file, which is not converted; serve it as it is"):
        orbax_io.convert(gguf_models.FIXTURES / "gguf" / "llama.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
