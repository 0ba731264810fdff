"""Tiny quantised checkpoints in a folder, and the same models with the float weights that the oracle computes."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import quantised_oracle as oracle
from flax import nnx
from safetensors.numpy import save_file

from jaxserve.kernels.composed_weight import numbers_of as weight_numbers
from jaxserve.models.loading import LoadedModel
from jaxserve.models.sharding import WeightParameter

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "rope_scaling": {"rope_type": "default"},
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "layer_types": ["full_attention"],
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}
Make = Callable[[np.random.Generator, tuple[int, int]], oracle.Stored]


def module_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """[out, in] of the linear maps of a Llama's layers."""
    hidden, size = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
    }
    if "num_local_experts" not in config:
        shapes |= {
            "mlp.gate_proj": (size, hidden),
            "mlp.up_proj": (size, hidden),
            "mlp.down_proj": (hidden, size),
        }
    layers = range(config["num_hidden_layers"])
    return {f"model.layers.{layer}.{name}": shape for layer in layers for name, shape in shapes.items()}


def plain_tensors(rng: np.random.Generator, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What no format quantises."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tensors = {
        "model.embed_tokens.weight": rng.normal(size=(vocab, hidden)),
        "lm_head.weight": rng.normal(size=(vocab, hidden)) * 0.1,
        "model.norm.weight": rng.uniform(0.5, 1.5, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = rng.uniform(0.5, 1.5, hidden)
    if config["architectures"] == ["Qwen2ForCausalLM"] or "num_local_experts" in config:
        for name, shape in module_shapes(config).items():
            if name.split(".")[-1] in ("q_proj", "k_proj", "v_proj") or "num_local_experts" in config:
                tensors[f"{name}.bias"] = rng.normal(size=shape[0]) * 0.1
    return {name: array.astype(np.float32) for name, array in tensors.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Folders of the same model."""

    quantised: Path
    dense: Path


def write(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, directory / "model.safetensors")
    return directory


def llama_pair(
    directory: Path,
    table: Mapping[str, Any] | None,
    make: Make | Mapping[str, Make | None],
    config: Mapping[str, Any] = LLAMA,
) -> Pair:
    """`table`: the quantization_config. `make`: of all linear maps, or by the ends of their names; None: float."""
    rng = np.random.default_rng(0)
    plain = plain_tensors(rng, config)
    stored, dense = dict(plain), dict(plain)
    for name, shape in module_shapes(config).items():
        maker = make if callable(make) else next((m for end, m in make.items() if name.endswith(end)), make.get(""))
        if maker is None:
            dense[f"{name}.weight"] = (rng.normal(size=shape) * 0.05).astype(np.float32)
            stored[f"{name}.weight"] = dense[f"{name}.weight"]
        else:
            found = maker(rng, shape)
            dense[f"{name}.weight"] = found.weights
            stored |= found.named(name)
    quantised = dict(config) | ({} if table is None else {"quantization_config": table})
    return Pair(
        quantised=write(directory / "quantised", quantised, stored), dense=write(directory / "dense", config, dense)
    )


def gpt_oss_pair(directory: Path) -> Pair:
    """Experts in MXFP4, the rest float."""
    rng = np.random.default_rng(0)
    hidden, size, count = GPT_OSS["hidden_size"], GPT_OSS["intermediate_size"], GPT_OSS["num_local_experts"]
    plain = plain_tensors(rng, GPT_OSS)
    for name, shape in module_shapes(GPT_OSS).items():
        plain[f"{name}.weight"] = (rng.normal(size=shape) * 0.05).astype(np.float32)
    experts = "model.layers.0.mlp.experts"
    plain |= {
        "model.layers.0.self_attn.sinks": rng.normal(size=4).astype(np.float32),
        "model.layers.0.mlp.router.weight": rng.normal(size=(count, hidden)).astype(np.float32),
        "model.layers.0.mlp.router.bias": rng.normal(size=count).astype(np.float32),
        f"{experts}.gate_up_proj_bias": rng.normal(size=(count, 2 * size)).astype(np.float32),
        f"{experts}.down_proj_bias": rng.normal(size=(count, hidden)).astype(np.float32),
    }
    stored, dense = dict(plain), dict(plain)
    for name, shape in (("gate_up_proj", (2 * size, hidden)), ("down_proj", (hidden, size))):
        tensors, weights = oracle.mxfp4_experts(rng, count, shape)
        stored |= {f"{experts}.{name}_{suffix}": array for suffix, array in tensors.items()}
        dense[f"{experts}.{name}"] = weights.swapaxes(1, 2)
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    table = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    return Pair(
        quantised=write(directory / "quantised", GPT_OSS | {"quantization_config": table}, stored),
        dense=write(directory / "dense", GPT_OSS, dense),
    )


def gptq_table(**changes: Any) -> dict[str, Any]:
    base = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
    return base | changes


def awq_table(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"} | changes


def weights_table(**changes: Any) -> dict[str, Any]:
    base = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return base | {"dynamic": False, "observer": "minmax"} | changes


def compressed_table(form: str, weights: dict[str, Any], **changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    base = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }
    return base | changes


def shuffled(rng: np.random.Generator, num_in: int, group: int) -> np.ndarray:
    return rng.permutation(np.arange(num_in) // group)


# Of each scheme: the config, and the maker of a weight.
SCHEMES: dict[str, tuple[dict[str, Any], Make]] = {
    "gptq": (gptq_table(group_size=64), lambda r, s: oracle.gptq(r, s, group=64)),
    "gptq desc_act": (
        gptq_table(desc_act=True, checkpoint_format="gptq_v2"),
        lambda r, s: oracle.gptq(r, s, less=0, g_idx=shuffled(r, s[1], 32)),
    ),
    "awq": (awq_table(group_size=64), lambda r, s: oracle.awq(r, s, group=64)),
    "pack-quantized": (
        compressed_table("pack-quantized", weights_table(symmetric=False)),
        lambda r, s: oracle.pack_quantized(r, s, asymmetric=True),
    ),
    "int-quantized": (
        compressed_table("int-quantized", weights_table(num_bits=8, strategy="channel", group_size=None)),
        oracle.int_quantized,
    ),
    "float-quantized": (
        compressed_table(
            "float-quantized", weights_table(num_bits=8, type="float", strategy="channel", group_size=None)
        ),
        oracle.float8,
    ),
    "mxfp4-pack-quantized": (
        compressed_table("mxfp4-pack-quantized", weights_table(type="float")),
        oracle.mxfp4_packed,
    ),
    "nvfp4-pack-quantized": (
        compressed_table("nvfp4-pack-quantized", weights_table(type="float", strategy="tensor_group", group_size=16)),
        oracle.nvfp4_packed,
    ),
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        lambda r, s: oracle.float8(r, s, suffix="weight_scale_inv", grid=(128, 128), dtype=ml_dtypes.bfloat16),
    ),
    "fp8 scalar": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda r, s: dataclasses.replace(
            (stored := oracle.float8(r, s, scale_shape=())),
            tensors=stored.tensors | {"input_scale": np.ones((), np.float32)},
        ),
    ),
}


def numbers_of(model: LoadedModel) -> dict[tuple[Any, ...], np.ndarray]:
    """Every parameter in float64."""
    return numbers_of_state(model.state)


def numbers_of_state(state: nnx.State) -> dict[tuple[Any, ...], np.ndarray]:
    """The same of a state."""
    found = {}
    for path, variable in nnx.to_flat_state(state):
        value = variable.get_raw_value()
        is_weight = isinstance(variable, WeightParameter)
        found[path] = weight_numbers(value) if is_weight else np.asarray(value, np.float64)
    return found
