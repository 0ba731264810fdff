"""Directories of adapters: slots hold what merging adds; what does not fit is refused by the name of what is wrong."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import merge, write_adapter
from safetensors.numpy import load_file, save_file

from jaxserve.errors import AdapterError
from jaxserve.models import Partition, decoder_config
from jaxserve.models.adapters.placing import AdapterReader
from jaxserve.models.adapters.slots import projection_forms
from jaxserve.models.cache_scales import is_scale
from jaxserve.models.checkpoint import read_checkpoint
from jaxserve.models.loading import load_model
from jaxserve.models.sharding import arrays_of

FIXTURES = Path(__file__).parents[1] / "fixtures"
RANK = 4
_Q = "base_model.model.model.layers.0.self_attn.q_proj"


def reader(name: str = "llama") -> AdapterReader:
    family, config = decoder_config(read_checkpoint(FIXTURES / name))
    return AdapterReader(family, Partition.of(config, 1), np.dtype(np.float32), 8)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """One module of the fixture, of rank 4."""
    weight = load_file(FIXTURES / "llama" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    num_out, num_in = weight.shape
    tensors = {
        f"{_Q}.lora_A.weight": np.ones((RANK, num_in), np.float32),
        f"{_Q}.lora_B.weight": np.ones((num_out, RANK), np.float32),
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 8,
        "bias": "none",
        "target_modules": ["q_proj"],
        # What PEFT writes of what is not used.
        "use_dora": False,
        "modules_to_save": None,
        "loftq_config": {},
        "peft_version": "0.18.0",
        "lora_bias": False,
        "megatron_core": "megatron.core",
        "qalora_group_size": 16,
        "alora_invocation_tokens": None,
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    return tmp_path


def set_field(directory: Path, **fields: Any) -> None:
    file = directory / "adapter_config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def change_tensors(directory: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


FAMILIES = (
    *("bloom", "falcon_71_heads", "falcon_mqa", "falcon_new", "falcon_rw", "gemma", "gemma2", "gemma3", "gpt2"),
    *("gpt_oss", "llama", "llama_mha_tied_bias", "mistral_window", "mixtral", "mpt", "olmo2", "opt", "opt_350m"),
    *("phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2"),
)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_slot_holds_what_merging_adds_to_the_kernels(name: str, tmp_path: Path) -> None:
    """Fused tensors, and those that lie the other way round, too; nothing but kernels is changed by merging."""
    base, path = FIXTURES / name, write_adapter(tmp_path / "adapter", FIXTURES / name)
    adapter = reader(name).read(path, "tuned")
    models = [load_model(one, dtype="float32") for one in (base, merge(tmp_path / "merged", base, path))]
    plain, merged = (
        {at: np.asarray(array) for at, array in arrays_of(model.state).items() if not is_scale(at)} for model in models
    )
    forms = {form.path: form for form in projection_forms(Partition.of(models[0].config, 1))}
    for at, before in plain.items():
        added = merged[at] - before
        if at not in forms:
            assert not added.any(), at
            continue
        weights = adapter.weights[forms[at].layer][forms[at].name]
        assert added.any(), at
        for window, down, up in zip(forms[at].windows(), weights.down, weights.up, strict=True):
            np.testing.assert_allclose(np.tensordot(up, down, 1), added[window], atol=1e-5, err_msg=str(at))


def test_reads_what_peft_writes(good: Path) -> None:
    adapter = reader().read(good, "tuned")
    assert (adapter.name, len(adapter.digest)) == ("tuned", 32)
    again = reader().read(good, "other")
    assert again.digest == adapter.digest
    set_field(good, lora_alpha=9)
    assert reader().read(good, "tuned").digest != adapter.digest


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": ...}, "r must be a whole number"),
        ({"r": 0}, "r must be a whole number of 1 or more, got 0"),
        ({"r": True}, "r must be a whole number"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number"),
        ({"r": 2}, "has rank 4 in adapter_model.safetensors, and 2 in adapter_config.json"),
        ({"use_dora": True}, "use_dora"),
        ({"use_qalora": True}, "use_qalora"),
        ({"use_bdlora": {"a": 1}}, "use_bdlora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is .* are not implemented; merge it .*merge_and_unload"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights"),
        ({"a_field_of_tomorrow": 3}, "'a_field_of_tomorrow' is not known"),
        ({"target_modules": ["k_proj"]}, "none of the modules that adapter_config.json names"),
        ({"target_modules": "(unclosed"}, "no regular expression"),
        ({"layers_to_transform": [1]}, "none of the modules"),
        ({"exclude_modules": ["q_proj"]}, "none of the modules"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern must map"),
        ({"rank_pattern": {"(q_proj": 4}}, "no regular expression"),
        ({"target_modules": "x" * 5000}, "expression of 5000 characters"),
        ({"target_modules": "(?:(?:.|..)+[a-z])+[xyz]"}, "takes more than 0.25 s"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a number"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform must be a number or a list"),
        ({"layers_to_transform": [0], "layers_pattern": 5}, "layers_pattern must be a name"),
        ({"layers_to_transform": [0], "layers_pattern": ["(layers)"]}, "layers_pattern must be a name"),
        ({"rank_pattern": {"q_proj": 16}}, "and 16 in adapter_config.json"),
    ],
)
def test_fields_that_are_refused(good: Path, fields: dict[str, Any], message: str) -> None:
    set_field(good, **fields)
    with pytest.raises(AdapterError, match=message):
        reader().read(good, "tuned")


def _rename(old: str, new: str) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def _poison(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"{_Q}.lora_B.weight"][3, 1] = np.inf


def _other_rank(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"{_Q}.lora_B.weight"] = np.ones((len(tensors[f"{_Q}.lora_B.weight"]), 3), np.float32)


@pytest.mark.parametrize(
    ("change", "fields", "message"),
    [
        (lambda t: t.clear(), {}, "has no tensors"),
        (lambda t: t.pop(f"{_Q}.lora_B.weight"), {}, "lora_A without lora_B"),
        (lambda t: t.pop(f"{_Q}.lora_A.weight"), {}, "lora_B without lora_A"),
        (_other_rank, {}, "lora_A of rank 4 and lora_B of rank 3"),
        (_poison, {}, "infinite or no numbers"),
        (lambda t: t.update({k: v.astype(np.int8) for k, v in t.items()}), {}, "numbers of type int8"),
        (lambda t: t.update({k: v.astype(np.int64) for k, v in t.items()}), {}, "numbers of type int64"),
        (lambda t: t.update({k: v[:, :-1] for k, v in t.items() if "lora_A" in k}), {}, "is the adapter of this model"),
        (lambda t: t.update({k: v[:-1] for k, v in t.items() if "lora_B" in k}), {}, "is the adapter of this model"),
        (lambda t: t.update({k: v[0] for k, v in t.items()}), {}, "must be a matrix"),
        (lambda t: t.update({f"{_Q}.lora_magnitude_vector": np.ones(3, np.float32)}), {}, "no matrices of LoRA"),
        (lambda t: t.update({f"{_Q}.lora_A.default.weight": t[f"{_Q}.lora_A.weight"]}), {}, "lora_A of .* twice"),
        (lambda t: t.update({f"{_Q[17:]}.lora_B.weight": t[f"{_Q}.lora_B.weight"]}), {}, "lora_B of .* twice"),
        (lambda t: t.update({f"{_Q}.lora_B.bias": np.ones(3, np.float32)}), {}, "no matrices of LoRA"),
        (_rename("layers.0", "layers.77"), {}, "unknown to LlamaForCausalLM"),
        (_rename("self_attn.q_proj", "self_attn.z_proj"), {"target_modules": ["z_proj"]}, "unknown to Llama"),
        (
            _rename("model.layers.0.self_attn.q_proj", "model.embed_tokens"),
            {"target_modules": "all-linear"},
            "and of embeddings are not implemented: it has one of model.embed_tokens; train without, or merge",
        ),
        (
            _rename("model.model.layers.0.self_attn.q_proj", "model.lm_head"),
            {"target_modules": "all-linear"},
            "not implemented: it has one of lm_head; train without, or merge it into its model.*merge_and_unload",
        ),
        (  # as `save_embedding_layers` leaves it
            lambda t: t.update({"base_model.model.lm_head.base_layer.weight": np.ones((3, 3), np.float32)}),
            {},
            "adapters of the output projection .* are not implemented: it has one of lm_head;",
        ),
        (
            lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((3, 3), np.float32)}),
            {},
            "and of embeddings are not implemented: it has one of model.embed_tokens;",
        ),
    ],
)
def test_tensors_that_are_refused(
    good: Path, change: Callable[[dict[str, np.ndarray]], None], fields: dict[str, Any], message: str
) -> None:
    change_tensors(good, change)
    set_field(good, **fields)
    with pytest.raises(AdapterError, match=message):
        reader().read(good, "tuned")


def test_rank_beyond_the_slots(good: Path) -> None:
    def widen(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{_Q}.lora_A.weight"] = np.ones((9, tensors[f"{_Q}.lora_A.weight"].shape[1]), np.float32)
        tensors[f"{_Q}.lora_B.weight"] = np.ones((len(tensors[f"{_Q}.lora_B.weight"]), 9), np.float32)

    change_tensors(good, widen)
    set_field(good, r=9)
    with pytest.raises(
        AdapterError, match=r"has rank 9, and slots are made for 8 at most; start with adapters.max_rank"
    ):
        reader().read(good, "tuned")


def _damage_config(directory: Path, text: str) -> None:
    (directory / "adapter_config.json").write_text(text)


def _truncate(directory: Path) -> None:
    file = directory / "adapter_model.safetensors"
    os.truncate(file, file.stat().st_size - 5)


def _overlap(directory: Path) -> None:
    """Both tensors claim the same bytes."""
    file = directory / "adapter_model.safetensors"
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    first, second = sorted(name for name in header if name != "__metadata__")
    header[second] = header[first]
    packed = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(packed)) + packed + data[8 + length :])


def _pipe(file: Path) -> None:
    """A read of it would wait for ever."""
    file.unlink()
    os.mkfifo(file)


def _pickle(directory: Path) -> None:
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: _damage_config(d, "[1, 2]"), "must hold a JSON object"),
        (lambda d: _damage_config(d, "{"), "cannot be read as JSON"),
        (lambda d: _damage_config(d, " " * (2**20 + 1)), "more than 1048576 bytes"),
        (lambda d: _damage_config(d, "[" * 200_000), "cannot be read as JSON"),
        (lambda d: _damage_config(d, f'{{"r": {"1" * 5000}}}'), "cannot be read as JSON"),
        (lambda d: _pipe(d / "adapter_config.json"), "is no file"),
        (lambda d: _pipe(d / "adapter_model.safetensors"), "adapter_model.safetensors is missing"),
        (lambda d: (d / "adapter_config.json").unlink(), "adapter_config.json is missing"),
        (lambda d: (d / "adapter_model.safetensors").unlink(), "adapter_model.safetensors is missing"),
        (_pickle, "pickled Python, which is never read"),
        (_truncate, "truncated, corrupt"),
        (_overlap, "truncated, corrupt"),
    ],
)
def test_damaged_files(good: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(good)
    with pytest.raises(AdapterError, match=message):
        reader().read(good, "tuned")


def test_experts_are_refused_by_name(good: Path) -> None:
    change_tensors(good, _rename("self_attn.q_proj", "block_sparse_moe.experts.1.w1"))
    set_field(good, target_modules=["w1"])
    with pytest.raises(AdapterError, match=r"experts\.\[1\]\.w1|experts\.1\.w1"):
        reader("mixtral").read(good, "tuned")


def test_a_header_of_very_many_tensors_is_not_read(good: Path) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{number}": entry for number in range(80_000)}).encode()
    (good / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(AdapterError, match=f"a header of {len(header)} bytes; at most 4194304 are read"):
        reader().read(good, "tuned")
