"""What `model.path` and other settings of its kind name: a directory, a GGUF file, or a model in the package.

Apart from `models`, which loads JAX: a router needs a tokenizer and no model.
"""

import importlib.resources
import json
import re
from pathlib import Path

from jaxserve.errors import CheckpointError
from jaxserve.files.gguf_file import SUFFIX

PACKAGED = {"demo": "demo_model", "demo-vision": "demo_model/vision"}  # directories in the package, by their names
CONFIG_NAME = "config.json"
_EXAMPLES = "examples.json"  # questions as texts, most general first
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)  # OWNER/NAME


def resolve_model_path(path: str | Path) -> Path:
    """The directory or GGUF file that `model.path` names; the names of `PACKAGED` are models in the package.

    Raises CheckpointError if there is none.
    """
    if str(path) in PACKAGED:
        directory = Path(str(importlib.resources.files("jaxserve"))) / PACKAGED[str(path)]
        if not (directory / CONFIG_NAME).is_file():
            raise CheckpointError(
                f"this installation has no demo model (no {directory / CONFIG_NAME}); give a directory"
            )
        return directory
    directory = Path(path).expanduser()
    if not directory.is_dir() and not (directory.suffix == SUFFIX and directory.is_file()):
        what = "is a file, but must be a directory" if directory.exists() else "does not exist"
        hub_name = _hub_name(directory)
        if hub_name is not None:
            raise CheckpointError(f"model directory {directory} {what}, {_how_to_fetch(hub_name)}")
        raise CheckpointError(
            f"model directory {directory} {what}; give one with config.json, a file that ends in {SUFFIX}, or 'demo'"
        )
    return directory


def model_name(path: str) -> str:
    """What clients call the model of `model.path` unless `model.name` says something else.

    Raises CheckpointError if there is none.
    """
    return path if path in PACKAGED else resolve_model_path(path).name


def packaged_examples(path: str) -> tuple[str, ...]:
    """Questions that the model of `model.path` is known to answer: those in the files of a model in the package."""
    if path not in PACKAGED:
        return ()
    file = resolve_model_path(path) / _EXAMPLES
    return tuple(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else ()


def _hub_name(path: Path) -> str | None:
    """OWNER/NAME where `path`, at which there is nothing, may have been meant as a name of Hugging Face.

    Paths of a config are absolute by now. Where there is a folder of that OWNER, a directory in it was meant.
    """
    owner, name = path.absolute().parent, "/".join(path.absolute().parts[-2:])
    if owner.exists() or not owner.parent.is_dir() or path.suffix == SUFFIX:
        return None
    return name if _HUB_NAME.fullmatch(name) else None


def _how_to_fetch(hub_name: str) -> str:
    target = f"models/{hub_name.rpartition('/')[2]}"
    fetch = f"hf download {hub_name} --local-dir {target}"
    if hub_name.upper().endswith("GGUF"):  # a repository of many files, each a whole model
        fetch, target = f"hf download {hub_name} FILE{SUFFIX} --local-dir {target}", f"{target}/FILE{SUFFIX}"
    return (
        f"and jaxserve downloads nothing. If {hub_name} is a model of Hugging Face, fetch it with `{fetch}`; then "
        f"`jaxserve serve {target}` serves it, and {target} is its path everywhere else"
    )
