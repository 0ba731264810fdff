"""Everything that can be wrong with a checkpoint directory is one typed error that names the file and the cure."""

import json
import shutil
from pathlib import Path

import hf_oracle
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.errors import CheckpointError, Status
from jaxserve.models import load_model, read_checkpoint, resolve_model_path
from jaxserve.models.weights import fold_names


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return Path(shutil.copytree(hf_oracle.FIXTURES / "llama", tmp_path / "llama"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return Path(shutil.copytree(hf_oracle.FIXTURES / "qwen2", tmp_path / "qwen2"))


def edit_json(file: Path, **changes: object) -> None:
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in values.items() if v != "DELETE"}))


def edit_tensors(directory: Path, edit) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, str(directory / "model.safetensors"))


def refused(directory: Path, *words: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(directory)
    message = str(caught.value)
    for word in words:
        assert word in message, (word, message)
    assert caught.value.status is Status.INVALID
    return message


def test_missing_directory_and_a_file_in_its_place(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere", "does not exist")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "is a file")


def test_missing_and_malformed_config(llama: Path) -> None:
    (llama / "config.json").write_text("{ not json")
    refused(llama, "config.json", "JSON")
    (llama / "config.json").write_text("[1]")
    refused(llama, "config.json", "list")
    (llama / "config.json").write_bytes(b"\xff\xfe{}")
    refused(llama, "config.json")
    (llama / "config.json").unlink()
    refused(llama, "config.json", "missing")


def test_unknown_architecture_lists_the_known_ones(llama: Path) -> None:
    edit_json(llama / "config.json", architectures=["NewForCausalLM"])
    refused(llama, "NewForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM")
    edit_json(llama / "config.json", architectures=["package.module:Name"])
    refused(llama, "package.module:Name", "unknown")
    edit_json(llama / "config.json", architectures=[1])
    refused(llama, "architectures")
    edit_json(llama / "config.json", architectures=None, model_type="bert")
    refused(llama, "config.json", "no 'architectures'", "'bert'", "qwen3_moe", "model.overrides.architectures")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "DELETE"),
        ("hidden_size", "48"),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 2.5),
        ("num_key_value_heads", 3),
        ("rms_norm_eps", -1.0),
        ("rms_norm_eps", float("nan")),
        ("hidden_act", "xielu"),
        ("tie_word_embeddings", "yes"),
        ("head_dim", 13),
        ("quantization_config", {"quant_method": "gguf"}),
        ("partial_rotary_factor", 0.5),
        ("rope_scaling", {"rope_type": "longrope", "factor": 2.0}),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", {"rope_type": "linear", "factor": "big"}),
        ("rope_scaling", {"full_attention": {"rope_type": "default"}}),
        ("eos_token_id", "end"),
    ],
)
def test_bad_config_fields_are_named(llama: Path, field: str, value: object) -> None:
    edit_json(llama / "config.json", **{field: value})
    name = "rope" if field == "rope_scaling" else field
    ask = (lambda path: read_checkpoint(path).eos_token_ids) if field == "eos_token_id" else load_model
    with pytest.raises(CheckpointError, match=name) as caught:
        ask(llama)
    assert "config.json" in str(caught.value)


def test_no_weights_and_torch_weights(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    refused(llama, "model.safetensors", "model.safetensors.index.json")
    (llama / "pytorch_model.bin").write_bytes(b"")
    refused(llama, "pytorch_model.bin", "converted")


@pytest.mark.parametrize("keep", [0, 4, 100, 5_000, -1])
def test_truncated_safetensors(llama: Path, keep: int) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(llama, str(file), "truncated")


def test_corrupt_header_and_wrong_element_type(llama: Path) -> None:
    file = llama / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:8] + b"\x00" * 50 + whole[58:])
    refused(llama, str(file), "corrupt")
    file.write_bytes(b"\xff" * 8 + whole[8:])
    refused(llama, str(file), "corrupt")
    file.write_bytes(whole)
    edit_tensors(llama, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].astype("int8")}))
    refused(llama, "model.norm.weight", "int8", "quantised")
    edit_tensors(llama, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].astype("uint16")}))
    refused(llama, str(file), "model.norm.weight", "uint16", "float32, float16")


