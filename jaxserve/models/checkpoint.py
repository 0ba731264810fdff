"""A checkpoint on disk, before any weight is read: the JSON files of its directory and the values in them.

These are the config, the ids that end a sequence and default sampling options; the names 'demo' and 'demo-vision'
stand for the packaged models. A GGUF file has all of them in its metadata. Weights are read in `safetensors_files`,
`gguf` and `orbax_io`, tokenizers in `text`.
"""

import dataclasses
import enum
import json
import re
from pathlib import Path
from typing import Any

from jaxserve.config.model_path import CONFIG_NAME, resolve_model_path
from jaxserve.config.schema import ModelConfig
from jaxserve.errors import CheckpointError
from jaxserve.files.gguf_file import find_gguf, read_gguf
from jaxserve.models.gguf.config import architecture_of, read_config, read_generation

ORBAX_MARKER = "jaxserve_orbax.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
GENERATION_NAME = "generation_config.json"
_SHARD = re.compile(r"model-(?P<number>\d{1,6})-of-(?P<count>\d{1,6})\.safetensors")
_MAX_LISTED = 8  # names in a message

# Fields of generation_config.json that are defaults of sampling options of the same meaning here.
_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class CheckpointKind(enum.StrEnum):
    """Forms in which the weights are stored."""

    HUGGING_FACE = "hugging_face"
    ORBAX = "orbax"
    GGUF = "gguf"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A readable checkpoint.

    Attributes:
      path: the directory, or the GGUF file that was named.
      kind: how the weights are stored.
      config: parsed config.json, or the same fields from the metadata of a GGUF file.
      generation: parsed generation_config.json, empty when there is none.
      family: name, path or entry point of the `Family` that reads it; None: that of its architecture.
      gguf: the GGUF file, or the first of its parts; None for the other kinds.
    """

    path: Path
    kind: CheckpointKind
    config: dict[str, Any]
    generation: dict[str, Any]
    family: str | None = None
    gguf: Path | None = None

    @property
    def config_file(self) -> str:
        """The path of config.json, or of the GGUF file, for messages about a field."""
        return str(self.path / CONFIG_NAME if self.gguf is None else self.gguf)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence: those of generation_config.json and of config.json together, ascending."""
        found: set[int] = set()
        generation_file = self.config_file if self.gguf is not None else self.path / GENERATION_NAME
        text = self.config.get("text_config")  # where models with pictures have the fields of the decoder
        for name, values in (
            (generation_file, self.generation),
            (self.config_file, self.config),
            (self.config_file, text if isinstance(text, dict) else {}),
        ):
            ids = values.get("eos_token_id")
            ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
            for token_id in ids:
                if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                    raise CheckpointError(f"{name}: eos_token_id holds {token_id!r}, which is no token id")
                found.add(token_id)
        return tuple(sorted(found))

    @property
    def default_sampling(self) -> dict[str, float | int]:
        """Sampling options that the checkpoint recommends, by the names of `SamplingParams`.

        With `do_sample` false: greedy, with the repetition penalty, which transformers applies then too.
        max_new_tokens and max_length are not read: the length is a matter of the request.
        """
        given = {name: self.generation.get(name) for name in _SAMPLING_FIELDS}
        if self.generation.get("do_sample") is False:
            given = {"temperature": 0.0, "repetition_penalty": given["repetition_penalty"]}
        return {name: value for name, value in given.items() if value is not None}


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Reads the JSON files of a checkpoint directory (or 'demo'), or the metadata of a GGUF file.

    Raises CheckpointError when the directory or config.json is missing, JSON is malformed, or the metadata of GGUF are.
    """
    directory = resolve_model_path(path)
    if (gguf := find_gguf(directory)) is not None:
        return _read_gguf_checkpoint(directory, gguf)
    kind = CheckpointKind.ORBAX if (directory / ORBAX_MARKER).is_file() else CheckpointKind.HUGGING_FACE
    generation_file = directory / GENERATION_NAME
    return Checkpoint(
        path=directory,
        kind=kind,
        config=read_json(directory / CONFIG_NAME),
        generation=read_json(generation_file) if generation_file.is_file() else {},
    )


def _read_gguf_checkpoint(path: Path, first: Path) -> Checkpoint:
    file = read_gguf(first)
    _, architecture = architecture_of(file)
    return Checkpoint(
        path=path,
        kind=CheckpointKind.GGUF,
        config=read_config(file),
        generation=read_generation(file),
        family=f"jaxserve.models.gguf.families:{architecture.family}",
        gguf=first,
    )


def configured_checkpoint(model: ModelConfig) -> Checkpoint:
    """The checkpoint of `model.path`, with `model.overrides` in its config, to be read by `model.family`.

    Raises CheckpointError as `read_checkpoint`.
    """
    checkpoint = read_checkpoint(model.path)
    config = checkpoint.config | model.overrides
    return dataclasses.replace(checkpoint, config=config, family=model.family or checkpoint.family)


def check_described(checkpoint: Checkpoint, *, random_weights: bool) -> None:
    """Checks the files that a directory must have beside its config.json, before anything is read that takes long.

    Raises CheckpointError where there are no weights.
    """
    if not random_weights and checkpoint.kind is CheckpointKind.HUGGING_FACE:
        find_weights(checkpoint.path)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The files of weights of a Hugging Face directory.

    Attributes:
      index: says which tensors are in which files; None: all tensors of `files` are meant.
      files: without an index, the only file, or all shards in their order.
      unused_index: that of other files, which nothing reads.
    """

    index: Path | None = None
    files: tuple[Path, ...] = ()
    unused_index: Path | None = None


