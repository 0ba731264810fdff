"""The draft head of an engine: that of `speculation.method` and `speculation.model`, or the one beside its model."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxserve.config.schema import Config
from jaxserve.errors import ConfigError
from jaxserve.models.checkpoint import CONFIG_NAME, resolve_model_path
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.drafts import HeadConfig, HeadKind, MedusaConfig, open_head, read_head_config
from jaxserve.runtime.head_drafting import HeadDrafter
from jaxserve.sched.plan import PageGroup

AUTO = "auto"
HEAD_DIRECTORY = "draft"  # in the directory of a model that comes with a head
_KINDS = {
    "eagle": (HeadKind.EAGLE, HeadKind.EAGLE3),
    "medusa": (HeadKind.MEDUSA,),
    "mtp": (HeadKind.MTP,),
}
_WITHOUT_MODEL = ("none", "ngram", "suffix")


class FoundHead(NamedTuple):
    """The directory of a head, and its config."""

    path: Path
    config: HeadConfig


def find_head(config: Config, target: DecoderConfig) -> FoundHead | None:
    """The head that the config asks for; None where drafts come from elsewhere.

    With method auto it is the head in `speculation.model`, or that of the model's own directory, whatever its kind.
    Raises CheckpointError for a head that does not fit, ConfigError for one of another kind, or none.
    """
    asked = config.speculation
    if asked.method != AUTO and asked.method not in _KINDS:
        if asked.model is not None and asked.method in _WITHOUT_MODEL:
            raise ConfigError(
                f"speculation.model is {asked.model!r}, but drafts of method {asked.method!r} come from no model; "
                f"leave it out, or set speculation.method to {', '.join((AUTO, *_KINDS))}"
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


def make_drafter(found: FoundHead, config: Config, groups: Sequence[PageGroup], dtype: np.dtype) -> HeadDrafter:
    """The drafter of a head. Raises ConfigError where the head cannot draft as much as is asked for, or the model's
    pages are given back under it."""
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
            f"draft head in {found.path} reads; use speculation.method ngram, or model.max_len up to the window"
        )
    return HeadDrafter(config=head, group=whole[0], dtype=dtype.name)
