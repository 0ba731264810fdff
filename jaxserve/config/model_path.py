"""What `model.path` and other settings of its kind name: a directory, a GGUF file, or a model in the package.

Apart from `models`, which loads JAX: a router needs a tokenizer and no model.
"""

import importlib.resources
from pathlib import Path

from jaxserve.errors import CheckpointError
from jaxserve.gguf_file import SUFFIX

PACKAGED = {"demo": "demo_model", "demo-vision": "demo_model/vision"}  # directories in the package, by their names
CONFIG_NAME = "config.json"


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
        raise CheckpointError(
            f"model directory {directory} {what}; give one with config.json, a file that ends in {SUFFIX}, or 'demo'"
        )
    return directory
