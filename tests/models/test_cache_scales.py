"""Scales of eight-bit caches: read under all their names, copied with their heads, measured by the command."""

import json
from pathlib import Path

import hf_oracle
import jax
import numpy as np
import pytest
import quantised_models as models
from demo_tasks import TASKS, held_out_items
from test_loading import mesh_of

from jaxserve import cli
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.kernels.paged_attention import LARGEST
from jaxserve.models import load_model, plan_model, read_checkpoint, resolve_model_path
from jaxserve.models.cache_scales import CacheScales
from jaxserve.models.quantised import describe_quantisation
from jaxserve.models.safetensors_files import open_tensors
from jaxserve.models.sharding import arrays_of
from jaxserve.text import ChatTemplate, encode_chat, load_tokenizer

CONFIG = models.LLAMA | {"num_hidden_layers": 2}
E4M3 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
# With scales alone: as llm-compressor writes a model of which only the cache is quantised.
CACHE_ALONE = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "dense", "kv_cache_scheme": E4M3}


def checkpoint(path: Path, scales: dict[str, object], table: dict | None = None, config: dict = CONFIG) -> Path:
    """A Llama in float weights with these tensors below `model.layers.N.self_attn.`"""
    rng = np.random.default_rng(0)
    tensors = models.plain_tensors(rng, config)
    for name, shape in models.module_shapes(config).items():
        tensors[f"{name}.weight"] = (rng.normal(size=shape) * 0.05).astype(np.float32)
    for name, value in scales.items():
        tensors[f"model.layers.{name}"] = np.asarray(value, np.float32)
    return models.write(path, config | {"quantization_config": CACHE_ALONE if table is None else table}, tensors)


def named(key: str, value: str) -> dict[str, object]:
    """Scales of both layers: one number for keys, one for each head for values."""
    return {
        f"0.self_attn.{key}": 0.5,
        f"1.self_attn.{key}": [0.25],
        f"0.self_attn.{value}": [0.125, 2.0],
        f"1.self_attn.{value}": [[[1.0]], [[4.0]]],
    }


KEYS, VALUES = [[0.5, 0.5], [0.25, 0.25]], [[0.125, 2.0], [1.0, 4.0]]


def found(path: Path, dtype: str, **options: object) -> CacheScales:
    scales = plan_model(path, cache_dtype=dtype, **options).shapes.cache_scales
    assert scales is not None
    return scales


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_every_name_of_a_scale(key: str, value: str, tmp_path: Path) -> None:
    scales = found(checkpoint(tmp_path, named(key, value)), "float8_e4m3fn")
    assert (scales.keys.tolist(), scales.values.tolist()) == (KEYS, VALUES)
    assert not scales.is_one and "the checkpoint's tensors" in scales.describe("float8_e4m3fn")


def test_one_scale_for_keys_and_values_of_an_fp8_checkpoint(tmp_path: Path) -> None:
    table, make = models.SCHEMES["fp8 scalar"]
    pair = models.llama_pair(tmp_path, table, make)
    stored = open_tensors(pair.quantised).values()
    tensors = {tensor.name: tensor.read(tuple(slice(0, size) for size in tensor.shape)) for tensor in stored}
    tensors["model.layers.0.self_attn.kv_scale"] = np.float32([0.75])
    models.write(pair.quantised, models.LLAMA | {"quantization_config": table}, tensors)
    scales = found(pair.quantised, "float8_e4m3fn")
    assert (scales.keys.tolist(), scales.values.tolist()) == ([[0.75, 0.75]], [[0.75, 0.75]])
    load_model(pair.quantised)  # a cache of floats needs none, and reads none


def test_scales_follow_the_type_that_they_were_made_for(tmp_path: Path) -> None:
    """The same magnitude becomes the largest number, whatever the type."""
    path = checkpoint(tmp_path / "float", named("k_scale", "v_scale"))
    np.testing.assert_allclose(found(path, "int8").keys, np.float32(KEYS) * 448 / 127)
    table = CACHE_ALONE | {"kv_cache_scheme": E4M3 | {"type": "int"}}
    path = checkpoint(tmp_path / "int", named("k_scale", "v_scale"), table)
    np.testing.assert_array_equal(found(path, "int8").values, VALUES)
    (note,) = describe_quantisation(read_checkpoint(path), np.dtype("float32"), {})
    assert "scales for keys and values in int8" in note


