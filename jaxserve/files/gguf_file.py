"""A GGUF file (or the parts of one) as its metadata and the places of its tensors. No tensor is read here.

    "GGUF", version, counts | metadata: key, type, value | tensors: name, shape, type, offset | padding | data

Versions 2 and 3, little-endian. Checkpoints and tokenizers are both made from this, each from its own keys, so the
module uses the standard library alone. Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import dataclasses
import enum
import functools
import math
import mmap
import re
import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from jaxserve.errors import CheckpointError

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # of the data, where general.alignment says nothing
_MAX_AXES = 4
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf\Z")
_FETCH_AGAIN = "fetch the file again"
# What makes a directory a checkpoint of another kind, whatever GGUF files lie in it.
_OTHER_KINDS = ("config.json", "jaxserve_orbax.json")


class ValueType(enum.IntEnum):
    """Types of metadata values, by their numbers in files."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_FORMATS = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}

# Numbers of element types: name, elements of a block, bytes of a block.
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GgufArray:
    """An array of the metadata, still in the file: vocabularies are long, and most readers need only their length."""

    file: Path
    type: ValueType
    count: int
    start: int

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"<{self.count} values of type {self.type.name}>"

    def read(self) -> list[Any]:
        """All values. Raises CheckpointError for text that is not UTF-8."""
        with _Header(self.file) as header:
            header.at = self.start
            return header.read_values(self.type, self.count)

    def read_texts(self, wanted: Collection[int]) -> dict[int, str]:
        """Texts by their numbers, of an array of texts; others are passed over. Raises CheckpointError as `read`."""
        with _Header(self.file) as header:
            header.at = self.start
            return header.read_texts(wanted, self.count)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Where one tensor lies.

    Attributes:
      name: as in the file.
      file: the part that holds it.
      shape: outermost axis first, as NumPy has it; files have the reverse.
      type: name of the element type, or "type 99" for a number that is not known.
      block: elements of one block, along the last axis.
      block_bytes: bytes of a block.
      start: of its bytes in the file.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    type: str
    block: int
    block_bytes: int
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.block * self.block_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GgufFile:
    """One model, the same object as long as its files are the same. `path`: its file, or the first of its parts."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def get(self, key: str, *types: type) -> Any:
        """A value of the metadata, of one of these Python types; None where it is absent.

        Raises CheckpointError for a value of another type.
        """
        value = self.metadata.get(key)
        if value is not None and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
            wanted = " or ".join(kind.__name__ for kind in types)
            raise CheckpointError(f"{self.path}: {key} is {value!r:.80}, but must be of type {wanted}; {_FETCH_AGAIN}")
        return value


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only one in a directory that holds no other kind of checkpoint.

    Of a file in parts it is the first, whichever of them is named. None: the path means something else. Raises
    CheckpointError for a directory with several.
    """
    if path.suffix == SUFFIX and path.is_file():
        return _first_part(path)
    if not path.is_dir() or any((path / name).exists() for name in _OTHER_KINDS):
        return None
    found = sorted({_first_part(file) for file in path.glob(f"*{SUFFIX}")})
    if len(found) > 1:
        raise CheckpointError(
            f"{path} has {len(found)} GGUF files: {', '.join(file.name for file in found)}; set model.path to one of "
            "them"
        )
    return found[0] if found else None


def parts_of(first: Path) -> tuple[Path, ...]:
    """All files of the one whose first part, or only file, this is."""
    match = _PART.match(first.name)
    if match is None:
        return (first,)
    count = int(match["count"])
    return tuple(first.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}{SUFFIX}") for i in range(1, count + 1))


def _first_part(file: Path) -> Path:
    match = _PART.match(file.name)
    return file if match is None else file.with_name(f"{match['stem']}-00001-of-{match['count']}{SUFFIX}")


def read_gguf(first: Path) -> GgufFile:
    """The metadata and the places of all tensors, of all parts. Files that have not changed since are not read again.

    Raises CheckpointError naming the file when one is missing, truncated, of another version or no GGUF file, or when
    parts do not belong together.
    """
    files = parts_of(first)
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{first} has {len(files)} parts, of which {', '.join(missing)} are missing; fetch them")
    stats = [file.stat() for file in files]
    return _read_parts(files, tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats))


