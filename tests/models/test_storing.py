"""What parameters are kept as: schemes and rules at load, on any number of devices, in every order of files."""

import json
from pathlib import Path
from typing import Any

import hf_oracle
import numpy as np
import pytest
import quantised_models as models
import quantised_oracle as oracle
from flax import nnx
from quantised_models import numbers_of
from test_loading import mesh_of

from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.kernels.storage import FLOAT, Arithmetic, Storage
from jaxserve.models import load_model, read_checkpoint
from jaxserve.models.loading import LoadedModel, decoder_config, plan_kept
from jaxserve.models.orbax_io import convert
from jaxserve.models.partition import Partition
from jaxserve.models.quantised import Kept, Quantisation
from jaxserve.models.sharding import arrays_of

ROW_INT8 = Storage(code="int8")


def load(name: str, scheme: str, devices: int = 1, rules: dict[str, str] | None = None) -> LoadedModel:
    wanted = Quantisation(scheme=scheme, rules=rules or {})
    return load_model(hf_oracle.FIXTURES / name, dtype="float32", mesh=mesh_of(devices), quantisation=wanted)


@pytest.mark.parametrize("name", ["llama", "gpt2"])  # [out, in] and [in, out] in the files
@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_rounding_is_near_and_the_same_on_any_number_of_devices(name: str, scheme: str) -> None:
    floats = {path: np.asarray(array, np.float64) for path, array in arrays_of(load(name, "none").state).items()}
    one = load(name, scheme)
    found = numbers_of(one)
    assert one.kept and found.keys() == floats.keys()
    steps = {"int8": 1 / 127 / 2, "int4": 1 / 7.5, "fp8": 1 / 16}[scheme]  # of the largest of a group
    for path, array in floats.items():
        if path not in one.kept:
            np.testing.assert_array_equal(found[path], array)
            continue
        storage, size = one.kept[path].storage, array.shape[-1]
        group = storage.group or size
        parts = array.reshape(*array.shape[:-1], -1, group)
        largest = np.abs(parts).max(axis=-1, keepdims=True)
        if storage.group is None:
            num_in = one_num_in(one, path)
            largest = np.abs(array).max(axis=tuple(range(array.ndim - num_in, array.ndim)), keepdims=True)[..., None]
        bound = (1 / 254 if path == ("lm_head",) and scheme == "int4" else steps) * largest
        assert (np.abs(found[path].reshape(parts.shape) - parts) <= bound * 1.001).all(), path
    cut = load(name, scheme, devices=2)
    for path, array in numbers_of(cut).items():
        if path in one.kept and path in cut.kept and array.shape == found[path].shape:
            # Groups that are too small on a device are kept as float32 numbers.
            as_floats = cut.kept[path].storage is None
            same = found[path].astype(np.float32) if as_floats else found[path]
            np.testing.assert_array_equal(array, same, err_msg=str(path))


def one_num_in(model: LoadedModel, path: tuple[Any, ...]) -> int:
    return dict(nnx.to_flat_state(model.state))[path].get_raw_value().num_in


def test_what_is_rounded_and_what_is_not() -> None:
    kept = load("llama", "int8").kept
    assert {path[2:4] for path in kept if path[0] == "layers"} == {
        ("attention", "qkv"),
        ("attention", "out"),
        ("mlp", "gate_up"),
        ("mlp", "down"),
    }
    assert ("embedding",) not in kept
    four = load("llama", "int4").kept
    assert four[("lm_head",)].storage == ROW_INT8
    assert ("layers", 0, "attention", "out", "kernel") not in four, "groups of 4: heads have 12 numbers"
    routed = load("qwen2_moe", "int8").kept
    assert not any("router" in path for path in routed)
    experts = {path[-1]: found for path, found in routed.items() if found.is_experts}
    assert experts.keys() == {"gate_up", "down"} and {found.storage for found in experts.values()} == {ROW_INT8}
    assert all(found.arithmetic == FLOAT for found in kept.values())
    assert load("llama", "int8-a8").kept[("lm_head",)].arithmetic.activations == "int8"
    rounded = load("llama", "int4-a8").kept
    assert {path: found.storage for path, found in rounded.items()} == {path: x.storage for path, x in four.items()}
    assert {found.arithmetic for found in rounded.values()} == {Arithmetic(activations="int8", block=128)}


