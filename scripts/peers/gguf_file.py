"""A checkpoint as a GGUF file, in one of three precisions: of a Llama, a Mixtral, a BLOOM or a Gemma 2.

    python -m peers.gguf_file MODEL_DIR OUT.gguf f32|bf16|q8_0      (in the environment of llama.cpp)

Names and the order of rows are those that llama.cpp expects. There is no tokenizer in it: requests are token ids. One
tensor is in memory at a time.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from safetensors import safe_open

_TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
_ATTENTION_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
}
_MLP_NAMES = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_EXPERT_NAMES = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
_LLAMA_NAMES = {**_ATTENTION_NAMES, **_MLP_NAMES, "post_attention_layernorm": "ffn_norm"}
_MIXTRAL_NAMES = {
    **_ATTENTION_NAMES,
    "post_attention_layernorm": "ffn_norm",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_GEMMA2_NAMES = {
    **_ATTENTION_NAMES,
    **_MLP_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_BLOOM_TOP_NAMES = {
    "transformer.word_embeddings": "token_embd",
    "transformer.word_embeddings_layernorm": "token_embd_norm",
    "transformer.ln_f": "output_norm",
}
_BLOOM_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}


class _Tensor(NamedTuple):
    """A tensor of the GGUF file: its name, its shape in float32, and how to make it."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]


class _Checkpoint:
    """The tensors of a directory by name, read when asked for."""

    def __init__(self, folder: Path) -> None:
        self._files = [safe_open(path, "numpy") for path in sorted(folder.glob("*.safetensors"))]
        self._places = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 (no iterator)

    @property
    def names(self) -> list[str]:
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._places[name].get_slice(name).get_shape())

    def __getitem__(self, name: str) -> np.ndarray:
        return self._places[name].get_tensor(name)


def convert(folder: Path, out: Path, precision: str) -> None:
    """Matrices in `precision`, norms, biases and routers in float32. The file is complete or not there."""
    config, checkpoint = json.loads((folder / "config.json").read_text()), _Checkpoint(folder)
    scratch = out.with_suffix(".part")
    name, write_fields, list_tensors = _ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(str(scratch), name)
    write_fields(writer, config)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    tensors = list(list_tensors(config, checkpoint))
    kinds = [_TYPES["f32" if len(t.shape) == 1 or "ffn_gate_inp" in t.name else precision] for t in tensors]
    for tensor, kind in zip(tensors, kinds, strict=True):
        size = int(np.prod(gguf.quants.quant_shape_to_byte_shape(tensor.shape, kind)))
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, kind in zip(tensors, kinds, strict=True):
        writer.write_tensor_data(gguf.quants.quantize(np.ascontiguousarray(tensor.make()), kind))
    writer.close()
    os.rename(scratch, out)


def _llama_fields(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])


def _gemma2_fields(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _llama_fields(writer, config)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])
    # llama.cpp has no field for it: it takes the head dimension for a Gemma 2 of any number of layers but 46.
    assert config["query_pre_attn_scalar"] == config["head_dim"], "the scale of the scores"


def _bloom_fields(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(2048)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(4 * config["hidden_size"])
    writer.add_head_count(config["n_head"])
    writer.add_head_count_kv(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def _llama_tensors(config: dict[str, Any], checkpoint: _Checkpoint) -> Iterator[_Tensor]:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def make(name: str) -> np.ndarray:
        kind = name.split(".")[-2]
        return _pair_rows(checkpoint[name], heads[kind]) if kind in heads else checkpoint[name]

    names = _MIXTRAL_NAMES if "num_local_experts" in config else _LLAMA_NAMES
    for name in checkpoint.names:
        if ".experts." not in name:
            new_name = _new_name(name, _TOP_NAMES, names)
            yield _Tensor(new_name, checkpoint.shape(name), lambda name=name: make(name))
    yield from _expert_tensors(config, checkpoint)


def _expert_tensors(config: dict[str, Any], checkpoint: _Checkpoint) -> Iterator[_Tensor]:
    """The experts of a layer as one tensor of each kind."""
    count = config.get("num_local_experts", 0)
    for layer in range(config["num_hidden_layers"] if count else 0):
        for old, new in _EXPERT_NAMES.items():
            prefix = f"model.layers.{layer}.block_sparse_moe.experts"
            parts = [f"{prefix}.{expert}.{old}.weight" for expert in range(count)]
            yield _Tensor(
                f"blk.{layer}.{new}.weight",
                (count, *checkpoint.shape(parts[0])),
                lambda parts=parts: np.stack([checkpoint[part] for part in parts]),
            )


def _gemma2_tensors(config: dict[str, Any], checkpoint: _Checkpoint) -> Iterator[_Tensor]:
    """The weights of norms are stored with the 1 that Gemma adds to them."""
    del config

    def make(name: str) -> np.ndarray:
        return checkpoint[name] + 1.0 if "norm" in name else checkpoint[name]

    for name in checkpoint.names:
        new_name = _new_name(name, _TOP_NAMES, _GEMMA2_NAMES)
        yield _Tensor(new_name, checkpoint.shape(name), lambda name=name: make(name))


def _bloom_tensors(config: dict[str, Any], checkpoint: _Checkpoint) -> Iterator[_Tensor]:
    """The fused projection has all queries first, then all keys, then all values; on disk they alternate by head."""
    heads = config["n_head"]

    def make(name: str) -> np.ndarray:
        tensor = checkpoint[name]
        if "query_key_value" not in name:
            return tensor
        by_head = tensor.reshape(heads, 3, tensor.shape[0] // heads // 3, *tensor.shape[1:])
        return by_head.swapaxes(0, 1).reshape(tensor.shape)

    for name in checkpoint.names:
        new_name = _new_name(name, _BLOOM_TOP_NAMES, _BLOOM_NAMES)
        yield _Tensor(new_name, checkpoint.shape(name), lambda name=name: make(name))


_ARCHITECTURES = {
    "llama": ("llama", _llama_fields, _llama_tensors),
    "mixtral": ("llama", _llama_fields, _llama_tensors),  # llama.cpp's Llama has experts where there are some
    "gemma2": ("gemma2", _gemma2_fields, _gemma2_tensors),
    "bloom": ("bloom", _bloom_fields, _bloom_tensors),
}


def _pair_rows(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Llama in Hugging Face's form turns element i with i + H / 2; llama.cpp turns neighbours."""
    rows, width = tensor.shape
    return tensor.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def _new_name(name: str, top: dict[str, str], of_layer: dict[str, str]) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in top:
        return f"{top[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{of_layer[rest]}.{kind}"


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
