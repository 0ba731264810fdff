"""What the planner's tests share: a small Llama and a config for it."""

import json
from pathlib import Path

from jaxserve.config import load_config
from jaxserve.config.schema import Config

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def write_shape(directory: Path, **changes) -> Path:
    """A directory with nothing but a config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**SMALL, **changes}))
    return directory


def small_config(directory: Path, **settings) -> Config:
    """A config of two buckets, 'decode 16x16' and 'mixed 64x16', for the model of `directory`."""
    overrides = {
        "model.path": str(directory),
        "sched.max_rows": 16,
        "sched.max_step_tokens": 64,
        "runtime.row_buckets": [16],
        "runtime.token_buckets": [64],
        **settings,
    }
    return load_config(None, overrides, environ={}).config


def shipped(name: str, **settings) -> Config:
    """A config of the repository."""
    return load_config(CONFIGS / f"{name}.yaml", settings, environ={}).config
