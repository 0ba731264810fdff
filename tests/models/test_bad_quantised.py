"""Everything that can be wrong with a quantised checkpoint is one typed error: the tensors, the value, the remedy."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_oracle
import numpy as np
import pytest
import quantised_models as models
import quantised_oracle as oracle
from safetensors.numpy import load_file, save_file

from jaxserve.errors import CheckpointError
from jaxserve.models import load_model, read_checkpoint
from jaxserve.models.checkpoint import ORBAX_MARKER
from jaxserve.models.loading import decoder_config
from jaxserve.models.orbax_io import convert
from jaxserve.models.quantised.matching import is_named, target_rank
from jaxserve.models.safetensors_files import open_tensors

Q = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, np.ndarray]
INT8 = models.weights_table(num_bits=8, strategy="channel", group_size=None)


def refused(directory: Path, *said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_model(directory)
    message = str(caught.value)
    for text in said:
        assert text in message, (text, message)


def edit(directory: Path, change: Callable[[Tensors], None]) -> None:
    opened = open_tensors(directory)  # safetensors' own reader does not know float8
    tensors = {name: t.read(tuple(slice(0, size) for size in t.shape)) for name, t in opened.items()}
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


SCHEMES = models.SCHEMES | {
    "gptq sym": (models.gptq_table(sym=True), lambda r, s: oracle.gptq(r, s, sym_word=0x77777777)),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a scheme, made once."""

    @functools.cache
    def made(scheme: str) -> Path:
        config = models.LLAMA | {"intermediate_size": 32}
        return models.llama_pair(tmp_path_factory.mktemp("originals"), *SCHEMES[scheme], config).quantised

    return made


def config_of(directory: Path, table: Any, **fields: Any) -> Path:
    """A folder whose weights are never looked at."""
    values = models.LLAMA | {"quantization_config": table} | fields
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values))
    return directory


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            ("'bitsandbytes' is not supported", "gptq, awq", "take"),
        ),
        ({"quant_method": "gguf"}, ("'gguf'", "set model.path to the GGUF file itself")),
        ({"quant_method": "aqlm"}, ("'aqlm'", "or without quantisation")),
        ({"quant_method": "auto-round"}, ("'auto-round'", "auto_gptq")),
        ({"quant_method": "fbgemm_fp8"}, ("'fbgemm_fp8'", "float-quantized")),
        ({"bits": 4}, ("quant_method None",)),
        ("gptq", ("must be an object",)),
        (models.gptq_table(bits=3), ("bits is 3", "4, 8")),
        (models.gptq_table(bits="4"), ("bits is '4'",)),
        (models.gptq_table(group_size=0), ("group_size is 0", "-1")),
        (models.gptq_table(checkpoint_format="marlin"), ("checkpoint_format is 'marlin'", "gptq_v2")),
        (models.gptq_table(rotation="hadamard"), ("rotation = 'hadamard'", "model.overrides")),
        (models.gptq_table(dynamic={"+:a": {"bits": 2}}), ("dynamic '+:a'", "bits is 2")),
        (models.gptq_table(dynamic={"+:a": {"rank": 2}}), ("dynamic '+:a'", "rank = 2")),
        (models.awq_table(version="gemv_fast"), ("version is 'gemv_fast'", "gemm")),
        (models.awq_table(bits=8), ("bits is 8",)),
        (models.awq_table(zero_point=False), ("zero_point is false",)),
        (models.awq_table(backend="llm-awq"), ("'llm-awq'",)),
        (models.compressed_table("marlin-24", models.weights_table()), ("'marlin-24'", "pack-quantized")),
        (models.compressed_table("pack-quantized", models.weights_table(num_bits=3)), ("num_bits is 3", "4, 8")),
        (models.compressed_table("pack-quantized", models.weights_table(type="float")), ("type is 'float'",)),
        (models.compressed_table("int-quantized", INT8 | {"strategy": "block"}), ("block_structure is None",)),
        (models.compressed_table("mxfp4-pack-quantized", models.weights_table(type="float", group_size=64)), ("64",)),
        (models.compressed_table("int-quantized", INT8, sparsity_config={"format": "sparse-24"}), ("sparse-24",)),
        (models.compressed_table("int-quantized", INT8, transform_config={"a": 1}), ("rotated",)),
        (models.compressed_table("int-quantized", INT8, config_groups={}), ("config_groups",)),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ("weight_block_size is [128]",)),
        ({"quant_method": "fp8", "activation_scheme": "group"}, ("activation_scheme is 'group'",)),
    ],
)
def test_methods_and_settings_that_are_not_known(table: Any, said: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        decoder_config(read_checkpoint(config_of(tmp_path / "model", table)))
    for text in (*said, "config.json: quantization_config"):
        assert text in str(caught.value), (text, str(caught.value))


def changed(name: str, value: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: np.ascontiguousarray(value(tensors[name]))})


