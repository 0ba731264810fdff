"""Whole models as GGUF: the fixtures as llama.cpp's converter would write them, and one with quantised weights.

Names come from llama.cpp's own table (tests/fixtures/gguf/names.json); what its converter changes in the numbers is
written here once more, row by row.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf_files
import gguf_oracle as oracle
import numpy as np
import quantised_models as models
from safetensors.numpy import load_file

FIXTURES = Path(__file__).parent.parent / "fixtures"
NAMES = json.loads((FIXTURES / "gguf" / "names.json").read_text())
_KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts_per_tok": "expert_used_count",
    "num_local_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}


def from_fixture(path: Path, architecture: str, fixture: str, **changes: Any) -> Path:
    """The GGUF file of a fixture. `changes`: of the metadata, None: without the key."""
    config = json.loads((FIXTURES / fixture / "config.json").read_text())
    files = sorted((FIXTURES / fixture).glob("*.safetensors"))
    tensors = {name: array for file in files for name, array in load_file(file).items()}
    converted = dict(_converted(architecture, tensors, config))
    return gguf_files.write(path, metadata_of(architecture, config, **changes), converted)


def metadata_of(architecture: str, config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """What the converter writes of a config.json."""
    found: dict[str, Any] = {_KEYS[field]: config[field] for field in _KEYS if config.get(field) is not None}
    if architecture == "starcoder2":
        del found["attention.sliding_window"]  # the converter leaves it out
    if architecture == "gpt-oss":
        found["expert_feed_forward_length"] = config["intermediate_size"]
    if config.get("head_dim") is not None:
        found["attention.value_length"] = config["head_dim"]
    older = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    rope = config.get("rope_parameters") or older
    full = rope.get("full_attention", rope)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    found["rope.dimension_count"] = int(head_dim * full.get("partial_rotary_factor", 1))
    found["rope.freq_base"] = float(full["rope_theta"])
    if "sliding_attention" in rope:
        found["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    kind = full.get("rope_type", full.get("type"))
    if kind in ("linear", "yarn"):
        found["rope.scaling.type"] = kind
        found["rope.scaling.factor"] = full["factor"]
    if "original_max_position_embeddings" in full:
        found["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
    found |= {key.replace("__", "."): value for key, value in changes.items()}
    return {
        "general.architecture": architecture,
        "general.name": "a fixture",
        **{f"{architecture}.{key}": value for key, value in found.items() if value is not None},
    }


def _converted(architecture: str, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]):
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for name, array in (_fused_experts if architecture == "gpt-oss" else _stacked_experts)(tensors):
        if architecture == "llama" and re.search(r"\.[qk]_proj\.", name):
            array = in_pairs(array, head_dim)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array.astype(np.float32) + 1
        yield gguf_name(architecture, name), array.astype(np.float32) if array.ndim == 1 else array


def gguf_name(architecture: str, name: str) -> str:
    layer = re.search(r"\.layers\.(\d+)\.", name)
    if layer is None:
        return NAMES[architecture][name]
    first = NAMES[architecture][name.replace(layer[0], ".layers.0.")]
    return first.replace("blk.0.", f"blk.{layer[1]}.")


def in_pairs(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """llama.cpp's order of rows: row i of a head, then row i + head_dim / 2."""
    out = np.empty_like(weight)
    for head in range(0, len(weight), head_dim):
        for i in range(head_dim // 2):
            out[head + 2 * i] = weight[head + i]
            out[head + 2 * i + 1] = weight[head + i + head_dim // 2]
    return out


def _stacked_experts(tensors: Mapping[str, np.ndarray]):
    """Experts of a layer as one tensor."""
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, array in tensors.items():
        match = re.fullmatch(r"(.*\.experts\.)(\d+)\.(.*)", name)
        if match is None:
            yield name, array
        else:
            stacks.setdefault(match[1] + match[3], {})[int(match[2])] = array
    for name, experts in stacks.items():
        yield name, np.stack([experts[i] for i in range(len(experts))])


def _fused_experts(tensors: Mapping[str, np.ndarray]):
    """Of gpt-oss, whose columns of gate and up lie by turns, inputs before outputs."""
    for name, array in tensors.items():
        start, _, end = name.rpartition(".experts.")
        if not start:
            yield name, array
            continue
        leaf = "bias" if end.endswith("_bias") else "weight"
        array = array if leaf == "bias" else array.swapaxes(1, 2)
        if end.startswith("gate_up"):
            yield f"{start}.experts.gate_proj.{leaf}", array[:, 0::2]
            yield f"{start}.experts.up_proj.{leaf}", array[:, 1::2]
        else:
            yield f"{start}.experts.down_proj.{leaf}", array


# Inputs of 64 are too few for the types that end in K, so these are on the tables' and down's side alone.
KINDS = {"q_proj": "Q4_0", "k_proj": "Q5_0", "v_proj": "Q8_0", "o_proj": None, "gate_proj": "Q4_1", "up_proj": "MXFP4"}
DOWN = ("Q4_K", "Q6_K")  # of each layer
QUANTISED = models.LLAMA | {"num_hidden_layers": 2, "head_dim": 12, "intermediate_size": 256}


def quantised_pair(directory: Path) -> models.Pair:
    """A Llama of two layers with a type of its own for each map; and with float weights as safetensors."""
    rng, config = np.random.default_rng(0), QUANTISED
    dense = models.plain_tensors(rng, config)
    stored: dict[str, Any] = {gguf_name("llama", name): array for name, array in dense.items()}
    for name, kind, spread in (("model.embed_tokens", "Q5_1", 0.05), ("lm_head", "Q8_0", 2e-3)):
        table = oracle.random_weight(rng, kind, (config["vocab_size"], config["hidden_size"]), spread)
        dense[f"{name}.weight"] = table.weights
        stored[gguf_name("llama", f"{name}.weight")] = table.packed
    for name, shape in models.module_shapes(config).items():
        leaf, layer = name.split(".")[-1], int(name.split(".")[2])
        kind = DOWN[layer] if leaf == "down_proj" else KINDS[leaf]
        to = gguf_name("llama", f"{name}.weight")
        if kind is None:
            dense[f"{name}.weight"] = (rng.normal(size=shape) * 0.05).astype(np.float32)
            stored[to] = dense[f"{name}.weight"]
            continue
        found = oracle.random_weight(rng, kind, shape, 0.1 / (2 ** int(kind[1]) if kind != "MXFP4" else 1) / 4)
        dense[f"{name}.weight"], stored[to] = found.weights, found.packed
        if leaf in ("q_proj", "k_proj"):
            octets = in_pairs(found.packed.octets, config["head_dim"])
            stored[to] = gguf_files.Packed(kind=kind, shape=shape, octets=octets)
    return models.Pair(
        quantised=gguf_files.write(directory / "model.gguf", metadata_of("llama", config), stored),
        dense=models.write(directory / "dense", config, dense),
    )
