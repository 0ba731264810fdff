"""Directories as people have them: more files and tensors than the model needs, or fewer than the usual ones.

What is loaded is what transformers loads (its rules are named at the rows), but where that would be random weights.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_oracle
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_bad_gguf import model

from jaxserve.api import Pooling, RequestOptions, SamplingParams
from jaxserve.assemble.answers import embedding_rules
from jaxserve.config.schema import ModelConfig
from jaxserve.engine.inputs import ModelInfo, prepare_request
from jaxserve.errors import CheckpointError, UnsupportedOption
from jaxserve.models import decoder_config, load_model, read_checkpoint
from jaxserve.models.family import FAMILIES, find_family
from jaxserve.models.orbax_io import convert
from jaxserve.models.safetensors_files import open_tensors

Tensors = dict[str, np.ndarray]
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def copied(fixture: str, to: Path) -> tuple[Path, Tensors]:
    """A fixture without its weights, and these."""
    directory = Path(shutil.copytree(hf_oracle.FIXTURES / fixture, to / fixture))
    tensors: Tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (directory / INDEX).unlink(missing_ok=True)
    return directory, tensors


def edit_config(directory: Path, **fields: Any) -> None:
    file = directory / "config.json"
    values = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in values.items() if value != "DELETE"}))


def halves(tensors: Tensors) -> tuple[Tensors, Tensors]:
    names = sorted(tensors)
    return {n: tensors[n] for n in names[:10]}, {n: tensors[n] for n in names[10:]}


def write(directory: Path, weight_map: dict[str, str] | None = None, **files: Tensors) -> None:
    """Files by their names, with `_` for `-`, and without an ending."""
    for name, tensors in files.items():
        save_file(tensors, str(directory / f"{name.replace('_', '-')}.safetensors"))
    if weight_map is not None:
        (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def named(**files: Tensors) -> dict[str, str]:
    return {tensor: f"{name.replace('_', '-')}.safetensors" for name, tensors in files.items() for tensor in tensors}


def weights_of(directory: Path) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(load_model(directory).state)]


@pytest.fixture(scope="module")
def whole() -> list[np.ndarray]:
    return weights_of(hf_oracle.FIXTURES / "llama")


def changed(tensors: Tensors) -> Tensors:
    return {name: tensor + 1 for name, tensor in tensors.items()}


def _superseded(first: Tensors, second: Tensors) -> dict[str, Any]:
    old = changed({n: first[n] for n in [*first][:2]})
    return {"weight_map": named(a=first, b=second), "a": first, "b": second | old}


def _superseded_in_the_first(first: Tensors, second: Tensors) -> dict[str, Any]:
    return {"weight_map": named(a=first, b=second), "a": first | changed(second), "b": second}


def _unnamed(first: Tensors, second: Tensors) -> dict[str, Any]:
    more = {"model.layers.7.mlp.up_proj.weight": np.ones(3, np.float32), "extra": np.ones(2, np.uint16)}
    return {"weight_map": named(a=first, b=second), "a": first | more, "b": second}


def _no_index(first: Tensors, second: Tensors) -> dict[str, Any]:
    return {"model_00001_of_00002": first, "model_00002_of_00002": second}


def _one_shard(first: Tensors, second: Tensors) -> dict[str, Any]:
    return {"model_00001_of_00001": first | second}


def _stale_index(first: Tensors, second: Tensors) -> dict[str, Any]:
    """Transformers looks for model.safetensors before it looks for an index."""
    return {"weight_map": named(gone=first | second), "model": first | second}


def _stale_shards(first: Tensors, second: Tensors) -> dict[str, Any]:
    old = {"a": changed(first), "b": changed(second)}
    return {"weight_map": named(**old), "model": first | second, **old}


def _index_of_one_file(first: Tensors, second: Tensors) -> dict[str, Any]:
    return {"weight_map": named(model=first | second), "model": first | second}


def _index_of_more(first: Tensors, second: Tensors) -> dict[str, Any]:
    return {"weight_map": named(model=first, more=second), "model": first, "more": second}


def _unread(first: Tensors, second: Tensors) -> dict[str, Any]:
    """Buffers and value heads, which transformers takes for unexpected, of types that no weight has."""
    layer, table = "model.layers.0.self_attn.rotary_emb", np.ones((4, 6))
    more = {
        f"{layer}.cos_cached": table,
        f"{layer}.sin_cached": table.astype(np.float32),
        f"{layer}.inv_freq": table[0],
        "model.rotary_emb.inv_freq": table[0].astype(np.uint16),
        "rotary_emb.inv_freq": table[0],
        "transformer.h.0.self_attention.maybe_rotary.inv_freq": table[0],
        "model.rotary_emb.original_inv_freq": table[0],
        "model.embeddings.position_ids": np.arange(4),
        "v_head.summary.weight": table,
        "v_head.summary.bias": table[0],
        "value_head.weight": table.astype(np.int16),
    }
    return {"model": first | second | more}


def _float64(first: Tensors, second: Tensors) -> dict[str, Any]:
    tensors = first | second
    return {"model": {n: t.astype(np.float64) if "norm" in n or "k_proj" in n else t for n, t in tensors.items()}}


def _base_names(first: Tensors, second: Tensors) -> dict[str, Any]:
    return {"model": {name.removeprefix("model."): tensor for name, tensor in (first | second).items()}}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_superseded, None),
        (_superseded_in_the_first, None),
        (_unnamed, "does not name 2 tensors of its files, which are passed over: extra, model.layers.7.mlp"),
        (_no_index, "all 2 numbered files are read"),
        (_one_shard, "all 1 numbered files are read"),
        (_stale_index, f"{INDEX} is passed over: model.safetensors lies beside it"),
        (_stale_shards, f"{INDEX} is passed over"),
        (_index_of_one_file, None),
        (_index_of_more, None),
        (_unread, None),
        (_float64, None),
        (_base_names, None),
    ],
)
def test_files_that_are_read_as_the_whole_model(
    make: Callable[[Tensors, Tensors], dict[str, Any]],
    said: str | None,
    whole: list[np.ndarray],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory, tensors = copied("llama", tmp_path)
    write(directory, **make(*halves(tensors)))
    for own, expected in zip(weights_of(directory), whole, strict=True):
        np.testing.assert_array_equal(own, expected)
    assert len(caplog.messages) == (said is not None), caplog.messages
    assert said is None or (said in caplog.text and str(directory) in caplog.text)


def _missing(first: Tensors, second: Tensors) -> dict[str, Any]:
    return {"model_00001_of_00004": first, "model_00003_of_00004": second}


def _in_two(first: Tensors, second: Tensors) -> dict[str, Any]:
    return {"model_00001_of_00002": first | dict([*second.items()][:1]), "model_00002_of_00002": second}


def _two_sequences(first: Tensors, second: Tensors) -> dict[str, Any]:
    return {"model_00001_of_00002": first, "model_00002_of_00003": second}


def _other_names(first: Tensors, second: Tensors) -> dict[str, Any]:
    return {"consolidated": first | second}


def _lacking(first: Tensors, second: Tensors) -> dict[str, Any]:
    return {"weight_map": named(a=first, b=second), "a": {**first}, "b": dict([*second.items()][1:])}


def _in_the_other_file(first: Tensors, second: Tensors) -> dict[str, Any]:
    moved = dict([*second.items()][:1])
    return {"weight_map": named(a=first, b=second), "a": first | moved, "b": dict([*second.items()][1:])}


def _wrapped(mark: str) -> Callable[[Tensors, Tensors], dict[str, Any]]:
    return lambda first, second: {"model": {mark + name: tensor for name, tensor in (first | second).items()}}


def _wrapped_within(first: Tensors, second: Tensors) -> dict[str, Any]:
    return {"model": {n.replace("model.layers", "model._orig_mod.layers"): t for n, t in (first | second).items()}}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            _missing,
            ["should have 4 files", "model-00002-of-00004.safetensors, model-00004-of-00004.safetensors are missing"],
        ),
        (_in_two, [SECOND, f"are in {FIRST}, too", "fetch the index"]),
        (_two_sequences, ["several sequences", FIRST, "model-00002-of-00003.safetensors"]),
        (_other_names, ["neither model.safetensors nor", "consolidated.safetensors", "rename the file"]),
        (_lacking, [INDEX, "promises tensors that its files lack: model."]),
        (_in_the_other_file, [INDEX, "promises tensors that its files lack: model."]),
        (_wrapped("_orig_mod."), ["model.safetensors:", "'_orig_mod.'", "torch.compile", "save model._orig_mod"]),
        (_wrapped_within, ["model.safetensors:", "'_orig_mod.'", "torch.compile"]),
        (_wrapped("module."), ["DistributedDataParallel"]),
        (_wrapped("base_model.model."), ["merge_and_unload"]),
    ],
)
def test_files_that_leave_in_doubt_what_is_meant(
    make: Callable[[Tensors, Tensors], dict[str, Any]], said: list[str], tmp_path: Path
) -> None:
    directory, tensors = copied("llama", tmp_path)
    write(directory, **make(*halves(tensors)))
    with pytest.raises(CheckpointError) as caught:
        load_model(directory)
    for words in [str(directory), *said]:
        assert words in str(caught.value), (words, str(caught.value))


# ---- base models -----------------------------------------------------------------------------------------------------

FAMILY_FIXTURES = [
    path.parent.name
    for path in sorted(hf_oracle.FIXTURES.glob("*/config.json"))
    if "architectures" in (config := json.loads(path.read_text())) and "quantization_config" not in config
]


@pytest.mark.parametrize(
    "fixture", ["llama", "qwen2", "mistral_full", "gemma2", "phi3", "mixtral", "qwen3_moe", "olmo2"]
)
def test_a_base_model_has_names_without_the_prefix_and_no_head(fixture: str, tmp_path: Path) -> None:
    """Embedding models are published so; transformers adds the prefix for every family."""
    directory, tensors = copied(fixture, tmp_path)
    config = decoder_config(read_checkpoint(hf_oracle.FIXTURES / fixture))[1]
    base = {
        name.removeprefix("model.").removeprefix("transformer."): t
        for name, t in tensors.items()
        if not name.startswith("lm_head.")
    }
    save_file(base, str(directory / "model.safetensors"))
    found = load_model(directory)
    assert found.config.has_head == config.tied_embeddings
    same = dataclasses.replace(config, has_head=found.config.has_head, tied_embeddings=True)
    assert found.config == same
    if not found.config.has_head:
        with pytest.raises(CheckpointError, match="no output projection"):
            convert(directory, tmp_path / "orbax")


def test_a_base_model_embeds_and_generates_nothing() -> None:
    model = ModelInfo(name="base", vocab_size=300, max_model_len=64, eos_token_ids=(257,), generates=False)

    def prepare(options: RequestOptions) -> None:
        kept = {"request_id": "a", "model": model, "tokenizer": None, "seed": 0, "arrival_s": 0.0}
        prepare_request([1, 2], SamplingParams(), options, **kept)

    prepare(RequestOptions(pooling=True))
    with pytest.raises(UnsupportedOption, match=r"'base' has no output projection \(lm_head\).*ask for an embedding"):
        prepare(RequestOptions())


def test_a_part_of_the_head_is_a_head(tmp_path: Path) -> None:
    """As of a quantised one, or a bias that is left over: then the weight is missing."""
    directory, tensors = copied("llama", tmp_path)
    tensors["lm_head.scale"] = tensors.pop("lm_head.weight")[0].copy()
    save_file(tensors, str(directory / "model.safetensors"))
    with pytest.raises(CheckpointError, match=r"1 weights are missing: lm_head.weight; 1 weights are unknown"):
        load_model(directory)


BASES = [
    ("llama", "LlamaForCausalLM", ["LlamaModel", "LLaMAForCausalLM", "LLaMAModel"]),
    ("qwen2", "Qwen2ForCausalLM", ["Qwen2Model"]),
    ("qwen3", "Qwen3ForCausalLM", ["Qwen3Model"]),
    ("mistral", "MistralForCausalLM", ["MistralModel"]),
    ("gpt2", "GPT2LMHeadModel", ["GPT2Model"]),
    ("gemma3_text", "Gemma3ForCausalLM", ["Gemma3TextModel"]),
    ("qwen2_vl", "Qwen2VLForConditionalGeneration", ["Qwen2VLModel"]),
    ("opt", "OPTForCausalLM", ["OPTModel"]),
]


@pytest.mark.parametrize(("model_type", "architecture", "names"), BASES)
def test_an_architecture_by_its_model_type(model_type: str, architecture: str, names: list[str]) -> None:
    for given in ({}, {"architectures": None}, {"architectures": []}, *({"architectures": [name]} for name in names)):
        found = find_family({"model_type": model_type, **given}, "config.json")
        assert found is FAMILIES.get(architecture)
    for name in ("MyOwnForCausalLM", "LlamaForSequenceClassification", f"{model_type}ForRewardModel"):
        with pytest.raises(CheckpointError, match=rf"config.json: architecture '{name}' is unknown"):
            find_family({"model_type": model_type, "architectures": [name]}, "config.json")


@pytest.mark.parametrize("fixture", FAMILY_FIXTURES)
def test_every_family_is_found_by_its_model_type(fixture: str) -> None:
    config = read_checkpoint(hf_oracle.FIXTURES / fixture).config
    own = find_family(config, "config.json")
    found = find_family({**config, "architectures": None}, "config.json")
    assert dataclasses.replace(found, architecture=own.architecture) == own  # MPT has two spellings


def test_stored_in_float64_and_converted(tmp_path: Path) -> None:
    """Orbax's arrays are made by JAX, which has no numbers of that length."""
    directory, tensors = copied("llama", tmp_path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float64)
    save_file(tensors, str(directory / "model.safetensors"))
    assert open_tensors(directory)["model.norm.weight"].dtype == "float64"
    convert(directory, tmp_path / "orbax")
    np.testing.assert_array_equal(weights_of(tmp_path / "orbax")[-1], weights_of(directory)[-1])