@functools.lru_cache(maxsize=4)  # a start asks for the header of its file from eight places; a vocabulary takes 0.1 s
def _read_parts(files: tuple[Path, ...], _: tuple[tuple[int, ...], ...]) -> GgufFile:
    first = files[0]
    metadata: Mapping[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    for number, file in enumerate(files):
        with _Header(file) as header:
            found, places = header.read()
        metadata = found if number == 0 else metadata
        if found.get("split.count", 1) != len(files) or found.get("split.no", 0) != number:
            raise CheckpointError(
                f"{file}: split.no is {found.get('split.no', 0)} and split.count {found.get('split.count', 1)}, but by "
                f"its name the file is part {number + 1} of {len(files)}; give all parts the names they had"
            )
        if twice := sorted(places.keys() & tensors.keys()):
            raise CheckpointError(f"{file}: tensor {twice[0]} is in another part, too; {_FETCH_AGAIN}")
        tensors |= places
    expected = metadata.get("split.tensors.count", len(tensors))
    if len(files) > 1 and expected != len(tensors):
        raise CheckpointError(
            f"{first}: split.tensors.count is {expected}, but the {len(files)} parts have {len(tensors)} tensors; "
            "fetch all parts from one place"
        )
    return GgufFile(path=first, metadata=metadata, tensors=tensors)


class _Header:
    """A cursor over the bytes before the data of one file. The file is mapped, but no page of the data is touched."""

    def __init__(self, file: Path) -> None:
        self.file, self.at = file, 0
        try:
            with file.open("rb") as opened:
                self.size = file.stat().st_size
                self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) if self.size else mmap.mmap(-1, 1)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error

    def __enter__(self) -> "_Header":
        return self

    def __exit__(self, *error: object) -> None:
        self._map.close()

    def fail(self, problem: str, remedy: str = _FETCH_AGAIN) -> NoReturn:
        raise CheckpointError(f"{self.file}: {problem}; {remedy}")

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self.size < 4 or self._map[:4] != _MAGIC:
            self.fail(f"it is no GGUF file: it begins with {self._map[: min(4, self.size)]!r} and not {_MAGIC!r}")
        self.at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = f"{swapped}, big-endian," if swapped in _VERSIONS else str(version)
            known = " and ".join(map(str, _VERSIONS))
            self.fail(
                f"its version is {what} which is not supported; known: {known}, little-endian",
                "convert the model again with a converter of today",
            )
        num_tensors, num_values = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._text()
            if key in metadata:
                self.fail(f"{key} is in the metadata twice")
            metadata[key] = self._value(self._type(key), key)
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1 or alignment & alignment - 1:
            self.fail(f"general.alignment is {alignment!r}, but must be a power of two")
        places: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self._text()
            if name in places:
                self.fail(f"tensor {name} is there twice")
            count = self._number("I")
            if count > _MAX_AXES:
                self.fail(f"tensor {name} has {count} axes, but GGUF has at most {_MAX_AXES}")
            shape = tuple(self._number("Q") for _ in range(count))
            places[name] = shape[::-1], self._number("I"), self._number("Q")
        data = -(-self.at // alignment) * alignment
        tensors = {name: self._tensor(name, *place, data, alignment) for name, place in places.items()}
        return metadata, tensors

    def _tensor(
        self, name: str, shape: tuple[int, ...], number: int, offset: int, data: int, alignment: int
    ) -> GgufTensor:
        kind, block, block_bytes = _TYPES.get(number, (f"type {number}", 1, 0))
        if shape and shape[-1] % block:
            self.fail(
                f"tensor {name} is {kind} of shape {list(shape)}, but its last axis must be a multiple of {block}"
            )
        if offset % alignment:
            self.fail(f"tensor {name} begins at byte {offset} of the data, which is no multiple of {alignment}")
        tensor = GgufTensor(
            name=name,
            file=self.file,
            shape=shape,
            type=kind,
            block=block,
            block_bytes=block_bytes,
            start=data + offset,
        )
        if (end := tensor.start + tensor.num_bytes) > self.size:
            self.fail(f"the file is truncated: tensor {name} ends at byte {end}, but the file has {self.size}")
        return tensor

    def read_values(self, kind: ValueType, count: int) -> list[Any]:
        if kind is not ValueType.STRING:
            return [*self._numbers(f"{count}{_FORMATS[kind]}")]
        return [*self.read_texts(range(count), count).values()]

    def read_texts(self, wanted: Collection[int], count: int) -> dict[int, str]:
        try:
            return {
                number: self._map[start:end].decode()
                for number, (start, end) in enumerate(self._texts(count))
                if number in wanted
            }
        except UnicodeDecodeError as error:
            self.fail(f"a text in its metadata is not UTF-8: {error}")

    def _value(self, kind: ValueType, key: str) -> Any:
        if kind is ValueType.STRING:
            return self._text()
        if kind is not ValueType.ARRAY:
            value = self._number(_FORMATS[kind])
            return _shortest(value) if kind is ValueType.FLOAT32 else value
        kind, count = self._type(key), self._number("Q")
        if kind is ValueType.ARRAY:
            self.fail(f"{key} is an array of arrays, which is not supported")
        array = GgufArray(file=self.file, type=kind, count=count, start=self.at)
        if count > self.size:
            self._truncated()
        if kind is ValueType.STRING:
            for _ in self._texts(count):
                pass
        else:
            self.at += count * struct.calcsize(f"<{_FORMATS[kind]}")
        if self.at > self.size:
            self._truncated()
        return array

    def _texts(self, count: int) -> Iterator[tuple[int, int]]:
        """Where each of `count` texts begins and ends."""
        length_at, at, size = struct.Struct("<Q").unpack_from, self.at, self.size
        for _ in range(count):
            if at + 8 > size:
                self._truncated()
            start = at + 8
            at = start + length_at(self._map, at)[0]
            yield start, at
        if at > size:
            self._truncated()
        self.at = at

    def _type(self, key: str) -> ValueType:
        number = self._number("I")
        try:
            return ValueType(number)
        except ValueError:
            self.fail(f"{key} has values of type {number}, which GGUF does not have")

    def _text(self) -> str:
        [(start, end)] = self._texts(1)
        text = self._map[start:end]
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            self.fail(f"the text {text[:40]!r} in its metadata is not UTF-8: {error}")

    def _number(self, form: str) -> Any:
        return next(self._numbers(form))

    def _numbers(self, form: str) -> Iterator[Any]:
        end = self.at + struct.calcsize(f"<{form}")
        if end > self.size:
            self._truncated()
        found = struct.unpack_from(f"<{form}", self._map, self.at)
        self.at = end
        return iter(found)

    def _truncated(self) -> NoReturn:
        self.fail(f"the file is truncated or damaged: its header does not end within its {self.size} bytes")


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 and not 9.999999747378752e-06, as configs have it."""
    if not math.isfinite(value):
        return value
    candidates = (float(f"{value:.{digits}g}") for digits in range(6, 10))
    return next(number for number in candidates if struct.pack("<f", number) == struct.pack("<f", value))
