"""Random Llamas as checkpoints: one set of weights that every engine on a CPU loads.

`gguf_file` makes llama.cpp's form from the same file.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

_STD = 0.02  # of initialisation in GPT-2 and Llama; logits then have a spread that greedy decoding can tell apart


def llama_config(
    *, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, max_len: int = 2048
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


MODELS = {
    "cpu-125m": llama_config(hidden=768, layers=12, heads=12, kv_heads=4, ffn=2048, vocab=32000),
    "tiny": llama_config(hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, vocab=512),
}


def ensure_checkpoint(name: str, folder: Path) -> Path:
    """The directory `folder / name` in Hugging Face's form, float32; made first if it is not there."""
    path = folder / name
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / name
        made.mkdir()
        config = MODELS[name]
        save_file(dict(_tensors(config)), made / "model.safetensors", metadata={"format": "pt"})
        (made / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        os.rename(made, path)
    return path


def _tensors(config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(_STD)

    def ones() -> np.ndarray:
        return np.ones(hidden, np.float32)

    yield "model.embed_tokens.weight", random(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", ones()
        yield prefix + "self_attn.q_proj.weight", random(queries, hidden)
        yield prefix + "self_attn.k_proj.weight", random(keys, hidden)
        yield prefix + "self_attn.v_proj.weight", random(keys, hidden)
        yield prefix + "self_attn.o_proj.weight", random(hidden, queries)
        yield prefix + "post_attention_layernorm.weight", ones()
        yield prefix + "mlp.gate_proj.weight", random(ffn, hidden)
        yield prefix + "mlp.up_proj.weight", random(ffn, hidden)
        yield prefix + "mlp.down_proj.weight", random(hidden, ffn)
    yield "model.norm.weight", ones()
    yield "lm_head.weight", random(config["vocab_size"], hidden)
