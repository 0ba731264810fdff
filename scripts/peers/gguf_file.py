"""A checkpoint of a Llama as a GGUF file, in one of three precisions.

    python -m peers.gguf_file MODEL_DIR OUT.gguf f32|bf16|q8_0      (in the environment of llama.cpp)

Names and the order of rows are those that llama.cpp expects. There is no tokenizer in it: requests are token ids.
"""

import json
import os
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

_TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def convert(model: Path, out: Path, precision: str) -> None:
    """Matrices in `precision`, norms in float32. The file is complete or not there."""
    config = json.loads((model / "config.json").read_text())
    scratch = out.with_suffix(".part")
    writer = gguf.GGUFWriter(str(scratch), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in load_file(model / "model.safetensors").items():
        kind = name.split(".")[-2]
        if kind in heads:
            tensor = _pair_rows(tensor, heads[kind])
        if tensor.ndim == 1:
            writer.add_tensor(_new_name(name), tensor)
        else:
            packed = gguf.quants.quantize(tensor, _TYPES[precision])
            writer.add_tensor(_new_name(name), packed, raw_dtype=_TYPES[precision])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.rename(scratch, out)


def _pair_rows(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Llama in Hugging Face's form turns element i with i + H / 2; llama.cpp turns neighbours."""
    rows, width = tensor.shape
    return tensor.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def _new_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest]}.weight"


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