def test_scales_that_cannot_be_used_are_said(tmp_path: Path) -> None:
    table = CACHE_ALONE | {"kv_cache_scheme": E4M3 | {"dynamic": True}}
    path = checkpoint(tmp_path, {}, table)
    (note,) = describe_quantisation(read_checkpoint(path), np.dtype("float32"), {})
    assert "dynamic True) are not used" in note
    assert found(path, "float8_e4m3fn").is_one


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"0.self_attn.k_scale": 0.0}, r"layers.0.self_attn.k_scale: the scale is 0.0, but must be .* cache.scales"),
        ({"0.self_attn.v_scale": [1.0, -2.0]}, r"v_scale: the scale of head 1 is -2.0"),
        ({"1.self_attn.k_scale": np.nan}, r"layers.1.self_attn.k_scale: the scale is nan"),
        ({"1.self_attn.k_scale": np.inf}, r"the scale is inf"),
        ({"1.self_attn.k_scale": [1.0, 1.0, 1.0]}, r"shape is \[3\], but .* one for each of 2 key/value heads"),
        ({"1.self_attn.v_scale": None}, r"1 of 4 scales of the KV cache are missing: model.layers.1.self_attn.v_scale"),
        ({"1.self_attn.z_scale": 1.0}, r"1 weights are unknown .*z_scale"),
    ],
)
def test_scales_that_cannot_be(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    scales = {name: value for name, value in (named("k_scale", "v_scale") | changes).items() if value is not None}
    path = checkpoint(tmp_path, scales)
    with pytest.raises(CheckpointError, match=message):
        plan_model(path, cache_dtype="float8_e4m3fn")


def write_ranges(path: Path, keys: list, values: list) -> Path:
    path.write_text(json.dumps({"format": "jaxserve cache ranges", "version": 1, "keys": keys, "values": values}))
    return path


@pytest.mark.parametrize(("heads", "devices"), [(2, 4), (3, 2)])
def test_scales_lie_beside_their_heads(heads: int, devices: int, tmp_path: Path) -> None:
    """Two heads on four devices are copied; three on two are padded, and a head of padding must divide by 1."""
    config = CONFIG | {"num_attention_heads": 4 * heads, "num_key_value_heads": heads, "head_dim": 16}
    path = checkpoint(tmp_path, {}, config=config)
    ranges = [[float(10 * layer + head + 1) for head in range(heads)] for layer in range(2)]
    file = write_ranges(path / "cache_scales.json", ranges, ranges)  # found beside config.json
    model = load_model(path, mesh=mesh_of(devices), cache_dtype="int8", random_weights=True)
    scales = np.float32(ranges) / 127
    whole = np.repeat(scales, 2, 1) if heads == 2 else np.append(scales, np.ones((2, 1), np.float32), 1)
    for layer in range(2):
        for name in ("k_scale", "v_scale"):
            array = arrays_of(model.state)["layers", layer, "attention", name]
            assert array.dtype == np.float32 and len(array.addressable_shards) == devices
            np.testing.assert_allclose(array, whole[layer], rtol=1e-6)
    assert str(file) in model.cache_scales.origin
    last = load_model(path, layers=range(1, 2), cache_dtype="int8")  # a stage of a pipeline
    np.testing.assert_allclose(arrays_of(last.state)["layers", 0, "attention", "k_scale"], scales[1], rtol=1e-6)


# --- calibration ----------------------------------------------------------------------------------------------------


def calibrate(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = cli.main(["calibrate-cache", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_the_command_measures_what_the_cache_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against a quantile by NumPy of all that a float32 cache holds; on four devices heads are copied."""
    prompts = [[1, *np.random.default_rng(seed).integers(30, 900, 59).tolist()] for seed in range(8)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in prompts))
    code, said = calibrate(capsys, "demo", tmp_path / "one.json", "--data", data)
    assert code == 0 and "measured on 480 tokens" in said
    code, _ = calibrate(capsys, "demo", tmp_path / "four.json", "--data", data, "--set", "parallel.tensor=4")
    assert code == 0
    one, four = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "four.json"))
    assert (one["tokens"], one["quantile"]) == (480, 0.9999)

    driver = hf_oracle.Driver(load_model("demo"), num_rows=8, max_len=64, page_size=16)
    for row, ids in enumerate(prompts):
        driver.step([hf_oracle.Chunk(row=row, start=0, tokens=np.asarray(ids, np.int32))])
    for layer, cache in enumerate(driver.caches):
        for side, axis in (("keys", 3), ("values", 2)):  # of a page, the tokens
            pages = np.abs(
                np.moveaxis(np.asarray(getattr(cache, side)), axis, 1)[driver.block_tables]
            )  # [R, P, t, K, H]
            held = pages.reshape(8, 64, 2, 64)[:, :60]
            kept = np.sort(held.transpose(2, 0, 1, 3).reshape(2, -1), axis=1)[:, -4]  # 30,720 numbers: 3 are above
            np.testing.assert_allclose(one[side][layer], kept, rtol=1e-5)
    for side in ("keys", "values"):
        np.testing.assert_allclose(four[side], one[side], rtol=1e-4)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "empty.txt", "holds no text"),
        ('{"text": 3}\n', "data.jsonl", "data.jsonl:1: text is 3, but must be text"),
        ('{"word": "a"}\n', "data.jsonl", "exactly one of text, prompt, prompt_token_ids, messages"),
        ('{"prompt_token_ids": [70000]}\n', "data.jsonl", "has token 70000, but the model has 1160"),
    ],
)
def test_text_that_cannot_be(
    text: str, name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    code, said = calibrate(capsys, "demo", tmp_path / "out.json", "--data", tmp_path / name)
    assert code == 2 and message in said
    assert not (tmp_path / "out.json").exists()


def test_a_file_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out.json").write_text("mine")
    code, said = calibrate(capsys, "demo", tmp_path / "out.json", "--data", tmp_path / "data.txt")
    assert code == 2 and "exists already" in said
    code, said = calibrate(capsys, "demo", tmp_path / "none" / "out.json", "--data", tmp_path / "data.txt")
    assert code == 2 and "there is no directory" in said


# --- quality --------------------------------------------------------------------------------------------------------

# Of answers, at most three times what docs/quantisation.md tells of the same model in NumPy: a mean over positions.
MOST = {"int8": 3 * 4.6e-6, "float8_e4m3fn": 3 * 6.5e-5}


@pytest.mark.slow
def test_the_demo_model_says_the_same() -> None:
    tokenizer = load_tokenizer(resolve_model_path("demo"))
    template = ChatTemplate.of(tokenizer)
    chats = []
    for task in TASKS:
        for item in held_out_items(task, 6, 1) if task != "lookup_long" else ():
            asked = encode_chat(tokenizer, template, item.messages)
            answer = {"role": "assistant", "content": item.answer}
            whole = encode_chat(tokenizer, template, [*item.messages, answer], add_generation_prompt=False)
            if len(whole) <= 120:
                chats.append((np.asarray(whole, np.int32), len(asked)))
    assert sum(len(whole) - begin for whole, begin in chats) > 500

    def log_probs(dtype: str) -> np.ndarray:
        model = load_model("demo", dtype="float32", cache_dtype=dtype)
        driver = hf_oracle.Driver(model, num_rows=1, max_len=128, page_size=16, cache_dtype=dtype)
        logits = [driver.prefill([whole], [[]])[0][begin - 1 : -1] for whole, begin in chats]
        return np.asarray(jax.nn.log_softmax(np.concatenate(logits)), np.float64)

    exact = log_probs("float32")
    for dtype, most in MOST.items():
        found = log_probs(dtype)
        divergence = (np.exp(exact) * (exact - found)).sum(-1)
        assert divergence.mean() <= most, (dtype, divergence.mean())
        assert (found.argmax(-1) == exact.argmax(-1)).all(), dtype


def test_int8_without_scales_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, {})
    with pytest.raises(ConfigError, match="has no scales for keys and values"):
        plan_model(path, cache_dtype="int8")
    assert found(path, "int8", random_weights=True).is_one, "whose numbers mean nothing"
    assert set(LARGEST) == {"int8", "float8_e4m3fn", "float8_e5m2"}
