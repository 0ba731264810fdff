"""A package that adds families to jaxserve, as one outside its tree does: a cousin of Llama, and its mirror image."""

import dataclasses

from jaxserve.models import Decoder, DecoderConfig, Family
from jaxserve.models.families import llama
from jaxserve.models.hf_config import HfConfig


def adapt(config: HfConfig) -> DecoderConfig:
    """Llama's config, whose layers are called something else."""
    layers = config.integer("num_cousins")
    return llama.adapt(config, windows=(None,) * layers)


class Mirrored(Decoder):
    """A decoder that likes what the other dislikes."""

    def logits(self, hidden):
        return -super().logits(hidden)


def adapt_mirrored(config: HfConfig) -> DecoderConfig:
    return dataclasses.replace(adapt(config), module=Mirrored)


FAMILY = Family(architecture="CousinForCausalLM", adapt=adapt, weights=llama.WEIGHTS, inert=("num_hidden_layers",))
MIRRORED = dataclasses.replace(FAMILY, adapt=adapt_mirrored)
