"""The files that sentence-transformers puts beside a checkpoint: which tokens are pooled, and what follows.

`modules.json` lists the steps from text to an embedding or a score: the transformer, then a pooling with its settings
in `1_Pooling/config.json`, then perhaps a normalisation. A module that is not computed here is refused by name, since
without it every embedding would be wrong; `model.pooling` other than auto is the way round it.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.api import Pooling
from jaxserve.errors import CheckpointError
from jaxserve.models.checkpoint import read_json

MODULES_NAME = "modules.json"
POOLING_NAME = "1_Pooling/config.json"  # where there is no list of modules

# The modes of `pooling_mode`, and the flags that older files have in its place.
_MODES = {"mean": Pooling.MEAN, "lasttoken": Pooling.LAST, "cls": Pooling.FIRST}
_FLAGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_REMEDY = "set model.pooling to mean, last or first to embed in that way all the same"


class SentenceModules(NamedTuple):
    """What the files say.

    Attributes:
      settings: file with the settings of the pooling; None without a pooling.
      normalizes: embeddings have length 1 in the end; also where no file speaks of embeddings.
      answers: file with the two tokens that a score for a pair of texts is made from (`LogitScore`); None without one.
      unknown: modules that are not computed here, by the names of their classes.
    """

    settings: Path | None = None
    normalizes: bool = True
    answers: Path | None = None
    unknown: tuple[str, ...] = ()


def read_modules(directory: Path) -> SentenceModules:
    """The modules of a checkpoint directory; the defaults where it has no such files. Raises CheckpointError."""
    file = directory / MODULES_NAME
    if not file.is_file():
        settings = directory / POOLING_NAME
        return SentenceModules(settings=settings if settings.is_file() else None)
    names: list[str] = []
    files: dict[str, Path] = {}
    for entry in _read_list(file):
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("type", "path")):
            raise CheckpointError(f"{file} has the module {entry!r:.80}, which lacks a type or a path")
        names.append(entry["type"].rpartition(".")[2])
        files[names[-1]] = directory / entry["path"] / "config.json"
    return SentenceModules(
        settings=files.get("Pooling"),
        normalizes="Pooling" not in files or "Normalize" in files,
        answers=files.get("LogitScore"),
        unknown=tuple(name for name in names if name not in ("Transformer", "Pooling", "Normalize", "LogitScore")),
    )


def read_pooling(modules: SentenceModules) -> Pooling:
    """The pooling that the files ask for, a mean where they ask for none. Raises CheckpointError."""
    if modules.settings is None:
        return Pooling.MEAN
    if modules.unknown:
        raise CheckpointError(
            f"{modules.settings.parent.parent / MODULES_NAME} has {', '.join(modules.unknown)} among the steps to an "
            f"embedding, which is not supported; {_REMEDY}"
        )
    values = read_json(modules.settings)
    mode = values.get("pooling_mode")
    modes = [mode] if mode is not None else [name for flag, name in _FLAGS.items() if values.get(flag)]
    if len(modes) == 1 and isinstance(modes[0], str) and modes[0] in _MODES:
        return _MODES[modes[0]]
    found = " and ".join(map(str, modes)) or "nothing"
    raise CheckpointError(
        f"{modules.settings} pools by {found}, which is not supported (one of {', '.join(_MODES)} is); {_REMEDY}"
    )


def read_answers(modules: SentenceModules) -> tuple[int, int] | None:
    """The tokens that speak for and against a document; None where there are not both. Raises CheckpointError."""
    if modules.answers is None:
        return None
    values = read_json(modules.answers)
    positive, negative = values.get("true_token_id"), values.get("false_token_id")
    return (positive, negative) if type(positive) is int and type(negative) is int else None


def read_sizes(config: dict[str, Any], hidden_size: int, origin: str) -> range | tuple[int, ...]:
    """Smaller sizes that embeddings may be cut to, by the `matryoshka_dimensions` and `is_matryoshka` of config.json.

    Raises CheckpointError for what is no list of sizes.
    """
    sizes = config.get("matryoshka_dimensions")
    if sizes is None:
        return range(1, hidden_size) if config.get("is_matryoshka") is True else ()
    if not isinstance(sizes, list) or any(type(size) is not int or not 0 < size <= hidden_size for size in sizes):
        raise CheckpointError(
            f"{origin}: matryoshka_dimensions is {sizes!r:.80}, but must list sizes of 1 to {hidden_size}"
        )
    return tuple(sorted(sizes))


def _read_list(file: Path) -> list[Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(found, list):
        raise CheckpointError(f"{file} holds a {type(found).__name__}, but must hold a list of modules")
    return found
