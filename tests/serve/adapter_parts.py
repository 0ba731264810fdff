"""Adapters without a model: a directory has one file, whose bytes are its weights."""

import hashlib
from pathlib import Path

from jaxserve.engine.adapters import LoadedAdapters
from jaxserve.errors import AdapterError
from jaxserve.values.content import Adapter

MODEL = "fake"


def write_bytes(directory: Path, data: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "weights").write_text(data)
    return directory


def read_bytes(directory: Path, name: str) -> Adapter:
    try:
        data = (directory / "weights").read_bytes()
    except OSError as error:
        raise AdapterError(f"{directory} has no weights: {error}") from error
    return Adapter(digest=hashlib.sha256(data).digest(), name=name, num_bytes=10, weights=data)


def byte_adapters(count: int) -> LoadedAdapters:
    """With memory for so many."""
    return LoadedAdapters(read_bytes, num_bytes=10, limit_bytes=10 * count + 5)
