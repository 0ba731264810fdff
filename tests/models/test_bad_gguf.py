"""GGUF files that cannot be used: each error says which file, tensor or key, what is wrong and what to do."""

import struct
from pathlib import Path
from typing import Any

import gguf_files
import gguf_models
import gguf_oracle as oracle
import numpy as np
import pytest

from jaxserve.config.schema import ModelConfig
from jaxserve.errors import CheckpointError
from jaxserve.files.gguf_file import read_gguf
from jaxserve.models import configured_checkpoint, decoder_config, load_model, read_checkpoint
from jaxserve.models.gguf.architectures import ARCHITECTURES
from jaxserve.models.gguf.blocks import BLOCKS

HEAD = {
    "llama.context_length": 8,
    "llama.embedding_length": 64,
    "llama.block_count": 1,
    "llama.feed_forward_length": 64,
}
HEAD |= {"general.architecture": "llama", "llama.attention.head_count": 2}
HEAD |= {"llama.attention.layer_norm_rms_epsilon": 1e-5}
TABLE = {"token_embd.weight": np.zeros((8, 64), np.float32)}


def model(path: Path, changes: dict[str, Any] | None = None, **tensors: Any) -> Path:
    """A Llama with these metadata beside its own; None: without the key."""
    metadata = HEAD | (changes or {})
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return gguf_files.write(path / "model.gguf", metadata, TABLE | tensors)


def edited(path: Path, at: int, data: bytes) -> Path:
    octets = bytearray(path.read_bytes())
    octets[at : at + len(data)] = data
    path.write_bytes(octets)
    return path


def test_no_gguf_file_and_other_versions(tmp_path: Path) -> None:
    path = model(tmp_path)
    assert read_gguf(gguf_files.write(tmp_path / "two.gguf", HEAD, TABLE, version=2)).metadata == HEAD
    for version, said in ((1, "version is 1 "), (4, "version is 4 "), (3 << 24, "version is 3, big-endian, ")):
        with pytest.raises(
            CheckpointError, match=rf"model.gguf: its {said}which is not supported; known: 2 and 3.*conv"
        ):
            read_checkpoint(edited(path, 4, struct.pack("<I", version)))
    with pytest.raises(CheckpointError, match=r"begins with b'GGML' and not b'GGUF'; fetch the file again"):
        read_checkpoint(edited(path, 0, b"GGML"))
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="it is no GGUF file"):
        read_checkpoint(path)
    with pytest.raises(
        CheckpointError, match=r"nothing.gguf does not exist; give one with config.json, a file that ends"
    ):
        read_checkpoint(tmp_path / "nothing.gguf")


def test_a_file_that_stops_short(tmp_path: Path) -> None:
    """Wherever it is cut: in the header, or in the data."""
    whole = (model(tmp_path)).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (*range(4, 300, 23), len(whole) - 1):
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut.gguf: the file is truncated"):
            read_checkpoint(cut)
    cut.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=rf"token_embd.weight ends at byte {len(whole)}, but the file has"):
        read_checkpoint(cut)


