"""GGUF files for tests, byte by byte after the specification; it shares no code with the reader."""

import dataclasses
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q4_K": 12}
NUMBERS |= {"Q5_K": 13, "Q6_K": 14, "BF16": 30, "MXFP4": 39}
_FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_PAD = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """A tensor as it is stored: `octets` uint8 [..., out, bytes of a row]."""

    kind: str | int
    shape: tuple[int, ...]
    octets: np.ndarray


def write(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | Packed],
    *,
    version: int = 3,
    alignment: int = _PAD,
) -> Path:
    """Floats are stored as they are. Whole numbers of the metadata are uint32, and int32 in lists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = dict(metadata) | ({} if alignment == _PAD else {"general.alignment": alignment})
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    header += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, tensor in tensors.items():
        stored = tensor if isinstance(tensor, Packed) else _packed(tensor)
        number = stored.kind if isinstance(stored.kind, int) else NUMBERS[stored.kind]
        header += _text(name) + struct.pack("<I", len(stored.shape))
        header += struct.pack(f"<{len(stored.shape)}Q", *stored.shape[::-1]) + struct.pack("<IQ", number, len(data))
        data += _padded(np.ascontiguousarray(stored.octets).tobytes(), alignment)
    path.write_bytes(_padded(header, alignment) + data)
    return path


def _packed(array: np.ndarray) -> Packed:
    array = np.ascontiguousarray(array)
    return Packed(kind=_FLOATS[array.dtype.name], shape=array.shape, octets=array.view(np.uint8))


def _padded(data: bytes, alignment: int) -> bytes:
    return data + bytes(-len(data) % alignment)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        kind, form = _kind(value[0] if value else 0)
        if kind == 8:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
        kind, form = (5, "i") if kind == 4 else (kind, form)
        return struct.pack("<IIQ", 9, kind, len(value)) + struct.pack(f"<{len(value)}{form}", *value)
    kind, form = _kind(value)
    return struct.pack("<I", kind) + (_text(value) if kind == 8 else struct.pack(f"<{form}", value))


def _kind(value: Any) -> tuple[int, str]:
    """The number of a type of values, and how `struct` calls it."""
    kinds = {str: (8, ""), bool: (7, "?"), int: (4, "I"), float: (6, "f")}
    return kinds[type(value)]


def sentencepiece_metadata(directory: Path) -> dict[str, Any]:
    """What a converter writes of a tokenizer.model: its pieces with their scores and types, and the special tokens that
    tokenizer_config.json names."""
    model = (directory / "tokenizer.model").read_bytes()
    found = sentencepiece.SentencePieceProcessor(model_proto=model)
    kinds = {2: found.is_unknown, 3: found.is_control, 5: found.is_unused, 6: found.is_byte}
    ids = range(found.get_piece_size())
    trainer = next(value for number, value in fields(model) if number == 2)
    normalizer = dict(fields(next(value for number, value in fields(model) if number == 3)))
    user_defined = {value.decode() for number, value in fields(trainer) if number == 31}
    options = json.loads((directory / "tokenizer_config.json").read_text())
    special = {int(i) for i, token in options.get("added_tokens_decoder", {}).items() if token["special"]} - {0}
    is_unigram = dict(fields(trainer)).get(3, 1) == 1
    metadata = {
        "tokenizer.ggml.model": "t5" if is_unigram else "llama",
        "tokenizer.ggml.tokens": [found.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [found.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [
            3
            if i in special
            else 4
            if found.id_to_piece(i) in user_defined
            else next((k for k, test in kinds.items() if test(i)), 1)
            for i in ids
        ],
        "tokenizer.ggml.bos_token_id": found.bos_id(),
        "tokenizer.ggml.eos_token_id": found.eos_id(),
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(3, 1)),
        "tokenizer.ggml.remove_extra_whitespaces": bool(normalizer.get(4, 1)),
    }
    if normalizer.get(2):
        metadata["tokenizer.ggml.precompiled_charsmap"] = [*normalizer[2]]
    return metadata


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a serialised protobuf message."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
        elif tag & 7 == 5:
            yield tag >> 3, struct.unpack_from("<f", message, at)[0]
            at += 4
        else:
            size = varint()
            yield tag >> 3, message[at : at + size]
            at += size
