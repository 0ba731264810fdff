"""Pictures in files: those that the command line names, and those that a file of prompts names, under one directory."""

import json
from collections.abc import Sequence
from pathlib import Path

from jaxserve.config.model_path import CONFIG_NAME, resolve_model_path
from jaxserve.config.schema import ModelConfig
from jaxserve.engine import OpenUrl, refuse_url
from jaxserve.errors import ConfigError, InvalidRequest

MAX_FILE_BYTES = 64 * 2**20


def read_pictures(paths: Sequence[Path]) -> tuple[bytes, ...]:
    """The files of `--picture`. Raises ConfigError for one that cannot be read, or has more than MAX_FILE_BYTES."""
    try:
        for path in paths:
            if (size := path.stat().st_size) > MAX_FILE_BYTES:
                raise ConfigError(f"--picture {path} has {size} bytes; at most {MAX_FILE_BYTES} are read")
        return tuple(path.read_bytes() for path in paths)
    except OSError as error:
        raise ConfigError(f"--picture {error.filename} cannot be read: {error.strerror}; name a file") from error


def check_takes_pictures(model: ModelConfig) -> None:
    """Raises ConfigError where config.json says that the model takes text only, and CheckpointError without a model.

    A file that cannot be read is reported by who loads the model, which this spares those who gave the wrong one.
    """
    from jaxserve.vision import takes_pictures  # NumPy, which prompts of text do not need here

    path = resolve_model_path(model.path)
    try:
        config = {} if path.is_file() else json.loads((path / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if isinstance(config, dict) and not takes_pictures(config | model.overrides):
        raise ConfigError(
            f"--picture is for a model that takes pictures, and {model.path} takes text only; demo-vision takes them, "
            "and docs/models.md names the others"
        )


def open_under(directory: Path) -> OpenUrl:
    """Reads pictures of the URL `file:NAME`, whose names are relative to `directory`.

    A name that leads out of it, by `..` or through a link, is refused. Raises ConfigError for what is no directory.
    """
    if not directory.is_dir():
        raise ConfigError(f"--pictures {directory} is no directory; name the one that the files of pictures are in")
    root = directory.resolve()

    def open_url(url: str) -> bytes:
        if not url.startswith("file:"):
            return refuse_url(url)
        name = url.removeprefix("file:")
        try:
            path = (root / name).resolve()
            if not path.is_relative_to(root):
                raise InvalidRequest(f"the picture {name!r:.200} is not under --pictures {directory}")
            if not path.is_file():
                raise InvalidRequest(f"the picture {name!r:.200} is no file under --pictures {directory}")
            if (size := path.stat().st_size) > MAX_FILE_BYTES:
                raise InvalidRequest(f"the picture {name!r:.200} has {size} bytes; at most {MAX_FILE_BYTES} are read")
            return path.read_bytes()
        except (OSError, ValueError) as error:  # also a name with a zero in it
            raise InvalidRequest(f"the picture {name!r:.200} cannot be read: {error}") from error

    return open_url
