"""The draft head or draft model of an engine: what `speculation:` names, or the head that came with the model."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxserve.config.model_path import CONFIG_NAME, resolve_model_path
from jaxserve.config.schema import Config
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.models.checkpoint import read_checkpoint
from jaxserve.models.decoder_config import DecoderConfig, ExpertSpec
from jaxserve.models.drafts import HeadConfig, HeadKind, MedusaConfig, open_head, read_head_config
from jaxserve.models.loading import decoder_config
from jaxserve.runtime.drafter import Drafter
from jaxserve.runtime.head_drafting import HeadDrafter
from jaxserve.runtime.model_drafting import ModelDrafter
from jaxserve.sched.plan import PageGroup

AUTO = "auto"
DRAFT_MODEL = "draft"
HEAD_DIRECTORY = "draft"  # in the directory of a model that comes with a head
_KINDS = {
    "eagle": (HeadKind.EAGLE, HeadKind.EAGLE3),
    "medusa": (HeadKind.MEDUSA,),
    "mtp": (HeadKind.MTP,),
}
_WITHOUT_MODEL = ("none", "grammar", "ngram", "suffix")


class FoundHead(NamedTuple):
    """The directory of a head or a draft model, and its config."""

    path: Path
    config: HeadConfig | DecoderConfig


def find_head(config: Config, target: DecoderConfig) -> FoundHead | None:
    """The head or draft model that the config asks for; None where drafts come from elsewhere.

    With method auto it is the head in `speculation.model`, or that of the model's own directory, whatever its kind.
    Raises CheckpointError for one that does not fit, ConfigError for a head of another kind, or none.
    """
    asked = config.speculation
    if asked.method == DRAFT_MODEL:
        return _find_draft_model(config, target)
    if asked.method != AUTO and asked.method not in _KINDS:
        if asked.model is not None and asked.method in _WITHOUT_MODEL:
            raise ConfigError(
                f"speculation.model is {asked.model!r}, but drafts of method {asked.method!r} come from no model; "
                f"leave it out, or set speculation.method to {', '.join((AUTO, *_KINDS, DRAFT_MODEL))}"
            )
        return None
    model_path = resolve_model_path(config.model.path)
    own = model_path / HEAD_DIRECTORY
    if asked.model is None and not (own / CONFIG_NAME).is_file():
        if asked.method == AUTO:
            return None
        if asked.method != "mtp":
            raise ConfigError(
                f"speculation.method is {asked.method!r}, but {model_path} has no head of its own ({own}); set "
                "speculation.model to the directory of one, or train it with `jaxserve train-draft`"
            )
        own = model_path  # layers for more tokens than one lie beside the model's
    path = own if asked.model is None else Path(asked.model)
    found = read_head_config(open_head(path), target, config.model.name or model_path.name)
    if asked.method != AUTO and found.kind not in _KINDS[asked.method]:
        right = next(name for name, kinds in _KINDS.items() if found.kind in kinds)
        raise ConfigError(
            f"speculation.method is {asked.method!r}, but the head in {path} is of kind {found.kind}; set it to "
            f"{right} or {AUTO}"
        )
    return FoundHead(path, found)


def _find_draft_model(config: Config, target: DecoderConfig) -> FoundHead:
    """The checkpoint of `speculation.model`, which has the target's tokens. Raises CheckpointError, ConfigError."""
    asked = config.speculation.model
    if asked is None:
        raise ConfigError(
            f"speculation.method is {DRAFT_MODEL!r}, but speculation.model names no model; give the directory of a "
            "small model with the tokens of the large one"
        )
    path = resolve_model_path(asked)
    found = decoder_config(read_checkpoint(path))[1]
    if not found.has_head:
        raise CheckpointError(
            f"the draft model {path} has no output projection, so it guesses no tokens; take a model that generates"
        )
    if found.vocab_size != target.vocab_size:
        model = resolve_model_path(config.model.path)
        raise CheckpointError(
            f"the draft model {path} has {found.vocab_size} tokens, and the model {model} "
            f"has {target.vocab_size}: a draft is a token of both; take a model of the same family and vocabulary"
        )
    if any(isinstance(layer.mlp, ExpertSpec) for layer in found.layers):
        raise ConfigError(f"the draft model {path} has layers of experts, which only the large model may; take another")
    return FoundHead(path, found)


def make_drafter(found: FoundHead, config: Config, groups: Sequence[PageGroup], dtype: np.dtype) -> Drafter:
    """The drafter of a head or model. Raises ConfigError where a head cannot draft as much as is asked for, or the
    model's pages are given back under it."""
    width, head = config.speculation.width, found.config
    if isinstance(head, MedusaConfig):
        if width > head.num_heads + 1:
            raise ConfigError(
                f"speculation.width is {width}, but the Medusa head in {found.path} guesses {head.num_heads} tokens; "
                f"set speculation.width to {head.num_heads + 1} or less"
            )
        return HeadDrafter(config=head, group=0, dtype=dtype.name)
    whole = [number for number, group in enumerate(groups) if group.window is None]
    if not whole:
        raise ConfigError(
            f"all layers of this model have windows ({groups[0].window} tokens), so pages are given back that the "
            f"drafter in {found.path} reads; use speculation.method ngram, or model.max_len up to the window"
        )
    if isinstance(head, DecoderConfig):
        return ModelDrafter(config=head, group=whole[0])
    return HeadDrafter(config=head, group=whole[0], dtype=dtype.name)
