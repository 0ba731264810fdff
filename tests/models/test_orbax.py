"""Orbax directories: the way there and back is exact, and restoring fills shardings directly."""

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import hf_oracle
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.config.schema import ParallelConfig
from jaxserve.errors import CheckpointError
from jaxserve.models import load_model, orbax_io
from jaxserve.models.checkpoint import CheckpointKind, read_checkpoint
from jaxserve.models.layout import Index
from jaxserve.models.orbax_store import LAYOUT_VERSION, StoredArray, save_arrays
from jaxserve.models.sharding import arrays_of, axes_of
from jaxserve.progress import show_progress
from jaxserve.runtime.mesh import make_meshes


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama_llama3 (bfloat16, old config spelling) with stand-ins for tokenizer files, as an Orbax directory."""
    root = tmp_path_factory.mktemp("orbax")
    source = Path(shutil.copytree(hf_oracle.FIXTURES / "llama_llama3", root / "hf"))
    (source / "tokenizer.model").write_bytes(b"\x00pieces")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    assert orbax_io.convert(source, root / "orbax") is CheckpointKind.ORBAX
    return root / "orbax"


@pytest.mark.parametrize("name", ["qwen2", "llama_mha_tied_bias", "mpt", "gpt_oss"])
def test_round_trip_keeps_every_byte(name: str, tmp_path: Path) -> None:
    source = hf_oracle.FIXTURES / name
    orbax_io.convert(source, tmp_path / "orbax")
    assert orbax_io.convert(tmp_path / "orbax", tmp_path / "hf") is CheckpointKind.HUGGING_FACE
    before, after = tensors_of(source), tensors_of(tmp_path / "hf")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype
        assert tensor.tobytes() == after[key].tobytes(), key
    assert (tmp_path / "hf" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert not (tmp_path / "hf" / "jaxserve_orbax.json").exists()


def test_both_ways_are_announced_before_their_work(tmp_path: Path) -> None:
    told: list[str] = []
    for source, target in ((hf_oracle.FIXTURES / "llama", "orbax"), (tmp_path / "orbax", "hf")):
        with show_progress(write=told.append) as progress:
            orbax_io.convert(source, tmp_path / target, progress=progress)
    assert [line for line in told if "(" not in line and "done in" not in line] == [
        "reading the weights",
        "writing 0.00 GiB",
    ] * 2


def test_small_files_come_along(converted: Path) -> None:
    assert (converted / "tokenizer.model").read_bytes() == b"\x00pieces"
    assert (converted / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not list(converted.glob("*.safetensors"))
    assert read_checkpoint(converted).kind is CheckpointKind.ORBAX
    assert read_checkpoint(converted).eos_token_ids == (2,)


@pytest.mark.parametrize(("num_devices", "dtype"), [(1, "float32"), (2, "bfloat16")])
def test_restored_model_equals_the_loaded_one(converted: Path, num_devices: int, dtype: str) -> None:
    mesh = make_meshes(ParallelConfig(tensor=num_devices), jax.devices())[0][0]
    direct = load_model(hf_oracle.FIXTURES / "llama_llama3", dtype=dtype, mesh=mesh)
    restored = load_model(converted, dtype=dtype, mesh=mesh)
    assert jax.tree.structure(direct.state) == jax.tree.structure(restored.state)
    for a, b in zip(jax.tree.leaves(direct.state), jax.tree.leaves(restored.state), strict=True):
        assert a.dtype == b.dtype == dtype
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_large_models_are_cut_into_indexed_files(converted: Path, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orbax_io, "MAX_FILE_BYTES", 30_000)
    orbax_io.convert(converted, tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    before, after = tensors_of(hf_oracle.FIXTURES / "llama_llama3"), tensors_of(tmp_path / "hf")
    assert {k: v.tobytes() for k, v in before.items()} == {k: v.tobytes() for k, v in after.items()}
    load_model(tmp_path / "hf")


def test_a_target_in_use_is_refused_and_kept(converted: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(CheckpointError, match="exists already"):
        orbax_io.convert(converted, tmp_path)
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    source = Path(shutil.copytree(hf_oracle.FIXTURES / "llama", tmp_path / "hf"))
    (source / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="model.safetensors"):
        orbax_io.convert(source, tmp_path / "orbax")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_conversion_appears_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Orbax's threads write after an interrupt goes nowhere, and the next conversion is not refused."""
    target = tmp_path / "orbax"

    def interrupted(directory: Path, *_: object, **__: object) -> None:
        assert not target.exists()

        def write_late() -> None:
            time.sleep(0.05)
            (directory / "weights").mkdir(parents=True)

        threading.Thread(target=write_late).start()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(orbax_io, "save_arrays", interrupted)
        with pytest.raises(KeyboardInterrupt):
            orbax_io.convert(hf_oracle.FIXTURES / "llama", target)
    time.sleep(0.2)
    assert not target.exists()
    orbax_io.convert(hf_oracle.FIXTURES / "llama", target)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["orbax"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_leaves_nothing_and_says_one_line(tmp_path: Path, number: signal.Signals) -> None:
    """The worker waits for a config.json that is a pipe; it is ended there."""
    source = tmp_path / "hf"
    source.mkdir()
    os.mkfifo(source / "config.json")
    command = [sys.executable, "-m", "jaxserve", "convert", str(source), str(tmp_path / "new" / "orbax")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "importing JAX" in process.stderr.readline()  # of the worker: it has begun
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert (out, err.splitlines()[-1]) == ("", f"interrupted: nothing was written to {tmp_path / 'new' / 'orbax'}")
    assert "Traceback" not in err
    assert not list((tmp_path / "new").iterdir())


def test_broken_orbax_directories(converted: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(converted, tmp_path / "broken"))
    marker = broken / "jaxserve_orbax.json"
    marker.write_text(json.dumps({"layout_version": 99}))
    with pytest.raises(CheckpointError, match="layout_version is 99"):
        load_model(broken)
    shutil.copy(converted / marker.name, marker)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(CheckpointError, match="shapes disagree"):
        load_model(broken)
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"weights are missing: layers.2"):
        load_model(broken)
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(CheckpointError, match=r"weights are unknown: layers.1"):
        load_model(broken)
    (broken / "config.json").write_text(json.dumps(config))
    shutil.rmtree(broken / "weights")
    with pytest.raises(CheckpointError, match="weights is missing"):
        load_model(broken)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_damaged_orbax_data(converted: Path, tmp_path: Path, damage: str) -> None:
    """In a process of its own, since a failed restore leaves tasks behind that complain when collected."""
    broken = Path(shutil.copytree(converted, tmp_path / "broken"))
    for file in (f for f in (broken / "weights").rglob("d/*") if f.is_file()):
        if damage == "truncate":
            file.write_bytes(file.read_bytes()[:20])
        else:
            file.unlink()
    code = f"""
from jaxserve.errors import CheckpointError
from jaxserve.models import load_model
try:
    load_model({str(broken)!r})
except CheckpointError as error:
    assert "weights" in str(error), error
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "refused", done.stderr


def share_bytes(array: jax.Array) -> int:
    """What one device holds of it."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def test_copied_heads_are_read_by_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two key/value heads for eight devices: each reads its own, and no parameter is ever whole on any of them."""
    orbax_io.convert(hf_oracle.FIXTURES / "qwen2", tmp_path / "orbax")
    read, before = StoredArray.read, {id(array) for array in jax.live_arrays()}
    largest, sizes = [], []

    def counting(self: StoredArray, index: Index, dtype: np.dtype) -> np.ndarray:
        largest.extend(share_bytes(array) for array in jax.live_arrays() if id(array) not in before)
        sizes.append(read(self, index, dtype).nbytes)
        return read(self, index, dtype)

    monkeypatch.setattr(StoredArray, "read", counting)
    mesh = make_meshes(ParallelConfig(tensor=8), jax.devices())[0][0]
    loaded = load_model(tmp_path / "orbax", mesh=mesh)
    assert loaded.partition.copies > 1, "the test is of copied heads"
    shares = [share_bytes(leaf) for leaf in jax.tree.leaves(loaded.state)]
    assert len(sizes) > 8 * len(shares) / 2
    assert max(largest) <= max(shares)
    assert max(sizes) <= max(shares)
    assert sum(sizes) <= 8 * sum(shares), "nothing beside what the devices hold"


@pytest.mark.parametrize(
    ("axes", "shape", "cut"),
    [
        ((None, "kv_heads", None, "head"), (64, 8, 6, 256), 1),
        (("experts", "gate_up", "expert_mlp", "embed"), (16, 2, 96, 512), 0),
    ],
    ids=["heads", "experts"],
)
def test_heads_and_experts_lie_in_chunks_of_their_own(tmp_path: Path, axes, shape, cut) -> None:
    """A device that reads its own does not decompress those of others."""
    kernel = jax.numpy.ones(shape, "bfloat16")
    save_arrays(tmp_path, {("a", "kernel"): kernel}, {("a", "kernel"): axes})
    chunk = StoredArray(tmp_path / "weights", "a.kernel")._store.chunk_layout.read_chunk.shape
    assert chunk[cut] == 1 and np.prod(chunk) * 2 <= 2**20


def test_experts_are_read_by_those_that_have_them(tmp_path: Path) -> None:
    """gpt-oss, whose experts have biases, on four devices: two parts of the experts, and two of their columns."""
    source = hf_oracle.FIXTURES / "gpt_oss"
    orbax_io.convert(source, tmp_path / "orbax")
    mesh = make_meshes(ParallelConfig(tensor=4, expert=2), jax.devices())[0][0]
    direct, restored = (load_model(path, mesh=mesh) for path in (source, tmp_path / "orbax"))
    for path, array in arrays_of(direct.state).items():
        other = arrays_of(restored.state)[path]
        assert array.sharding == other.sharding, path
        if "experts" in axes_of(direct.state)[path]:
            assert array.sharding.shard_shape(array.shape)[0] * 2 == array.shape[0], path
        np.testing.assert_array_equal(np.asarray(array), np.asarray(other))


# Digests of names, axes and every number of a model whose numbers are known, by version of the layout.
LAYOUTS = {2: "e29d5e3317458337"}


def layout_digest(folder: Path) -> str:
    """Of all parameters of two tiny models, each number of whose tensors tells where it was in its file."""
    digest = hashlib.sha256()
    for name in ("qwen2", "qwen3"):
        source = Path(shutil.copytree(hf_oracle.FIXTURES / name, folder / name))
        for file in source.glob("*.safetensors"):
            numbered = {
                key: (np.arange(tensor.size, dtype=np.float32) + zlib.crc32(key.encode()) % 1000).reshape(tensor.shape)
                for key, tensor in load_file(file).items()
            }
            save_file(numbered, file)
        state = load_model(source, dtype="float32").state
        axes = axes_of(state)
        for path, array in sorted(arrays_of(state).items(), key=lambda item: [str(step) for step in item[0]]):
            array = np.asarray(array)
            digest.update(f"{path} {axes[path]} {array.shape}".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def test_another_layout_has_another_version(tmp_path: Path) -> None:
    found = layout_digest(tmp_path)
    assert LAYOUTS.get(LAYOUT_VERSION) == found, (
        "names, axes or orders of parameters have changed: raise LAYOUT_VERSION in orbax_store.py, since directories "
        f"that exist would be read wrong, and add it here with {found!r}"
    )