def find_weights(directory: Path) -> WeightFiles:
    """The files that a Hugging Face directory is read from, in the order of transformers: model.safetensors, else the
    index; and shards that lack their index.

    An index that names model.safetensors is of more than this file, and goes before it. Raises CheckpointError without
    any of these, and for shards that are not all there.
    """
    index, single = directory / INDEX_NAME, directory / SINGLE_NAME
    if single.is_file():
        if not index.is_file():
            return WeightFiles(files=(single,))
        try:
            is_of_it = SINGLE_NAME in read_weight_map(index).values()
        except CheckpointError:  # a file that is left over may hold anything
            is_of_it = False
        return WeightFiles(index=index) if is_of_it else WeightFiles(files=(single,), unused_index=index)
    if index.is_file():
        return WeightFiles(index=index)
    if shards := _find_shards(directory):
        return WeightFiles(files=shards)
    said = f"{directory} has neither {SINGLE_NAME} nor {INDEX_NAME}"
    if others := sorted(file.name for file in directory.glob("*.safetensors")):
        raise CheckpointError(
            f"{said} nor files called model-00001-of-0000N.safetensors, but {', '.join(others)}; rename the file of "
            f"the whole model to {SINGLE_NAME}, or fetch the index"
        )
    if others := sorted(f.name for f in directory.glob("*.bin")) + sorted(f.name for f in directory.glob("*.pt*")):
        raise CheckpointError(f"{said}; found {', '.join(others)}, which must be converted to safetensors first")
    raise CheckpointError(
        f"{said}; it has sizes alone, enough for `jaxserve plan` and `simulate`; set model.path to a directory with "
        "weights"
    )


def _find_shards(directory: Path) -> tuple[Path, ...]:
    """The numbered files of a model, which must be all of one sequence."""
    found = {file: match for file in directory.iterdir() if (match := _SHARD.fullmatch(file.name))}
    files = sorted(found, key=lambda file: int(found[file]["number"]))
    counts = sorted({int(match["count"]) for match in found.values()})
    if len(counts) > 1:
        raise CheckpointError(
            f"{directory} has no {INDEX_NAME}, and its files are of several sequences: "
            f"{', '.join(file.name for file in files)}; fetch the index, or remove those of another model"
        )
    numbers = [int(found[file]["number"]) for file in files]
    if counts and numbers != [*range(1, counts[0] + 1)]:
        width = max(len(match["number"]) for match in found.values())
        missing = sorted({*range(1, counts[0] + 1)} - {*numbers})
        names = [f"model-{number:0{width}d}-of-{counts[0]:0{width}d}.safetensors" for number in missing[:_MAX_LISTED]]
        more = f" and {len(missing) - _MAX_LISTED} more" if len(missing) > _MAX_LISTED else ""
        said = f"but has {', '.join(file.name for file in files)}"
        said = f"of which {', '.join(names)}{more} are missing" if names else said
        raise CheckpointError(
            f"{directory} should have {counts[0]} files by their names, {said}; fetch the whole model"
        )
    return tuple(files)


def read_weight_map(index_file: Path) -> dict[str, str]:
    """The file of each tensor, by an index. Raises CheckpointError."""
    weight_map = read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index_file}: 'weight_map' must map tensor names to file names")
    return weight_map


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError naming the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing; a checkpoint directory needs it") from error
    except (
        OSError,
        ValueError,
        RecursionError,
    ) as error:  # also numbers of too many digits
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, but must hold a JSON object")
    return value
