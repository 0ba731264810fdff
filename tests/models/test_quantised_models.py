"""Whole quantised checkpoints: on any number of devices, the parameters are those of the float weights to the bit."""

import json
from pathlib import Path

import hf_oracle
import jax
import numpy as np
import pytest
import quantised_models as models
import quantised_oracle as oracle
from test_loading import mesh_of

from jaxserve.config.schema import ParallelConfig
from jaxserve.kernels.storage import Storage
from jaxserve.models import load_model, read_checkpoint
from jaxserve.models.quantised import Quantisation, describe_quantisation
from jaxserve.models.safetensors_files import TensorSource
from jaxserve.models.sharding import arrays_of
from jaxserve.runtime.mesh import make_meshes


def assert_same_parameters(pair: models.Pair, dtype: str, mesh: jax.sharding.Mesh) -> int:
    """Widened, and as codes with their scales. Returns the number of parameters that are kept as codes."""
    wanted = arrays_of(load_model(pair.dense, dtype=dtype, mesh=mesh).state)
    widened = load_model(pair.quantised, dtype=dtype, mesh=mesh, quantisation=Quantisation(scheme="none"))
    assert not widened.kept
    coded = load_model(pair.quantised, dtype=dtype, mesh=mesh)
    for state in (widened.state, coded.state):
        found = models.numbers_of_state(state)
        assert found.keys() == wanted.keys()
        for path, array in wanted.items():
            # Twice: the float weights are products rounded to float32 and then to their dtype.
            rounded = found[path].astype(np.float32).astype(dtype)
            np.testing.assert_array_equal(rounded, np.asarray(array), err_msg=str(path))
    return len(coded.kept)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", models.SCHEMES)
