"""Heads that are none, or another model's, are refused with the value, the limit and the remedy."""

import dataclasses
from pathlib import Path

import draft_files
import numpy as np
import pytest
from draft_files import SIZES
from test_draft_heads import loaded, target

from jaxserve.errors import CheckpointError
from jaxserve.models.decoder_config import AlibiConfig
from jaxserve.models.drafts import load_head, open_head, read_head_config


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        loaded(path)
    return str(error.value)


def eagle3(path: Path, values: dict | None = None, tensors: dict | None = None, without: str = "", **more) -> Path:
    base_values, base_tensors = draft_files.eagle3(**more)
    kept = {name: value for name, value in base_tensors.items() if name != without}
    return draft_files.write(path, base_values | (values or {}), kept | (tensors or {}))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hidden_size": 64}, "the head's hidden_size is 64, but that of its target LlamaForCausalLM is 48"),
        ({"vocab_size": 130}, "the head's vocab_size is 130, but that of its target LlamaForCausalLM is 128"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64"),
        ({"draft_vocab_size": 129}, "draft_vocab_size is 129, but LlamaForCausalLM has 128 tokens"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type is 'spiral', which is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}, "[0, 1, 1], where a layer is repeated"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, "has 2 layers, so [3] are outside 0 to 2"),
        ({"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}, "[-1] are outside"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, "must list numbers of layers"),
        (
            {"eagle_aux_hidden_state_layer_ids": None},
            "no eagle_aux_hidden_state_layer_ids is given, so the head reads [2, 1, -1]",
        ),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, but a head of one layer alone"),
        ({"model_type": "qwen3"}, "model_type 'qwen3', which is not supported (only llama)"),
        ({"model_type": "qwen3_next"}, "model_type 'qwen3_next', which is not supported"),
        ({"fc_norm": True}, "fc_norm is True"),
        ({"mystery": 3}, "mystery = 3: no reader of a draft head knows what this changes"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash', which is not supported"),
    ],
)
def test_config_that_does_not_fit(values: dict, said: str, tmp_path: Path) -> None:
    message = refused(eagle3(tmp_path / "head", values))
    assert said in message, message
    assert str(tmp_path / "head" / "config.json") in message


def test_speculators_layer_of_another_size(tmp_path: Path) -> None:
    values, tensors = draft_files.eagle3("speculators")
    values["transformer_layer_config"] = values["transformer_layer_config"] | {"vocab_size": 32000}
    assert "vocab_size is 32000" in refused(draft_files.write(tmp_path, values, tensors))


def ids_with(change) -> dict:
    _, tensors = draft_files.eagle3()
    ids = tensors["d2t"] + np.arange(50)
    change(ids)
    return {"d2t": ids - np.arange(50)}


def test_ids_outside(tmp_path: Path) -> None:
    def beyond(ids):
        ids[7] = 128

    def below(ids):
        ids[3] = -1

    assert "d2t turns draft id 7 into 128, but LlamaForCausalLM has the tokens 0 to 127" in refused(
        eagle3(tmp_path / "a", tensors=ids_with(beyond))
    )
    assert "draft id 3 into -1" in refused(eagle3(tmp_path / "b", tensors=ids_with(below)))


def test_ids_repeated(tmp_path: Path) -> None:
    def twice(ids):
        ids[9] = ids[4]

    message = refused(eagle3(tmp_path, tensors=ids_with(twice)))
    assert "d2t turns draft id 9 into token" in message
    assert "50 ids stand for 49 tokens" in message


def test_ids_that_disagree_with_marks(tmp_path: Path) -> None:
    _, tensors = draft_files.eagle3()
    more = tensors["t2d"].copy()
    more[np.flatnonzero(~more)[0]] = True
    assert "t2d marks 51 tokens as drafted, but d2t names 50" in refused(eagle3(tmp_path / "a", tensors={"t2d": more}))
    others = tensors["t2d"].copy()
    others[[np.flatnonzero(others)[0], np.flatnonzero(~others)[0]]] = [False, True]
    assert "t2d marks 50 tokens as drafted, but d2t names 50 others" in refused(
        eagle3(tmp_path / "b", tensors={"t2d": others})
    )


def test_ids_missing_or_of_another_shape(tmp_path: Path) -> None:
    assert "a vocabulary of 50 tokens, fewer than the 128" in refused(eagle3(tmp_path / "a", without="d2t"))
    assert "d2t is int64 [49], but must be int64 [50]" in refused(
        eagle3(tmp_path / "b", tensors={"d2t": np.zeros(49, np.int64)})
    )
    assert "d2t is float32" in refused(eagle3(tmp_path / "c", tensors={"d2t": np.zeros(50, np.float32)}))


def test_tensors_missing_unknown_and_of_another_shape(tmp_path: Path) -> None:
    assert "weights are missing: midlayer.hidden_norm.weight" in refused(
        eagle3(tmp_path / "a", without="midlayer.hidden_norm.weight")
    )
    more = {"midlayer.self_attn.q_norm.weight": np.ones(12, np.float32)}
    assert "weights are unknown to a eagle3 head: midlayer.self_attn.q_norm" in refused(
        eagle3(tmp_path / "b", tensors=more)
    )
    assert "lm_head.weight: [49, 48], not [50, 48]" in refused(
        eagle3(tmp_path / "c", tensors={"lm_head.weight": np.zeros((49, 48), np.float32)})
    )
    two_taps = {"eagle_aux_hidden_state_layer_ids": [0, 2]}
    assert "fc.weight: [48, 144], not [48, 96]" in refused(eagle3(tmp_path / "d", two_taps))


def test_pickled_weights(tmp_path: Path) -> None:
    path = eagle3(tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    message = refused(path)
    assert "pytorch_model.bin, which are pickled" in message
    assert "safetensors.torch.save_file" in message


def test_no_head_at_all(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    assert "is a file, but must be a directory" in refused(tmp_path / "file")
    path = draft_files.write(tmp_path / "other", {}, {"weight": np.zeros(3, np.float32)})
    assert "is no draft head of a known layout" in refused(path)
    (path / "config.json").unlink()
    assert "config.json is missing" in refused(path)


def test_cut_file(tmp_path: Path) -> None:
    path = eagle3(tmp_path)
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-100])
    assert "is truncated, corrupt or no safetensors file" in refused(path)


def test_positions_of_another_kind(tmp_path: Path) -> None:
    model = target()
    layers = tuple(dataclasses.replace(layer, position=AlibiConfig()) for layer in model.config.layers)
    with pytest.raises(CheckpointError, match="knows positions in another way"):
        read_head_config(
            open_head(eagle3(tmp_path)), dataclasses.replace(model.config, layers=layers), "BloomForCausalLM"
        )


def test_mtp_layer_of_other_positions(tmp_path: Path) -> None:
    values, tensors = draft_files.mtp()
    path = draft_files.write(tmp_path, values | {"rope_theta": 500_000.0}, tensors)
    assert "turns positions otherwise (theta 500000" in refused(path)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hidden_size": 64}, "hidden_size is 64"),
        ({"medusa_vocab_size": 3, "vocab_size": 3}, "vocab_size is 3"),
        ({"truncated_vocab_size": 20}, "truncated_vocab_size is 20"),
        ({"medusa_num_heads": 4}, "4 weights are missing: 3.[0-1].linear.bias, 3.[0-1].linear.weight"),
        ({"medusa_num_layers": 1}, "weights are unknown"),
        ({"medusa_num_heads": 0}, "medusa_num_heads is 0"),
        ({"num_heads": 5}, "medusa_num_heads 3 and num_heads 5 are names of the same field"),
    ],
)
def test_medusa_that_does_not_fit(values: dict, said: str, tmp_path: Path) -> None:
    base, tensors = draft_files.medusa(own=False)
    message = refused(draft_files.write(tmp_path, base | values, tensors))
    assert said in message, message


def test_the_target_counts_not_the_number_of_devices(tmp_path: Path) -> None:
    model = target(3)
    path = eagle3(tmp_path, {"vocab_size": model.partition.vocab_size})
    with pytest.raises(CheckpointError, match=r"vocab_size is \d+, but that of its target x is 128"):
        load_head(path, model.config, "x", partition=model.partition, mesh=model.mesh, dtype=np.dtype("float32"))
    assert SIZES.vocab == model.config.vocab_size