def test_a_damaged_header_is_a_typed_error(tmp_path: Path) -> None:
    """Any one byte of it may be any other: the file is read, or refused."""
    path = model(tmp_path)
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    refused = 0
    for at in rng.integers(4, len(whole) - TABLE["token_embd.weight"].nbytes, 300):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :])
        try:
            decoder_config(read_checkpoint(path))
        except CheckpointError as error:
            refused += "model.gguf" in str(error)
    assert refused > 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"general.architecture": "mamba"},
            f"'mamba', which is not supported in GGUF; known: {', '.join(ARCHITECTURES)}",
        ),
        ({"general.type": "mmproj"}, "general.type is 'mmproj', which is no model"),
        ({"general.alignment": 24}, "general.alignment is 24, but must be a power of two"),
        ({"llama.block_count": 2}, "llama.block_count: it is 2, but there are 1 tensors in all"),
        ({"llama.block_count": None}, "llama.block_count: it is missing; convert the model again"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon: it is missing"),
        ({"llama.attention.value_length": 16}, "value_length: it is 16, but keys have 32: both must be the same"),
        ({"llama.attention.head_count": [2, 1]}, r"head_count: it is \[2, 1\], but must be the same in all layers"),
        ({"llama.attention.head_count": 0}, "head_count: it is 0, but must be a whole number of at least 1"),
        ({"llama.vocab_size": 9}, "vocab_size: it is 9, but token_embd.weight has 8 rows"),
        ({"llama.new_thing": 2.0}, r"llama.new_thing = 2.0: no reader .* in GGUF knows .*model.overrides may set"),
        ({"llama.rope.scaling.type": "longrope"}, "rope_type is 'longrope', which is not supported; known"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id is 'x', but must be of type int"),
    ],
)
def test_metadata(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        decoder_config(read_checkpoint(model(tmp_path, changes)))


def test_a_key_that_changes_nothing_can_be_overridden(tmp_path: Path) -> None:
    """One that says what a Llama is anyway needs no override."""
    decoder_config(read_checkpoint(model(tmp_path, {"llama.expert_count": 0, "llama.expert_used_count": 0})))
    path = model(tmp_path, {"llama.new_thing": 2.0})
    decoder_config(configured_checkpoint(ModelConfig(path=str(path), overrides={"llama.new_thing": None})))


def test_element_types(tmp_path: Path) -> None:
    strange = gguf_files.Packed(kind=99, shape=(4,), octets=np.zeros(4, np.uint8))
    unread = gguf_files.Packed(kind="Q2_K", shape=(1, 256), octets=np.zeros(84, np.uint8))
    known = f"known: F32, F16, BF16, {', '.join(BLOCKS)}"
    with pytest.raises(CheckpointError, match=rf"Q2_K \(as blk.0.x.weight\), type 99 \(as y\); {known}; take a file"):
        decoder_config(read_checkpoint(model(tmp_path, None, **{"blk.0.x.weight": unread, "y": strange})))
    ragged = gguf_files.Packed(kind="Q8_0", shape=(1, 40), octets=np.zeros(68, np.uint8))
    with pytest.raises(
        CheckpointError, match=r"x is Q8_0 of shape \[1, 40\], but its last axis must be a multiple of 32"
    ):
        read_checkpoint(model(tmp_path, None, x=ragged))


def test_names_and_shapes_are_those_of_the_file(tmp_path: Path) -> None:
    path = model(tmp_path, None, **{"blk.0.attn_q.weight": np.zeros((64, 64), np.float32), "blk.0.y": np.zeros(1, "f")})
    with pytest.raises(
        CheckpointError, match=r"weights are missing: blk.0.attn_k.weight.*1 weights are unknown.*blk.0.y"
    ):
        load_model(path)
    tensors = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    tensors["blk.0.ffn_up.weight"] = np.zeros((32, 64), np.float32)
    with pytest.raises(CheckpointError, match=r"model.gguf: intermediate_size is 64, but the weights have 32.*ffn_up"):
        load_model(model(tmp_path, None, **tensors))


SHAPES = {f"blk.0.{name}.weight": (64, 64) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
SHAPES |= {f"blk.0.ffn_{name}.weight": (64, 64) for name in ("gate", "up", "down")}
SHAPES |= dict.fromkeys(("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"), (64,))


@pytest.mark.parametrize(
    ("kind", "at", "octets", "said"),
    [
        ("Q8_0", 34 * 5, b"\x00\x7e", r"1 scales are NaN or infinite, the first is nan at row \[2\], inputs 32 to 63"),
        (
            "Q4_1",
            20 * 6 + 2,
            b"\x00\xfc",
            r"1 minima are NaN or infinite, the first is inf at row \[3\], inputs 0 to 31",
        ),
        ("MXFP4", 0, b"\xff", r"1 scales are NaN or infinite, the first is nan at row \[0\], inputs 0 to 31"),
    ],
)
def test_scales_that_are_no_numbers(kind: str, at: int, octets: bytes, said: str, tmp_path: Path) -> None:
    stored = oracle.random_weight(np.random.default_rng(0), kind, (64, 64)).packed
    stored.octets.reshape(-1)[at : at + len(octets)] = np.frombuffer(octets, np.uint8)
    tensors = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    path = model(tmp_path, None, **tensors | {"blk.0.ffn_down.weight": stored})
    with pytest.raises(CheckpointError, match=rf"tensor blk.0.ffn_down.weight: {said}; the file is damaged: fetch"):
        load_model(path)


def test_longrope_and_two_scalings(tmp_path: Path) -> None:
    factors = {"rope_factors_long.weight": np.ones(16, np.float32)}
    with pytest.raises(CheckpointError, match=r"rope_factors_long.weight: rope scaling by two tables \(longrope\)"):
        read_checkpoint(model(tmp_path, None, **factors))
    both = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    with pytest.raises(CheckpointError, match=r"rope.scaling.type: it is 'linear', but rope_freqs.weight scales"):
        read_checkpoint(model(tmp_path, both, **{"rope_freqs.weight": np.ones(16, np.float32)}))
    with pytest.raises(CheckpointError, match=r"rope factors are .*but must be a list of 16 numbers"):
        decoder_config(read_checkpoint(model(tmp_path, None, **{"rope_freqs.weight": np.ones(4, np.float32)})))


def test_a_plain_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"GGUF")
    with pytest.raises(
        CheckpointError, match="model.bin is a file, but must be a directory; give one .* ends in .gguf"
    ):
        read_checkpoint(tmp_path / "model.bin")


def test_the_fixture_is_read_without_a_name_of_its_own() -> None:
    """A directory with several files is refused, one of them is not."""
    with pytest.raises(CheckpointError, match="has 2 GGUF files: blocks.gguf, llama.gguf"):
        read_checkpoint(gguf_models.FIXTURES / "gguf")