def without(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def made_float(tensors: Tensors) -> None:
    tensors[f"{Q}.weight"] = np.zeros((64, 64), np.float16)
    for suffix in ("qweight", "qzeros", "scales"):
        del tensors[f"{Q}.{suffix}"]


def put(place: tuple[int, ...], number: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        out = array.copy()
        out[place] = number
        return out

    return change


def put_byte(place: tuple[int, ...], number: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: put(place, number)(array.view(np.uint8)).view(array.dtype)


ROWS: dict[str, tuple[str, Callable[[Tensors], None], tuple[str, ...]]] = {
    "gptq without zeros": ("gptq", without(f"{Q}.qzeros"), ("1 weights are missing", f"{Q}.qzeros")),
    "gptq with a sidecar too many": (
        "gptq",
        lambda t: t.update({f"{Q}.perm": np.zeros(4, np.int32)}),
        ("1 weights are unknown", f"{Q}.perm"),
    ),
    "gptq without g_idx": ("gptq desc_act", without(f"{Q}.g_idx"), (f"{Q}.g_idx",)),
    "a bias that is not zero": (
        "gptq",
        lambda t: t.update({f"{Q}.bias": np.ones(64, np.float16)}),
        ("unknown", f"{Q}.bias"),
    ),
    "g_idx out of range": (
        "gptq desc_act",
        changed(f"{Q}.g_idx", put((5,), 2)),
        (f"{Q}.g_idx", "input 5 is in group 2", f"{Q}.scales has 2 groups"),
    ),
    "g_idx below zero": ("gptq desc_act", changed(f"{Q}.g_idx", put((7,), -1)), ("input 7 is in group -1",)),
    "groups that do not fit": (
        "gptq",
        changed(f"{Q}.scales", lambda a: np.concatenate([a, a])),
        (f"{Q}.scales", "[2, 64]", f"{Q}.qweight [8, 64] with groups of 64", "[1, 64]", "quantise it again"),
    ),
    "zeros of another shape": ("awq", changed(f"{Q}.qzeros", lambda a: a[:, 1:]), (f"{Q}.qzeros", "[1, 7]", "[1, 8]")),
    "scales of whole numbers": (
        "awq",
        changed(f"{Q}.scales", lambda a: a.astype(np.int32)),
        (f"{Q}.scales", "element type is int32"),
    ),
    "packed codes of another type": (
        "pack-quantized",
        changed(f"{Q}.weight_packed", lambda a: a.astype(np.int64)),
        ("int64", "int32"),
    ),
    "weight_shape that disagrees": (
        "pack-quantized",
        changed(f"{Q}.weight_shape", put((1,), 72)),
        (f"{Q}.weight_packed", f"{Q}.weight_shape says [64, 72]", "[64, 9]"),
    ),
    "a size that config.json has otherwise": (
        "int-quantized",
        changed(f"{Q}.weight", lambda a: a[:, :32]),
        (f"{Q}.weight", "[64, 32], not [64, 64]", "hidden_size"),
    ),
    "a scale that is infinite": (
        "gptq",
        changed(f"{Q}.scales", put((0, 3), np.inf)),
        ("1 scales of", f"{Q}.qweight", f"{Q}.scales", "inf at [3, 0]"),
    ),
    "a scale that is NaN": (
        "pack-quantized",
        changed(f"{Q}.weight_scale", put((9, 1), np.nan)),
        (f"{Q}.weight_scale", f"{Q}.weight_packed", "nan at [9, 1]"),
    ),
    "a scale below zero": ("int-quantized", changed(f"{Q}.weight_scale", put((2, 0), -0.5)), ("-0.5 at [2, 0]",)),
    "an exponent of 255": (
        "mxfp4-pack-quantized",
        changed(f"{Q}.weight_scale", put((1, 1), 255)),
        (f"{Q}.weight_scale", "nan at [1, 1]"),
    ),
    "an exponent of 254 under a large code": (
        "mxfp4-pack-quantized",
        changed(f"{Q}.weight_scale", put((1, 1), 254)),
        (f"{Q}.weight", "a scale of 1.7e+38", "bfloat16 ends at"),
    ),
    "a float8 scale that is NaN": (
        "nvfp4-pack-quantized",
        changed(f"{Q}.weight_scale", put_byte((4, 0), 0x7F)),
        (f"{Q}.weight_scale", "nan at [4, 0]"),
    ),
    "a shared scale of zero": (
        "nvfp4-pack-quantized",
        changed(f"{Q}.weight_global_scale", put((0,), 0)),
        (f"{Q}.weight_global_scale", f"{Q}.weight_packed"),
    ),
    "codes that are NaN": (
        "fp8",
        changed(f"{Q}.weight", put_byte((7, 3), 0xFF)),
        (f"{Q}.weight", "1 codes are NaN", "[7, 3]"),
    ),
    "fp8 without a scale": (
        "fp8 scalar",
        without(f"{Q}.weight_scale"),
        (f"{Q}.weight_scale or", f"{Q}.weight_scale_inv"),
    ),
    "blocks of another size": (
        "fp8",
        changed(f"{Q}.weight_scale_inv", lambda a: np.concatenate([a, a])),
        (f"{Q}.weight_scale_inv", "128 x 128", "[2, 1]"),
    ),
    "sym with zeros of two values": (
        "gptq sym",
        changed(f"{Q}.qzeros", put((0, 0), 0x77777778)),
        (f"{Q}.qzeros", "from 7 to 8", "set sym to false"),
    ),
    "a weight that is float": (
        "awq",
        made_float,
        ("covers 1 weights that are float", f"{Q}.weight", "model.overrides.quantization_config"),
    ),
    "a sidecar beside a float weight": (
        "awq",
        lambda t: t.update({"lm_head.qweight": np.zeros((64, 16), np.int32)}),
        ("1 weights are quantised in the files", "lm_head.weight"),
    ),
    "a norm of whole numbers": (
        "awq",
        changed("model.norm.weight", lambda a: a.astype(np.int8)),
        ("model.norm.weight", "int8"),
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_files_that_do_not_hold_what_the_config_says(
    row: str, originals: Callable[[str], Path], tmp_path: Path
) -> None:
    scheme, change, said = ROWS[row]
    directory = Path(shutil.copytree(originals(scheme), tmp_path / "model"))
    edit(directory, change)
    refused(directory, *said)


def test_all_weights_float_under_a_config_that_says_otherwise_and_the_reverse(tmp_path: Path) -> None:
    pair = models.llama_pair(tmp_path, *models.SCHEMES["gptq"])
    config = json.loads((pair.quantised / "config.json").read_text())
    (pair.dense / "config.json").write_text(json.dumps(config))
    refused(pair.dense, "covers 7 weights that are float", "self_attn.q_proj.weight", "set that to null")
    (pair.quantised / "config.json").write_text(json.dumps(models.LLAMA))
    refused(pair.quantised, "7 weights are missing", "the weights look quantised", "no quantization_config")


def test_targets_that_mean_nothing_name_the_nearest(tmp_path: Path) -> None:
    table = models.compressed_table("int-quantized", INT8)
    table["config_groups"]["group_0"]["targets"] = ["re:[", "Linear", "model.layers.0.self_attn.q_prj"]
    pair = models.llama_pair(tmp_path, table, oracle.int_quantized)
    refused(pair.quantised, "'['", "no regular expression")
    table["config_groups"]["group_0"]["targets"].pop(0)
    (pair.quantised / "config.json").write_text(json.dumps(models.LLAMA | {"quantization_config": table}))
    refused(pair.quantised, "target 'model.layers.0.self_attn.q_prj'", f"near it are {Q}")


def test_modules_that_are_ignored_and_yet_quantised(tmp_path: Path) -> None:
    table = models.compressed_table("int-quantized", INT8, ignore=["lm_head", "re:.*q_proj"])
    pair = models.llama_pair(tmp_path, table, oracle.int_quantized)
    refused(pair.quantised, "1 weights are quantised in the files", f"{Q}.weight", "leaves their modules out")


def test_experts_with_damaged_scales(tmp_path: Path) -> None:
    pair, name = models.gpt_oss_pair(tmp_path), "model.layers.0.mlp.experts.down_proj"
    edit(pair.quantised, changed(f"{name}_scales", put((2, 1, 0), 255)))
    refused(pair.quantised, f"{name}_scales", f"{name}_blocks", "nan at [2, 1, 0]")
    edit(pair.quantised, changed(f"{name}_scales", lambda a: a[:, 1:]))
    refused(pair.quantised, f"{name}_scales", "[6, 63, 3]", "[6, 64, 3]")


def test_a_family_that_stores_inputs_first(tmp_path: Path) -> None:
    """A square matrix of GPT-2 would otherwise be read the wrong way round."""
    config = json.loads((hf_oracle.FIXTURES / "gpt2" / "config.json").read_text())
    tensors = load_file(hf_oracle.FIXTURES / "gpt2" / "model.safetensors")
    rng = np.random.default_rng(0)
    for name in [n for n in tensors if n.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))]:
        num_in, num_out = tensors.pop(name).shape
        group = num_in
        tensors |= oracle.gptq(rng, (num_out, num_in), group=group).named(name.removesuffix(".weight"))
    directory = models.write(tmp_path, config | {"quantization_config": models.gptq_table(group_size=-1)}, tensors)
    refused(directory, "inputs before outputs", "without quantisation")


def test_conversion_to_orbax_and_back(tmp_path: Path) -> None:
    pair = models.llama_pair(tmp_path, *models.SCHEMES["gptq"])
    with pytest.raises(CheckpointError, match="is quantised .GPTQ.*serve the"):
        convert(pair.quantised, tmp_path / "orbax")
    directory = config_of(tmp_path / "stored", models.gptq_table())
    (directory / ORBAX_MARKER).write_text("{}")
    refused(directory, "Orbax directory holds float weights")


def test_a_config_that_says_null_has_the_last_word(tmp_path: Path) -> None:
    pair = models.llama_pair(tmp_path, None, {"": None})
    (pair.quantised / "quantize_config.json").write_text('{"bits": 4}')
    refused(pair.quantised, "covers 7 weights that are float")
    (pair.quantised / "config.json").write_text(json.dumps(models.LLAMA | {"quantization_config": None}))
    load_model(pair.quantised)


@pytest.mark.parametrize(
    ("entry", "module", "expected"),
    [
        ("layers.1", "model.layers.1.mlp.up_proj", True),
        ("layers.1", "model.layers.10.mlp.up_proj", False),
        ("gate", "model.layers.0.mlp.gate", True),
        ("gate", "model.layers.0.mlp.gate_proj", False),
        ("model.layers.*.self_attn", "model.layers.12.self_attn.q_proj", True),
        ("model.layers.*.self_attn", "model.layers.12.mlp.up_proj", False),
        ("lm_head", "lm_head", True),
    ],
)
def test_entries_of_lists(entry: str, module: str, expected: bool) -> None:
    assert is_named(module, [entry]) is expected


def test_ranks_of_targets() -> None:
    assert target_rank("lm_head", "lm_head", "Linear", "") == 0
    assert target_rank("re:.*head", "lm_head", "Linear", "") == 1
    assert target_rank("re:head", "lm_head", "Linear", "") is None
    assert target_rank("Linear", "lm_head", "Linear", "") == 2
    assert target_rank("Linear", "model.embed_tokens", "Embedding", "") is None