def codes_of(kept: Kept) -> list[str | None]:
    """Of the weights that run side by side in a parameter."""
    return [part.kept and part.kept.storage and part.kept.storage.code for part in kept.parts]


def test_rules_name_whole_modules() -> None:
    first, down = r"model\.layers\.0\..*", r".*\.down_proj"
    kept = load("llama", "int8", rules={first: "none", down: "fp8", r"model\.embed_tokens": "int8"}).kept
    assert not any(path[:2] == ("layers", 0) for path in kept)
    assert kept[("layers", 1, "mlp", "down", "kernel")].storage.code == "float8_e4m3fn"
    assert kept[("embedding",)].storage == ROW_INT8
    mixed = load("llama", "none", rules={r".*\.q_proj": "int4", r".*\.[kv]_proj": "int8"}).kept
    assert [codes_of(found) for found in mixed.values()] == [["int4", "int8"]] * len(mixed)
    alone = load("llama", "none", rules={r".*\.q_proj": "int8"}).kept
    assert [codes_of(found) for found in alone.values()] == [["int8", None]] * len(alone), "keys and values are floats"
    assert len(mixed) == len(alone) > 0


def test_orbax_rounds_as_safetensors_do(tmp_path: Path) -> None:
    convert(hf_oracle.FIXTURES / "llama", tmp_path / "orbax")
    wanted = Quantisation(scheme="int8")
    read = load_model(tmp_path / "orbax", dtype="float32", quantisation=wanted)
    for path, array in numbers_of(load("llama", "int8")).items():
        np.testing.assert_array_equal(numbers_of(read)[path], array, err_msg=str(path))


def test_integers_of_two_widths_run_side_by_side(tmp_path: Path) -> None:
    """q of four bits in groups of 32 with zeros, k and v of eight bits with a scale for each row."""
    four, eight = models.weights_table(symmetric=False), models.weights_table(num_bits=8, strategy="channel")
    eight["group_size"] = None
    groups = {
        "group_0": {"targets": ["Linear"], "weights": four, "format": "pack-quantized"},
        "group_1": {"targets": ["re:.*[kv]_proj$"], "weights": eight, "format": "int-quantized"},
    }
    table = models.compressed_table("mixed-precision", four, config_groups=groups)
    makers = {
        "k_proj": oracle.int_quantized,
        "v_proj": oracle.int_quantized,
        "": lambda r, s: oracle.pack_quantized(r, s, asymmetric=True),
    }
    pair = models.llama_pair(tmp_path, table, makers)
    model = load_model(pair.quantised, dtype="float32")
    query, others = model.kept[("layers", 0, "attention", "qkv", "kernel")].parts
    assert query.kept is not None and query.kept.storage == Storage(code="int4", group=32, zeros=True)
    assert others.kept is not None and others.kept.storage == ROW_INT8
    found, dense = numbers_of(model), arrays_of(load_model(pair.dense, dtype="float32").state)
    for path, array in dense.items():
        np.testing.assert_array_equal(found[path].astype(np.float32), np.asarray(array), err_msg=str(path))


def test_random_weights_in_codes_depend_on_the_seed_alone() -> None:
    wanted = Quantisation(scheme="int8")
    one, two = (
        load_model(
            hf_oracle.FIXTURES / "llama", dtype="float32", mesh=mesh_of(n), random_weights=True, quantisation=wanted
        )
        for n in (1, 2)
    )
    for path, array in numbers_of(one).items():
        np.testing.assert_array_equal(numbers_of(two)[path].reshape(array.shape), array, err_msg=str(path))
    assert np.abs(numbers_of(one)[("lm_head",)]).max() > 0.03


