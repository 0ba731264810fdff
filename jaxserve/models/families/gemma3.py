"""Gemma 3, text alone: Gemma 2 without its cap on scores, with a norm on each head of q and k, and with two rotations.

Layers with a sliding window turn by a base of their own, which is never scaled. Every sixth layer has no window.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.models.decoder_config import DecoderConfig, NormPlace, QkNorm
from jaxserve.models.families import gemma, gemma2, qwen3
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig, read_layer_types, rope_of

WEIGHTS = (*gemma2.WEIGHTS, *qwen3.QK_NORMS)
_KINDS = ("full_attention", "sliding_attention")


def adapt(config: HfConfig) -> DecoderConfig:
    """From a Gemma3TextConfig.

    Without `layer_types` every layer whose number, counted from 1, is a multiple of `sliding_window_pattern` is full.
    """
    config.require("attn_logit_softcapping", None)  # transformers has the field and never applies it
    num_layers, size = config.integer("num_hidden_layers"), config.integer("sliding_window", 4096)
    pattern = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6))
    numbers = range(1, num_layers + 1)
    kinds = read_layer_types(config, num_layers) or [_KINDS[number % pattern != 0] for number in numbers]

    full, sliding = _rope_tables(config)
    head_dim = config.heads(256).head_dim
    local = rope_of(config, sliding, head_dim, default_theta=10_000.0)
    decoder = gemma.adapt_any(
        config,
        activation=config.activation("hidden_activation", "gelu_pytorch_tanh"),
        windows=[size if kind == "sliding_attention" else None for kind in kinds],
        rope=rope_of(config, full, head_dim, default_theta=1_000_000.0),
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        qk_norm=QkNorm.HEAD,
        norms=(NormPlace.BEFORE, NormPlace.AFTER),
    )
    layers = (dataclasses.replace(layer, position=local) if layer.window else layer for layer in decoder.layers)
    is_capped = config.get("final_logit_softcapping") is not None
    return dataclasses.replace(
        decoder,
        layers=tuple(layers),
        logit_soft_cap=config.number("final_logit_softcapping", 30.0) if is_capped else None,
    )


def _rope_tables(config: HfConfig) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Rope settings of full and of sliding layers.

    They are in `rope_parameters` by the kind of layer (transformers 5), or in `rope_scaling` with `rope_theta` for the
    full ones and `rope_local_base_freq` for the others (older).
    """
    nested, scaling = config.get("rope_parameters", {}), config.get("rope_scaling", {})
    base = {"rope_theta": config.number("rope_local_base_freq", 10_000.0)}
    if not isinstance(nested, Mapping) or not nested.keys() <= set(_KINDS):
        config.fail(f"rope_parameters is {nested!r}, but must have a table for each of {', '.join(_KINDS)}")
    tables = [nested.get(kind) or {} for kind in _KINDS]
    if not all(isinstance(table, Mapping) for table in (*tables, scaling)):
        config.fail(f"rope settings {nested!r} and {scaling!r} must be tables")
    return {**tables[0], **scaling}, {**base, **tables[1]}


FAMILY = Family(architecture="Gemma3ForCausalLM", adapt=adapt, weights=WEIGHTS, inert=gemma2.INERT)
