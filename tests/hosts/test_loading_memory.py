"""What a process needs while it loads its share of a model that two processes hold."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hosts_parts import WAIT_S, free_ports
from safetensors.numpy import save_file

pytestmark = pytest.mark.slow

ALLOWED = 1.3  # of one share
HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 1024, 2816, 12, 16, 4, 64, 16000


def shapes() -> dict[str, tuple[int, ...]]:
    """Of a Llama; the three matrices of attention and two of the MLP become one parameter each, or do not."""
    found = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    found["model.norm.weight"] = (HIDDEN,)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        for name, size in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            found[f"{layer}self_attn.{name}_proj.weight"] = (size * HEAD_DIM, HIDDEN)
        found[f"{layer}self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        for name in ("gate", "up"):
            found[f"{layer}mlp.{name}_proj.weight"] = (FFN, HIDDEN)
        found[f"{layer}mlp.down_proj.weight"] = (HIDDEN, FFN)
        for name in ("input", "post_attention"):
            found[f"{layer}{name}_layernorm.weight"] = (HIDDEN,)
    return found


def write_checkpoint(directory: Path, dtype: str) -> None:
    """In several files, as published ones are."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    names = list(shapes())
    weight_map = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        file = f"model-{number}.safetensors"
        save_file({name: np.full(shapes()[name], 0.01, kind) for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(("stored", "loaded"), [("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_a_process_needs_little_more_than_its_share(tmp_path: Path, stored: str, loaded: str) -> None:
    write_checkpoint(tmp_path / "model", stored)
    (port,) = free_ports(1)
    probe = str(Path(__file__).parent / "loading_probe.py")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, probe, str(tmp_path / "model"), loaded, str(port), str(process_id)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for process_id in range(2)
    ]
    try:
        found = [json.loads(process.communicate(timeout=WAIT_S)[0]) for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait(WAIT_S)
    itemsize = 2 if loaded == "bfloat16" else 4
    total = sum(np.prod(shape) for shape in shapes().values()) * itemsize
    for one in found:
        assert 0.5 * total <= one["shard"] <= 0.51 * total, (one, total)
        assert one["shard"] <= one["peak"] <= ALLOWED * one["shard"], one
