"""Random weights as checkpoints: one set of them that every engine on a CPU loads.

`gguf_file` makes llama.cpp's form from the same files.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from peers.models import MODELS, PeerModel

_STD = 0.02  # of initialisation in GPT-2 and Llama; logits then have a spread that greedy decoding can tell apart
_SMALL = 0.1  # weights of BLOOM's norm of embeddings; with 1 its tied table would choose the last token again
_SHARD_BYTES = 2**31  # of one file; a model of many gigabytes is never whole in memory


class _Tensor(NamedTuple):
    """A tensor to make: normal numbers of deviation `std`, or `value` everywhere where that is None."""

    name: str
    shape: tuple[int, ...]
    std: float | None = _STD
    value: float = 0.0


def ensure_checkpoint(name: str, folder: Path) -> Path:
    """The directory `folder / name` in Hugging Face's form, float32; made first if it is not there."""
    path = folder / name
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / name
        made.mkdir()
        _write_weights(MODELS[name], made)
        (made / "config.json").write_text(json.dumps(MODELS[name].config, indent=1) + "\n")
        os.rename(made, path)
    return path


def _write_weights(model: PeerModel, folder: Path) -> None:
    """One file, or several and their index."""
    rng = np.random.default_rng(0)
    shards = list(_shards(list(_tensors(model))))
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        one = len(shards) == 1
        file = "model.safetensors" if one else f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({tensor.name: _make(tensor, rng) for tensor in shard}, folder / file, metadata={"format": "pt"})
        index |= {tensor.name: file for tensor in shard}
    if len(shards) > 1:
        size = sum(_bytes(tensor) for shard in shards for tensor in shard)
        values = {"metadata": {"total_size": size}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(values, indent=1) + "\n")


def _shards(tensors: list[_Tensor]) -> Iterator[list[_Tensor]]:
    shard: list[_Tensor] = []
    for tensor in tensors:
        if shard and sum(map(_bytes, shard)) + _bytes(tensor) > _SHARD_BYTES:
            yield shard
            shard = []
        shard.append(tensor)
    yield shard


def _bytes(tensor: _Tensor) -> int:
    return 4 * int(np.prod(tensor.shape))


def _make(tensor: _Tensor, rng: np.random.Generator) -> np.ndarray:
    if tensor.std is None:
        return np.full(tensor.shape, tensor.value, np.float32)
    made = rng.standard_normal(tensor.shape, dtype=np.float32)
    made *= np.float32(tensor.std)
    return made


def _tensors(model: PeerModel) -> Iterator[_Tensor]:
    config = model.config
    assert config is not None, "a published file has its own weights"
    match config["model_type"]:
        case "llama" | "mixtral" | "gemma2":
            return _like_llama(config, model.embedding_std)
        case "bloom":
            return _bloom(config, model.embedding_std)
    raise KeyError(f"no tensors are known of model_type {config['model_type']!r}")


def _like_llama(config: dict[str, Any], embedding_std: float) -> Iterator[_Tensor]:
    """Llama's names; Mixtral has experts in place of a feed-forward block, and Gemma 2 norms behind both sub-blocks."""
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    is_gemma = config["model_type"] == "gemma2"

    def norm(name: str) -> _Tensor:
        return _Tensor(f"{name}.weight", (hidden,), None, 0.0 if is_gemma else 1.0)  # Gemma adds the 1 itself

    yield _Tensor("model.embed_tokens.weight", (config["vocab_size"], hidden), embedding_std)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield norm(prefix + "input_layernorm")
        yield _Tensor(prefix + "self_attn.q_proj.weight", (queries, hidden))
        yield _Tensor(prefix + "self_attn.k_proj.weight", (keys, hidden))
        yield _Tensor(prefix + "self_attn.v_proj.weight", (keys, hidden))
        yield _Tensor(prefix + "self_attn.o_proj.weight", (hidden, queries))
        yield norm(prefix + "post_attention_layernorm")
        if is_gemma:
            yield norm(prefix + "pre_feedforward_layernorm")
            yield norm(prefix + "post_feedforward_layernorm")
        if config["model_type"] != "mixtral":
            yield _Tensor(prefix + "mlp.gate_proj.weight", (ffn, hidden))
            yield _Tensor(prefix + "mlp.up_proj.weight", (ffn, hidden))
            yield _Tensor(prefix + "mlp.down_proj.weight", (hidden, ffn))
            continue
        yield _Tensor(prefix + "block_sparse_moe.gate.weight", (config["num_local_experts"], hidden))
        for expert in range(config["num_local_experts"]):
            of_expert = f"{prefix}block_sparse_moe.experts.{expert}."
            yield _Tensor(of_expert + "w1.weight", (ffn, hidden))
            yield _Tensor(of_expert + "w3.weight", (ffn, hidden))
            yield _Tensor(of_expert + "w2.weight", (hidden, ffn))
    yield norm("model.norm")
    if not config["tie_word_embeddings"]:
        yield _Tensor("lm_head.weight", (config["vocab_size"], hidden))


def _bloom(config: dict[str, Any], embedding_std: float) -> Iterator[_Tensor]:
    hidden = config["hidden_size"]

    def norm(name: str, weight: float = 1.0) -> Iterator[_Tensor]:
        yield _Tensor(f"{name}.weight", (hidden,), None, weight)
        yield _Tensor(f"{name}.bias", (hidden,), None, 0.0)

    def dense(name: str, out: int, inputs: int) -> Iterator[_Tensor]:
        yield _Tensor(f"{name}.weight", (out, inputs))
        yield _Tensor(f"{name}.bias", (out,))

    yield _Tensor("transformer.word_embeddings.weight", (config["vocab_size"], hidden), embedding_std)
    yield from norm("transformer.word_embeddings_layernorm", _SMALL)
    for layer in range(config["n_layer"]):
        prefix = f"transformer.h.{layer}."
        yield from norm(prefix + "input_layernorm")
        yield from dense(prefix + "self_attention.query_key_value", 3 * hidden, hidden)
        yield from dense(prefix + "self_attention.dense", hidden, hidden)
        yield from norm(prefix + "post_attention_layernorm")
        yield from dense(prefix + "mlp.dense_h_to_4h", 4 * hidden, hidden)
        yield from dense(prefix + "mlp.dense_4h_to_h", hidden, 4 * hidden)
    yield from norm("transformer.ln_f")
