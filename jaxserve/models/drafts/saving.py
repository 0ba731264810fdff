"""A trained head as a directory in speculators' layout, which this package and others read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxserve.config.model_path import CONFIG_NAME
from jaxserve.models.checkpoint import SINGLE_NAME
from jaxserve.models.decoder_config import RopeConfig, RopeScaling
from jaxserve.models.drafts.config import EagleConfig, HeadConfig
from jaxserve.models.drafts.loading import IDS_PATH, head_plan
from jaxserve.models.layout import write_source
from jaxserve.models.partition import Partition
from jaxserve.models.weights import Path as ParamPath


def save_head(
    directory: Path,
    config: HeadConfig,
    arrays: Mapping[ParamPath, np.ndarray],
    target: Partition,
    *,
    verifier: Mapping[str, Any],
    places: int,
    dtype: str,
) -> None:
    """Writes config.json and model.safetensors.

    Args:
      directory: an existing one.
      config: of the head.
      arrays: of all its parameters, as they are on one device.
      target: the cut of the head's target; its sizes are those of the checkpoint.
      verifier: `name_or_path` and `architectures` of the target.
      places: guesses of a draft that it was trained for.
      dtype: of the file.
    """
    tensors: dict[str, np.ndarray] = {}
    for path, pieces in head_plan(config, target, np.dtype("float32")).items():
        for piece in pieces:
            window = tuple(slice(w.start, w.stop) for w in piece.window)
            share = write_source(np.asarray(arrays[path])[window], piece.pattern)
            tensors[piece.source] = np.ascontiguousarray(np.asarray(jnp.asarray(share).astype(dtype)))
    if IDS_PATH in arrays:
        ids = np.asarray(arrays[IDS_PATH], np.int64)
        tensors["d2t"] = ids - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(target.model.vocab_size), ids)
    save_file(tensors, str(directory / SINGLE_NAME), metadata={"format": "pt"})
    (directory / SINGLE_NAME).chmod(0o644)  # the library writes files that nobody else may read
    values = _eagle_values(config) if isinstance(config, EagleConfig) else _medusa_values(config)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": places,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    values |= {
        "torch_dtype": dtype,
        "speculators_model_type": config.kind.value,
        "speculators_config": {
            "algorithm": config.kind.value,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": dict(verifier),
        },
    }
    (directory / CONFIG_NAME).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _eagle_values(config: EagleConfig) -> dict[str, Any]:
    decoder, layer = config.decoder, config.decoder.layers[0]
    assert layer.rope is not None
    return {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "transformer_layer_config": {
            "model_type": "llama",
            "vocab_size": decoder.vocab_size,
            "hidden_size": decoder.hidden_size,
            "intermediate_size": layer.mlp.width,
            "num_hidden_layers": 1,
            "num_attention_heads": decoder.num_query_heads,
            "num_key_value_heads": decoder.num_kv_heads,
            "head_dim": decoder.head_dim,
            "max_position_embeddings": decoder.max_position,
            "rms_norm_eps": decoder.norm.eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            **_rope_values(layer.rope),
        },
    }


def _rope_values(rope: RopeConfig) -> dict[str, Any]:
    """Old spelling, which all readers know."""
    assert rope.scaling is RopeScaling.NONE, "trained heads turn positions without scaling"
    return {"rope_theta": rope.theta, "rope_scaling": None}


def _medusa_values(config: Any) -> dict[str, Any]:
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_hidden_size": config.hidden_size,
        "medusa_vocab_size": config.vocab_size,
        "truncated_vocab_size": 0,
        "original_lm_head": not config.own_lm_head,
        "medusa_fc_bias": config.bias,
    }