# ---- GGUF ------------------------------------------------------------------------------------------------------------

YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 2}


@pytest.mark.parametrize(
    "keys",
    [
        {"pooling_type": 3},
        {"attention.causal": True},
        {"rope.scaling.yarn_log_multiplier": 0.1},
        {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
        {**YARN, "rope.scaling.yarn_log_multiplier": 0.0, "rope.scaling.yarn_ext_factor": 1.0},
        {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
        {"rope.scaling.factor": 1.0, "rope.scaling.attn_factor": 1.0},
        {"rope.scale_linear": 1.0},
        {"attention.sliding_window": 0},
        {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True]},
        {"rope.freq_base_swa": 77.0, "rope.dimension_count_swa": 4},
        {"attention.layer_norm_epsilon": 1e-6},
        {"attention.clamp_kqv": 0.0, "attention.max_alibi_bias": 0.0, "attention.scale": 0.0},
        {"logit_scale": 1.0, "embedding_scale": 0.0, "residual_scale": 1.0, "final_logit_softcapping": 0.0},
        {"expert_count": 0, "expert_group_count": 0, "leading_dense_block_count": 0, "nextn_predict_layers": 0},
        {"embedding_length_out": 64},
        {"tensor_data_layout": "Meta AI original pth"},
    ],
)
def test_keys_of_gguf_without_effect(keys: dict[str, Any], tmp_path: Path) -> None:
    plain = {key: value for key, value in keys.items() if key in YARN and keys.get("rope.scaling.type") == "yarn"}
    found = [
        decoder_config(read_checkpoint(model(tmp_path, {f"llama.{key}": value for key, value in own.items()})))[1]
        for own in (plain, keys)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.causal", False),
        ("rope.scaling.factor", 4.0),
        ("rope.scaling.attn_factor", 1.2),
        ("rope.scale_linear", 2.0),
        ("rope.scaling.yarn_ext_factor", 1.0),
        ("attention.sliding_window", 4),
        ("attention.clamp_kqv", 8.0),
        ("logit_scale", 16.0),
        ("final_logit_softcapping", 30.0),
        ("expert_group_count", 4),
        ("nextn_predict_layers", 1),
        ("embedding_length_out", 32),
        ("something.new", 1),
    ],
)
def test_keys_of_gguf_that_change_numbers(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"model.gguf: .*{key}"):
        decoder_config(read_checkpoint(model(tmp_path, {f"llama.{key}": value})))


def test_a_factor_of_yarn_that_changes_numbers(tmp_path: Path) -> None:
    keys = {f"llama.{key}": value for key, value in YARN.items()} | {"llama.rope.scaling.yarn_log_multiplier": 0.1}
    with pytest.raises(CheckpointError, match=r"model.gguf: llama.rope.scaling.yarn_log_multiplier = 0.1"):
        decoder_config(read_checkpoint(model(tmp_path, keys)))


@pytest.mark.parametrize(
    ("number", "pooling"), [(None, "mean"), (0, "mean"), (1, "mean"), (2, "first"), (3, "last"), (4, None)]
)
def test_the_pooling_of_a_gguf_file_is_that_of_its_embeddings(
    number: int | None, pooling: str | None, tmp_path: Path
) -> None:
    path = str(model(tmp_path, {"llama.pooling_type": number}))
    if pooling is None:
        with pytest.raises(CheckpointError, match=r"model.gguf: llama.pooling_type is 4.*set model.pooling"):
            embedding_rules(ModelConfig(path=path))
        assert embedding_rules(ModelConfig(path=path, pooling="last")).pooling is Pooling.LAST
    else:
        assert embedding_rules(ModelConfig(path=path)).pooling is Pooling(pooling)