def test_missing_and_unknown_weights_are_listed_in_full(llama: Path) -> None:
    def edit(tensors) -> None:
        tensors["model.layers.0.self_attn.sinks"] = tensors.pop("model.norm.weight")
        tensors["model.layers.2.mlp.up_proj.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
        tensors["model.layers.0.self_attn.q_proj.bias"] = tensors["lm_head.weight"][:, 0].copy()

    edit_tensors(llama, edit)
    refused(
        llama,
        "2 weights are missing: model.layers.1.mlp.up_proj.weight, model.norm.weight",
        "3 weights are unknown",
        "model.layers.0.self_attn.q_proj.bias, model.layers.0.self_attn.sinks, model.layers.2.mlp.up_proj.weight",
    )


def test_experts_that_are_missing_are_a_sentence(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(hf_oracle.FIXTURES / "mixtral", tmp_path / "mixtral"))
    missing = [f"model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight" for i in range(2) for e in (1, 4, 5)]

    def edit(tensors) -> None:
        for name in missing:
            del tensors[name]

    edit_tensors(directory, edit)
    refused(directory, "6 weights are missing: model.layers.[0-1].block_sparse_moe.experts.[1,4-5].w2.weight;")


def test_wrong_shapes_are_told_by_size_and_by_kind(llama: Path) -> None:
    edit_json(llama / "config.json", intermediate_size=96)
    refused(
        llama,
        "config.json: intermediate_size is 96, but the weights have 80; 6 of 21 tensors are others (",
        "model.layers.[0-1].mlp.gate_proj.weight, model.layers.[0-1].mlp.up_proj.weight: [80, 48], not [96, 48]",
        "model.layers.[0-1].mlp.down_proj.weight: [48, 80], not [48, 96]",
    )


def test_a_wrong_hidden_size_is_a_sentence_however_many_layers_there_are(llama: Path) -> None:
    edit_json(llama / "config.json", hidden_size=64, head_dim=12)
    message = refused(llama, "hidden_size is 64, but the weights have 48; 21 of 21 tensors are others")
    assert len(message) < 700, message


def test_names_of_all_layers_are_folded() -> None:
    names = [f"model.layers.{i}.{part}" for i in (0, 1, 2, 3, 7) for part in ("a", "b")] + ["norm", "layers.10.x"]
    assert fold_names(names) == "layers.10.x, model.layers.[0-3,7].a, model.layers.[0-3,7].b, norm"
    assert fold_names(["l.0.e.0", "l.0.e.1", "l.1.e.1"]) == "l.[0-1].e.[0-1] (3 of these)"
    assert fold_names(["{a}.1", "{a}.2"]) == "{a}.[1-2]"


def test_known_junk_and_a_tied_output_projection_are_accepted(llama: Path) -> None:
    def edit(tensors) -> None:
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = tensors["model.norm.weight"][:6].copy()

    edit_tensors(llama, edit)
    edit_json(llama / "config.json", tie_word_embeddings=True)
    assert "lm_head" not in load_model(llama).state


def test_index_and_files_disagree(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    first = sorted(set(good["weight_map"].values()))[0]
    (sharded / first).rename(sharded / "gone")
    refused(sharded, index.name, first, "missing")
    (sharded / "gone").rename(sharded / first)
    edit_json(index, weight_map=good["weight_map"] | {"model.extra": first})
    refused(sharded, "model.extra", "lack")
    for outside in ("../llama/model.safetensors", "../../model.safetensors", "/model.safetensors"):
        edit_json(index, weight_map={"a": outside})
        refused(sharded, "beside")
    edit_json(index, weight_map=[1])
    refused(sharded, "weight_map")
    (sharded / first).write_bytes((sharded / first).read_bytes()[:-10])
    edit_json(index, **good)
    refused(sharded, first, "truncated")


def test_dtype_is_one_of_three(llama: Path) -> None:
    with pytest.raises(CheckpointError, match="float16"):
        load_model(llama, dtype="float16")


def test_demo_resolves_to_the_package_or_says_that_it_is_not_there(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.resources.files", lambda _: tmp_path)
    with pytest.raises(CheckpointError, match="demo model"):
        resolve_model_path("demo")
    (tmp_path / "demo_model").mkdir()
    (tmp_path / "demo_model" / "config.json").write_text("{}")
    assert resolve_model_path("demo") == tmp_path / "demo_model"


def test_end_of_sequence_ids_are_the_union_of_both_files(llama: Path) -> None:
    assert read_checkpoint(llama).eos_token_ids == (2, 5)
    edit_json(llama / "config.json", eos_token_id=[7, 2])
    assert read_checkpoint(llama).eos_token_ids == (2, 5, 7)
    (llama / "generation_config.json").unlink()
    assert read_checkpoint(llama).eos_token_ids == (2, 7)
    edit_json(llama / "config.json", eos_token_id=None)
    assert read_checkpoint(llama).eos_token_ids == ()


def test_default_sampling_comes_from_the_generation_config(llama: Path) -> None:
    file = llama / "generation_config.json"
    edit_json(file, do_sample=True, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)
    expected = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    assert read_checkpoint(llama).default_sampling == expected
    edit_json(file, do_sample=False)
    assert read_checkpoint(llama).default_sampling == {"temperature": 0.0, "repetition_penalty": 1.05}
    edit_json(file, repetition_penalty=None, max_new_tokens=7)
    assert read_checkpoint(llama).default_sampling == {"temperature": 0.0}
    file.write_text("nope")
    with pytest.raises(CheckpointError, match="generation_config.json"):
        read_checkpoint(llama)
