"""The directory of an unfinished job, beside the target: one file for each layer that is done.

A job that was killed goes on behind its last whole layer, if source, text and options are the same; the directory
becomes the target when all is there, so half a checkpoint is never mistaken for a whole one.

    OUT.partial/job.json                     what the job is
    OUT.partial/model-00001-of-00007.safetensors    a layer, as the target will have it
    OUT.partial/model-00001-of-00007.json           what was measured on the way
    OUT.partial/int4_errors.json             what int4 costs each weight, where a budget chooses
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxserve.config.model_path import CONFIG_NAME
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.files.new_directory import check_new
from jaxserve.models.checkpoint import INDEX_NAME
from jaxserve.models.orbax_io import copy_small_files
from jaxserve.models.safetensors_files import TensorSource, open_file

_JOB, ERRORS, _SUFFIX, _WRITING = "job.json", "int4_errors.json", ".partial", ".writing"


class Work:
    """An open job. `num_parts`: layers, and one for all that is beside them."""

    def __init__(self, directory: Path, target: Path, num_parts: int) -> None:
        self.directory, self.target, self._num_parts = directory, target, num_parts

    def has(self, part: int) -> bool:
        """Whether a part is done."""
        return self._file(part).is_file() and self._notes(part).is_file()

    def write(self, part: int, tensors: Mapping[str, np.ndarray], notes: Mapping[str, Any]) -> None:
        """A part is done when its tensors are there, which come last."""
        self.put(self._notes(part).name, notes)
        file = self._file(part)
        writing = file.with_suffix(_WRITING)
        whole = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
        save_file(whole, str(writing), metadata={"format": "pt"})  # transformers refuses files without this entry
        _settle(writing)
        writing.replace(file)

    def tensors(self, part: int) -> dict[str, TensorSource]:
        """Those of a part that is done. Raises CheckpointError for a file that is damaged."""
        return open_file(self._file(part))

    def notes(self, part: int) -> dict[str, Any]:
        """What was measured of a part that is done."""
        return json.loads(self._notes(part).read_text(encoding="utf-8"))

    def put(self, name: str, values: Any) -> None:
        """A file of JSON, whole or not there at all."""
        writing = self.directory / f"{name}{_WRITING}"
        writing.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        _settle(writing)
        writing.replace(self.directory / name)

    def get(self, name: str) -> Any:
        """What `put` has written; None: nothing."""
        file = self.directory / name
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    def finish(
        self, source: Path, config: Mapping[str, Any], others: Mapping[str, Any], left_out: Collection[str]
    ) -> None:
        """All parts are done: the target appears.

        `others`: further files of JSON, by name. `left_out`: files of the source that do not hold any more.
        """
        files = {self._file(part).name: self.tensors(part) for part in range(self._num_parts)}
        total = sum(
            int(np.prod(tensor.shape)) * np.dtype(tensor.dtype).itemsize
            for tensors in files.values()
            for tensor in tensors.values()
        )
        weight_map = {name: file for file, tensors in files.items() for name in sorted(tensors)}
        copy_small_files(source, self.directory)
        for name in left_out:
            (self.directory / name).unlink(missing_ok=True)
        self.put(INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
        self.put(CONFIG_NAME, config)
        for name, values in others.items():
            self.put(name, values)
        notes = {ERRORS, *(self._notes(part).name for part in range(self._num_parts))}
        for file in self.directory.iterdir():
            if file.suffix == _WRITING or file.name in notes:
                file.unlink()
        (self.directory / _JOB).unlink()  # the last: without it nobody knows what the rest is
        self.directory.replace(self.target)  # an empty directory gives way

    def _file(self, part: int) -> Path:
        return self.directory / f"model-{part + 1:05d}-of-{self._num_parts:05d}.safetensors"

    def _notes(self, part: int) -> Path:
        return self._file(part).with_suffix(".json")


@contextlib.contextmanager
def open_work(target: Path, job: Mapping[str, Any], num_parts: int) -> Iterator[tuple[Work, bool]]:
    """The job of a target, new or as it was left, and whether it was there. `job`: what must be equal to go on.

    Raises CheckpointError where the target exists, ConfigError where another job is or was under way.
    """
    check_new(target)
    directory = target.with_name(target.name + _SUFFIX)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        opened = (directory / _JOB).open("a+", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write in {target.parent}: {error}") from error
    with opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"another process is writing {directory}; wait for it, or give another target") from error
        opened.seek(0)
        text = opened.read()
        found = _parsed(text)
        if found and found != job:
            changed = sorted(key for key in {*found, *job} if found.get(key) != job.get(key))
            raise ConfigError(
                f"{directory} is of an unfinished job that differs in {', '.join(changed)}; remove it to begin anew, "
                "or give another target"
            )
        if not found and any(file.name != _JOB for file in directory.iterdir()):
            raise ConfigError(f"{directory} has files of no job; remove it, or give another target")
        if not found:
            opened.truncate(0)
            json.dump(job, opened)
            opened.flush()
            os.fsync(opened.fileno())
        yield Work(directory, target, num_parts), bool(found)


def _parsed(text: str) -> dict[str, Any]:
    try:
        return json.loads(text) if text else {}
    except json.JSONDecodeError:  # killed while it was written: nothing else is there
        return {}


def digest_of(path: Path) -> str:
    """Of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _settle(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