@pytest.mark.parametrize(
    ("scheme", "rules", "said"),
    [
        ("int8", {"model.layers.0": "none"}, "whole name of no weight; near it are model.layers.0"),
        ("int8", {"(": "none"}, "is no regular expression"),
        ("none", {".*": "int3"}, "known: none, int8, int8-a8, int4, int4-a8, fp8"),
    ],
)
def test_rules_that_cannot_be(scheme: str, rules: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load("llama", scheme, rules=rules)


def test_a_scheme_for_a_quantised_checkpoint(tmp_path: Path) -> None:
    pair = models.llama_pair(tmp_path, *models.SCHEMES["int-quantized"])
    with pytest.raises(ConfigError, match="the checkpoint is quantised .*set it to auto"):
        load_model(pair.quantised, quantisation=Quantisation(scheme="int4"))
    kept = load_model(pair.quantised, quantisation=Quantisation(scheme="int8-a8")).kept
    assert {found.arithmetic.activations for found in kept.values()} == {"int8"}


def test_groups_in_another_order_than_the_config_says(tmp_path: Path) -> None:
    """desc_act false, and a g_idx that is not in order: no group of successive inputs has one scale."""
    make = lambda r, s: oracle.gptq(r, s, g_idx=models.shuffled(r, s[1], 32))  # noqa: E731
    pair = models.llama_pair(tmp_path, models.gptq_table(), make)
    with pytest.raises(CheckpointError, match="groups do not follow one another.*set desc_act"):
        load_model(pair.quantised)
    load_model(pair.quantised, quantisation=Quantisation(scheme="none"))


def test_a_share_that_no_group_divides_has_smaller_groups(tmp_path: Path) -> None:
    """18,944 columns over 8 devices are 2,368 each: groups of 128 inputs become two of 64, with the same scale."""
    config = models.LLAMA | {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28}
    config |= {"num_key_value_heads": 4, "quantization_config": models.gptq_table(group_size=128)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = read_checkpoint(tmp_path)
    family, decoder = decoder_config(checkpoint)
    for devices, group in ((1, 128), (8, 64)):
        partition = Partition.of(decoder, devices)
        kept = plan_kept(checkpoint, family, partition, Quantisation(), "tpu")
        down = kept["layers", 0, "mlp", "down", "kernel"].storage
        assert down == Storage(code="int4", group=group, zeros=True)


def test_formats_that_differ_run_side_by_side_on_any_number_of_devices(tmp_path: Path) -> None:
    """Gate in act-order, up with a scale for each row of eight bits; query, key and value in act-order of their own."""
    four = models.weights_table(actorder="group")
    eight = models.weights_table(num_bits=8, strategy="channel", group_size=None)
    groups = {
        "group_0": {"targets": ["Linear"], "weights": four, "format": "pack-quantized"},
        "group_1": {"targets": ["re:.*up_proj$"], "weights": eight, "format": "int-quantized"},
    }
    table = models.compressed_table("mixed-precision", four, config_groups=groups)
    makers = {
        "up_proj": oracle.int_quantized,
        "": lambda r, s: oracle.pack_quantized(r, s, g_idx=models.shuffled(r, s[1], 32)),
    }
    pair = models.llama_pair(tmp_path, table, makers)
    for devices in (1, 2):
        model = load_model(pair.quantised, dtype="float32", mesh=mesh_of(devices))
        gate_up = model.kept["layers", 0, "mlp", "gate_up", "kernel"]
        storages = [part.kept and part.kept.storage for part in gate_up.parts]
        assert storages == [Storage(code="int4", group=32, ordered=True), ROW_INT8]
        assert len(model.kept["layers", 0, "attention", "qkv", "kernel"].parts) == 3
        found = numbers_of(model)
        for path, array in arrays_of(load_model(pair.dense, dtype="float32", mesh=mesh_of(devices)).state).items():
            np.testing.assert_array_equal(found[path].astype(np.float32), np.asarray(array), err_msg=str(path))


def test_a_tied_table_of_codes(tmp_path: Path) -> None:
    """Rows are looked up in the array that the output is multiplied with."""
    pair = models.llama_pair(tmp_path, None, {}, models.LLAMA | {"tie_word_embeddings": True})
    wanted = Quantisation(scheme="none", rules={r"model\.embed_tokens": "int8"})
    model = load_model(pair.dense, dtype="float32", quantisation=wanted)
    assert model.kept.keys() == {("embedding",)} and model.kept[("embedding",)].storage == ROW_INT8
    plain = load_model(pair.dense, dtype="float32")
    logits = []
    for loaded in (model, plain):
        driver = hf_oracle.Driver(loaded, num_rows=1, max_len=32, page_size=16)
        logits.append(driver.prefill([np.arange(3, 20, dtype=np.int32)], [[]])[0])
    assert 0 < np.abs(logits[0] - logits[1]).max() < 0.02 * np.abs(logits[1]).max()