def test_parameters_are_those_of_the_float_weights(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups and blocks do not divide the shards: 160 inputs of down_proj over 4 devices are 40 each."""
    pair = models.llama_pair(tmp_path, *models.SCHEMES[scheme])
    on_cpus = load_model(pair.quantised, dtype="float32").kept
    assert on_cpus
    monkeypatch.setattr("jaxserve.models.loading.backend_of", lambda mesh: "tpu")
    for dtype, devices in (("float32", 1), ("bfloat16", 1), ("float32", 4)):
        assert_same_parameters(pair, dtype, mesh_of(devices))


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    pair = models.gpt_oss_pair(tmp_path)
    for tensor, expert in ((1, 1), (2, 1), (4, 1), (4, 2)):
        mesh = make_meshes(ParallelConfig(tensor=tensor, expert=expert), jax.devices())[0][0]
        # Over four devices an expert's 96 columns are 24 each: groups of 8, which are too small.
        kept = assert_same_parameters(pair, "float32", mesh)
        assert kept == (2 if tensor // expert < 4 else 1)


@pytest.mark.parametrize(("architecture", "scheme"), [("Llama", "gptq desc_act"), ("Qwen2", "pack-quantized")])
def test_logits_are_those_of_the_float_weights(architecture: str, scheme: str, tmp_path: Path) -> None:
    # Heads of 12, as the fixtures have: the kernel of attention is compiled for a size of heads.
    config = models.LLAMA | {"architectures": [f"{architecture}ForCausalLM"], "head_dim": 12}
    pair = models.llama_pair(tmp_path, *models.SCHEMES[scheme], config=config)
    prompt, logits = np.arange(3, 40, dtype=np.int32), []
    for path, devices in ((pair.dense, 1), (pair.quantised, 2)):
        model = load_model(path, dtype="float32", mesh=mesh_of(devices))
        driver = hf_oracle.Driver(model, num_rows=1, max_len=64, page_size=16)
        logits.append(driver.prefill([prompt], [[]])[0])
    assert np.abs(logits[0]).max() > 0.1
    assert np.abs(logits[0] - logits[1]).max() < 1e-4


def test_three_formats_in_one_kernel(tmp_path: Path) -> None:
    """q in words, k float because it is ignored, v in float8: together they are one parameter."""
    q, v = models.weights_table(), models.weights_table(num_bits=8, type="float", strategy="channel", group_size=None)
    groups = {
        "group_0": {"targets": ["Linear"], "weights": q, "format": "pack-quantized"},
        "group_1": {"targets": ["re:.*v_proj$"], "weights": v, "format": "float-quantized"},
    }
    table = models.compressed_table("mixed-precision", q, config_groups=groups, ignore=["lm_head", "re:.*k_proj"])
    makers = {"k_proj": None, "v_proj": oracle.float8, "": oracle.pack_quantized}
    pair = models.llama_pair(tmp_path, table, makers)
    assert_same_parameters(pair, "float32", mesh_of(2))
    parts = load_model(pair.quantised, dtype="float32").kept["layers", 0, "attention", "qkv", "kernel"].parts
    query, value = Storage(code="int4", group=32), Storage(code="float8_e4m3fn")
    assert [part.kept and part.kept.storage for part in parts] == [query, None, value]


def test_dynamic_settings_of_gptq(tmp_path: Path) -> None:
    dynamic = {r"-:.*self_attn\.k_proj": {}, r"+:.*\.mlp\.": {"bits": 8, "group_size": -1}}
    makers = {
        "k_proj": None,
        "gate_proj": lambda r, s: oracle.gptq(r, s, bits=8, group=-1),
        "up_proj": lambda r, s: oracle.gptq(r, s, bits=8, group=-1),
        "down_proj": lambda r, s: oracle.gptq(r, s, bits=8, group=-1),
        "": oracle.gptq,
    }
    pair = models.llama_pair(tmp_path, models.gptq_table(dynamic=dynamic), makers)
    assert_same_parameters(pair, "float32", mesh_of(1))


def test_lists_mean_whole_components(tmp_path: Path) -> None:
    """`layers.1` is not `layers.10`, and `gate` not `gate_proj`."""
    config = models.LLAMA | {"num_hidden_layers": 11, "hidden_size": 32, "intermediate_size": 32}
    table = models.awq_table(modules_to_not_convert=["layers.1", "gate"])
    pair = models.llama_pair(tmp_path, table, {f"1.{n}": None for n in _names(1)} | {"": oracle.awq}, config)
    assert_same_parameters(pair, "float32", mesh_of(1))


def _names(layer: int) -> list[str]:
    start = f"model.layers.{layer}."
    config = models.LLAMA | {"num_hidden_layers": 2}
    return [name.removeprefix(start) for name in models.module_shapes(config) if name.startswith(start)]


def test_settings_in_a_file_of_their_own_and_biases_that_a_tool_added(tmp_path: Path) -> None:
    """As AutoGPTQ writes: no quantization_config, but quantize_config.json, and biases of zeros."""

    def with_bias(rng: np.random.Generator, shape: tuple[int, int]) -> oracle.Stored:
        stored = oracle.gptq(rng, shape)
        stored.tensors["bias"] = np.zeros(shape[0], np.float16)
        return stored

    pair = models.llama_pair(tmp_path, None, with_bias)
    (pair.quantised / "quantize_config.json").write_text('{"bits": 4, "group_size": 32, "sym": false}')
    assert_same_parameters(pair, "float32", mesh_of(1))


def test_a_device_reads_its_part_of_the_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, int] = {}
    original = TensorSource.read

    def counting(self: TensorSource, index: tuple[slice, ...]) -> np.ndarray:
        block = original(self, index)
        sizes[self.name] = max(sizes.get(self.name, 0), block.size)
        return block

    pair = models.llama_pair(tmp_path, *models.SCHEMES["gptq"])
    monkeypatch.setattr(TensorSource, "read", counting)
    load_model(pair.quantised, mesh=mesh_of(4))
    layer = "model.layers.0"
    assert sizes[f"{layer}.mlp.up_proj.qweight"] == 64 // 8 * 160 // 4
    assert sizes[f"{layer}.mlp.down_proj.qweight"] == 160 // 8 // 4 * 64
    assert sizes[f"{layer}.mlp.down_proj.scales"] == 64 * 2  # 40 inputs touch at most two groups of 64


def test_bands_bound_what_is_held_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight is widened in bands along the axis that is outermost in the file, and comes out the same."""
    monkeypatch.setattr("jaxserve.models.shard_reading._BAND_BYTES", 4096)
    largest = 0
    original = TensorSource.read

    def counting(self: TensorSource, index: tuple[slice, ...]) -> np.ndarray:
        nonlocal largest
        block = original(self, index)
        largest = max(largest, block.size if self.name.endswith("qweight") else 0)
        return block

    pair = models.llama_pair(tmp_path, *models.SCHEMES["gptq"])
    monkeypatch.setattr(TensorSource, "read", counting)
    assert_same_parameters(pair, "float32", mesh_of(1))
    assert largest * 8 * 4 <= 3 * 4096, largest


def test_a_start_says_what_becomes_of_codes_and_activations(tmp_path: Path) -> None:
    weights = models.weights_table(num_bits=8, strategy="channel", group_size=None)
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    table = models.compressed_table(
        "int-quantized", weights, config_groups={"g": group}, kv_cache_scheme={"num_bits": 8}
    )
    pair = models.llama_pair(tmp_path, table, oracle.int_quantized)
    widened, activation, cache = describe_quantisation(read_checkpoint(pair.quantised), np.dtype("float32"), {})
    assert "codes of 8 bits are widened to float32 at load" in widened
    assert "activations of 8 bits" in activation and "kv_cache_scheme" in cache
    assert describe_quantisation(read_checkpoint(pair.dense), np.dtype("float32"), {}) == ()
    kept, *_ = describe_quantisation(
        read_checkpoint(pair.quantised), np.dtype("float32"), load_model(pair.quantised).kept
    )
    assert "kept as codes: 4 weights (int8, a scale for each row)" in kept


def _args(**changes: object) -> dict[str, object]:
    base = {"actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8}
    return base | {"observer": "minmax", "observer_kwargs": {}, "strategy": "channel", "symmetric": True} | changes


def _compressed(form: str, weights: dict[str, object], activations: dict[str, object] | None) -> dict[str, object]:
    group = {"input_activations": activations, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group},
        "format": form,
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.13.0",
    }


# As the tools write them into published configs.
PUBLISHED = {
    "optimum's gptq": {
        "batch_size": 1,
        "bits": 4,
        "block_name_to_quantize": None,
        "cache_block_outputs": True,
        "damp_percent": 0.01,
        "dataset": None,
        "desc_act": False,
        "exllama_config": {"version": 1},
        "group_size": 128,
        "max_input_length": None,
        "model_seqlen": None,
        "module_name_preceding_first_block": None,
        "modules_in_block_to_quantize": None,
        "pad_token_id": None,
        "quant_method": "gptq",
        "sym": True,
        "tokenizer": None,
        "true_sequential": True,
        "use_cuda_fp16": False,
        "use_exllama": True,
    },
    "gptqmodel's gptq": {
        "bits": 4,
        "checkpoint_format": "gptq",
        "desc_act": True,
        "dynamic": {"-:.*mlp.*": {}},
        "group_size": 128,
        "lm_head": False,
        "meta": {"quantizer": ["gptqmodel:2.2.0"], "damp_percent": 0.05},
        "pack_dtype": "int32",
        "quant_method": "gptq",
        "sym": True,
    },
    "awq": {
        "bits": 4,
        "group_size": 128,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    },
    "w4a16": _compressed("pack-quantized", _args(num_bits=4, type="int", strategy="group", group_size=128), None),
    "w8a8": _compressed("int-quantized", _args(type="int"), _args(type="int", dynamic=True, strategy="token")),
    "fp8 dynamic": _compressed("float-quantized", _args(type="float"), _args(type="float", strategy="token")),
    "nvfp4": _compressed(
        "nvfp4-pack-quantized",
        _args(num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"),
        _args(num_bits=4, type="float", strategy="tensor_group", group_size=16, dynamic="local"),
    ),
    "fp8 blocks": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "gpt-oss": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_understood(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(models.LLAMA | {"quantization_config": PUBLISHED[name]}))
    widened, *_ = describe_quantisation(read_checkpoint(tmp_path), np.dtype("float32"), {})
    assert f"codes of {8 if '8' in name else 4} bits" in widened
