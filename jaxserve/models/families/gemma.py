"""Gemma 1: Llama with scaled embeddings, other norms, and a head dimension of its own; also what Gemma 2 and 3 share.

The weights of norms are stored as their difference to 1, and multiply before the result is rounded. The weight table
is Llama's.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxserve.models.decoder_config import DecoderConfig, EmbeddingSpec, MlpSpec, NormSpec, RopeConfig
from jaxserve.models.families import llama
from jaxserve.models.family import Family
from jaxserve.models.hf_config import HfConfig


def adapt(config: HfConfig) -> DecoderConfig:
    """From a GemmaConfig. Its `hidden_act` gelu is a mistake of old files: all were trained with the tanh formula."""
    config.require("hidden_activation", None, "gelu_pytorch_tanh")  # a second name for it, for a while
    activation = config.activation("hidden_act", "gelu_pytorch_tanh")
    return adapt_any(config, activation="gelu_tanh" if activation == "gelu" else activation)


def adapt_any(
    config: HfConfig,
    *,
    activation: str,
    windows: Sequence[int | None] | None = None,
    rope: RopeConfig | None = None,
    **changes: Any,
) -> DecoderConfig:
    """From the config of a Gemma of any version. `windows`, `rope` and `changes` are those of `llama.adapt`."""
    config.require("mlp_bias", False, None)
    config.require("use_bidirectional_attention", None, False)
    config.integer("num_key_value_heads")  # where it is absent, each version has another default
    mlp = MlpSpec(size=config.integer("intermediate_size"), activation=activation)
    decoder = llama.adapt(config, default_head_dim=256, windows=windows, rope=rope, mlp=mlp, **changes)
    return dataclasses.replace(
        decoder,
        norm=NormSpec(eps=config.number("rms_norm_eps", 1e-6), zero_centred=True),
        embedding=EmbeddingSpec(scale=decoder.hidden_size**0.5),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


FAMILY = Family(architecture="GemmaForCausalLM", adapt=adapt, weights=llama.WEIGHTS)
