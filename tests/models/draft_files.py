"""Small random heads for the fixture `llama`, written in each layout of checkpoints."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from draft_oracle import Sizes, Tensors
from safetensors.numpy import save_file

SIZES = Sizes()
LAYER_VALUES = {
    "model_type": "llama",
    "hidden_size": SIZES.hidden,
    "intermediate_size": SIZES.ffn,
    "num_attention_heads": SIZES.heads,
    "num_key_value_heads": SIZES.kv_heads,
    "head_dim": SIZES.head_dim,
    "num_hidden_layers": 1,
    "vocab_size": SIZES.vocab,
    "rms_norm_eps": SIZES.eps,
    "rope_theta": SIZES.theta,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
}


def layer_tensors(rng: np.random.Generator, name: str, wide: bool, ffn: int = SIZES.ffn) -> Tensors:
    s = SIZES
    inputs = 2 * s.hidden if wide else s.hidden

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    def norm(size: int = s.hidden) -> np.ndarray:
        return (1 + 0.2 * rng.normal(size=size)).astype(np.float32)

    found = {
        f"{name}.self_attn.q_proj.weight": matrix(s.heads * s.head_dim, inputs),
        f"{name}.self_attn.k_proj.weight": matrix(s.kv_heads * s.head_dim, inputs),
        f"{name}.self_attn.v_proj.weight": matrix(s.kv_heads * s.head_dim, inputs),
        f"{name}.self_attn.o_proj.weight": matrix(s.hidden, s.heads * s.head_dim),
        f"{name}.mlp.gate_proj.weight": matrix(ffn, s.hidden),
        f"{name}.mlp.up_proj.weight": matrix(ffn, s.hidden),
        f"{name}.mlp.down_proj.weight": matrix(s.hidden, ffn),
        f"{name}.input_layernorm.weight": norm(),
        f"{name}.post_attention_layernorm.weight": norm(),
    }
    return found | ({f"{name}.hidden_norm.weight": norm()} if wide else {})


def eagle3(layout: str = "original", seed: int = 0, draft_vocab: int = 50, **flags: Any) -> tuple[dict, Tensors]:
    """config.json and tensors; `layout` is 'original' or 'speculators'. `flags` are fields of the config."""
    rng = np.random.default_rng(seed)
    s = SIZES
    tensors = layer_tensors(rng, "midlayer" if layout == "original" else "layers.0", wide=True)
    tensors |= {
        "fc.weight": rng.normal(0, (3 * s.hidden) ** -0.5, (s.hidden, 3 * s.hidden)).astype(np.float32),
        "norm.weight": (1 + 0.2 * rng.normal(size=s.hidden)).astype(np.float32),
        "lm_head.weight": rng.normal(0, 1, (draft_vocab, s.hidden)).astype(np.float32),
    }
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = (1 + 0.2 * rng.normal(size=3 * s.hidden)).astype(np.float32)
    if draft_vocab != s.vocab:
        ids = np.sort(rng.permutation(s.vocab)[:draft_vocab])
        tensors["d2t"] = ids - np.arange(draft_vocab)
        tensors["t2d"] = np.isin(np.arange(s.vocab), ids)
    taps = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    if layout == "original":
        tensors["embed_tokens.weight"] = rng.normal(0, 1, (s.vocab, s.hidden)).astype(np.float32)
        return {
            "architectures": ["LlamaForCausalLM"],
            **LAYER_VALUES,
            "draft_vocab_size": draft_vocab,
            **taps,
            **flags,
        }, tensors
    values = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy"},
        "speculators_version": "0.4.0",
        "transformer_layer_config": LAYER_VALUES,
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": s.hidden,
        "norm_before_residual": False,
        **taps,
    }
    return values | flags, tensors


def eagle(seed: int = 0, bias: bool = True) -> tuple[dict, Tensors]:
    rng = np.random.default_rng(seed)
    s = SIZES
    tensors = layer_tensors(rng, "layers.0", wide=False)
    del tensors["layers.0.input_layernorm.weight"]
    tensors["fc.weight"] = rng.normal(0, (2 * s.hidden) ** -0.5, (s.hidden, 2 * s.hidden)).astype(np.float32)
    if bias:
        tensors["fc.bias"] = rng.normal(0, 0.3, s.hidden).astype(np.float32)
    return {"architectures": ["LlamaForCausalLM"], **LAYER_VALUES, "bias": bias}, tensors


def mtp(seed: int = 0, ffn: int = SIZES.ffn) -> tuple[dict, Tensors]:
    rng = np.random.default_rng(seed)
    s = SIZES
    tensors = layer_tensors(rng, "mtp.layers.0", wide=False, ffn=ffn)
    tensors["mtp.fc.weight"] = rng.normal(0, (2 * s.hidden) ** -0.5, (s.hidden, 2 * s.hidden)).astype(np.float32)
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        tensors[f"mtp.{name}.weight"] = (1 + 0.2 * rng.normal(size=s.hidden)).astype(np.float32)
    return {"architectures": ["LlamaForCausalLM"], **LAYER_VALUES}, tensors


def medusa(seed: int = 0, heads: int = 3, layers: int = 2, bias: bool = True, own: bool = True) -> tuple[dict, Tensors]:
    rng = np.random.default_rng(seed)
    s = SIZES
    tensors: Tensors = {}
    for i in range(heads):
        for j in range(layers):
            tensors[f"{i}.{j}.linear.weight"] = rng.normal(0, s.hidden**-0.5, (s.hidden, s.hidden)).astype(np.float32)
            if bias:
                tensors[f"{i}.{j}.linear.bias"] = rng.normal(0, 0.3, s.hidden).astype(np.float32)
        if own:
            tensors[f"{i}.{layers}.weight"] = rng.normal(0, 1, (s.vocab, s.hidden)).astype(np.float32)
    return {"medusa_num_heads": heads, "medusa_num_layers": layers, "base_model_name_or_path": "x"}, tensors


def write(directory: Path, values: dict, tensors: Tensors) -> Path:
    """The directory of a head."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, directory / "model.safetensors")
    return directory
