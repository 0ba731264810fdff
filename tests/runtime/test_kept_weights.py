"""Packed weights that an earlier start has left: the same numbers, mapped and not copied, or packed anew."""

import dataclasses
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import gguf_models
import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from whole import FIXTURES

from jaxserve.assemble import _content, plan_stages
from jaxserve.config import load_config
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.numba_matmul import make_matmul
from jaxserve.kernels.packed_experts import make_grouped_matmul
from jaxserve.models.loading import PlannedModel, one_device_mesh, plan_model
from jaxserve.models.quantised.storing import Quantisation
from jaxserve.models.sharding import MESH_AXES, shardings_for
from jaxserve.runtime import kept_weights
from jaxserve.runtime.convert_weights import Forms, converted
from jaxserve.runtime.kept_weights import KeptWeights

CPU = Device(backend="cpu", kind="")
FORMS = Forms(matmul=make_matmul(CPU), grouped_matmul=make_grouped_matmul(CPU))
CASES: dict[str, Callable[[Path], PlannedModel]] = {
    "float32": lambda _: plan_model(FIXTURES / "llama"),
    "bfloat16": lambda _: plan_model(FIXTURES / "qwen3", dtype="bfloat16"),
    "rounded": lambda _: plan_model(FIXTURES / "gemma3", quantisation=Quantisation(scheme="int8")),
    "experts": lambda _: plan_model(FIXTURES / "mixtral"),
    "GGUF": lambda folder: plan_model(gguf_models.quantised_pair(folder).quantised),
}


@pytest.fixture(autouse=True)
def small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_weights, "_LEAST_BYTES", 0)


@pytest.fixture
def kept(tmp_path: Path) -> KeptWeights:
    return KeptWeights(folder=tmp_path / "weights", max_bytes=2**30, content="a checkpoint")


def load(planned: PlannedModel, kept: KeptWeights | None) -> nnx.State:
    """As a start does; returns when what it writes has its name."""
    state = converted(planned, FORMS, kept).fill()
    for thread in threading.enumerate():
        if thread.name == "jaxserve-keep-weights":
            thread.join()
    return state


def never(planned: PlannedModel) -> PlannedModel:
    """The same model, of which nothing can be read."""

    def fill() -> nnx.State:
        raise AssertionError("weights were read again")

    return dataclasses.replace(planned, fill=fill)


def assert_equal(found: nnx.State, wanted: nnx.State) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (one.dtype, one.sharding) == (other.dtype, other.sharding)
        np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8))


def is_mapped(array: jax.Array, file: Path) -> bool:
    """Whether the array lies in a part of the address space that is the file's."""
    address = array.unsafe_buffer_pointer()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(file)):
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            if first <= address < last:
                return True
    return False


@pytest.mark.parametrize("case", CASES)
def test_the_next_start_maps_what_the_first_has_packed(case: str, tmp_path: Path, kept: KeptWeights) -> None:
    planned = CASES[case](tmp_path)
    wanted = load(planned, None)
    assert_equal(load(planned, kept), wanted)
    (file,) = kept.folder.iterdir()
    found = load(never(planned), kept)
    assert_equal(found, wanted)
    assert all(is_mapped(leaf, file) for leaf in jax.tree.leaves(found))


def test_a_step_that_mapped_weights_are_donated_to_leaves_the_file(kept: KeptWeights) -> None:
    planned = CASES["float32"](kept.folder)
    load(planned, kept)
    (file,) = kept.folder.iterdir()
    before = file.read_bytes()
    leaves = jax.tree.leaves(load(never(planned), kept))
    jax.block_until_ready(jax.jit(lambda arrays: [array + 1 for array in arrays], donate_argnums=0)(leaves))
    assert file.read_bytes() == before


def test_other_numbers_have_another_file(tmp_path: Path, kept: KeptWeights) -> None:
    model = CASES["float32"](tmp_path)
    load(model, kept)
    others = (
        (model, dataclasses.replace(kept, content="another")),
        (plan_model(FIXTURES / "llama", dtype="bfloat16"), kept),
        (plan_model(FIXTURES / "llama", quantisation=Quantisation(scheme="int8")), kept),
        (plan_model(FIXTURES / "llama", layers=range(1)), kept),
        (plan_model(FIXTURES / "llama", layers=range(1, 2)), kept),
    )
    for count, (planned, where) in enumerate(others, 2):
        load(planned, where)
        assert len([*kept.folder.iterdir()]) == count


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"",
        lambda data: b"x" + data[1:],
    ],
)
def test_a_damaged_file_is_packed_anew(
    damage: Callable[[bytes], bytes], kept: KeptWeights, caplog: pytest.LogCaptureFixture
) -> None:
    planned = CASES["float32"](kept.folder)
    wanted = load(planned, kept)
    (file,) = kept.folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert_equal(load(planned, kept), wanted)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] and file.name in caplog.text
    assert file.read_bytes() == whole
    load(never(planned), kept)


@pytest.mark.parametrize("failure", ["no folder", "disk full", "disk full later"])
def test_where_nothing_can_be_written_a_start_goes_on_and_says_so_once(
    failure: str, kept: KeptWeights, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = CASES["float32"](kept.folder)
    if failure == "no folder":
        kept.folder.write_text("a file")
    elif failure == "disk full":
        monkeypatch.setattr(kept_weights, "_SPARE_BYTES", 2**62)
    else:

        def full(*_: object) -> int:
            raise OSError("no space left on device")

        monkeypatch.setattr(os, "pwrite", full)
    assert_equal(load(planned, kept), load(planned, None))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "cannot be kept" in caplog.text
    assert kept.folder.is_file() or not [*kept.folder.iterdir()]


def test_a_checkpoint_that_cannot_be_read_leaves_no_file(kept: KeptWeights) -> None:
    with pytest.raises(AssertionError, match="read again"):
        load(never(CASES["float32"](kept.folder)), kept)
    assert not [*kept.folder.iterdir()]


def test_files_are_bounded_and_those_read_longest_ago_go_first(
    kept: KeptWeights, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    planned = CASES["float32"](kept.folder)

    def names_after(content: str, max_bytes: int) -> set[str]:
        load(planned, dataclasses.replace(kept, content=content, max_bytes=max_bytes))
        return {path.name for path in kept.folder.iterdir()}

    (first,) = names_after("a", 2**30)
    size = (kept.folder / first).stat().st_size
    (second,) = names_after("b", 2**30) - {first}
    for name, age_s in ((first, 5), (second, 10)):
        os.utime(kept.folder / name, (time.time() - age_s, time.time() - age_s))
    left_over, in_work = kept.folder / "old.part", kept.folder / "new.part"
    for path, age_s in ((left_over, 86_400), (in_work, 1)):
        path.write_bytes(b"x")
        os.utime(path, (time.time() - age_s, time.time() - age_s))
    third = names_after("c", 2 * size + 100)
    assert first in third and second not in third and {"new.part"} == {name for name in third if "part" in name}
    assert names_after("d", size // 2) == third and "runtime.kept_weights_bytes" in caplog.text
    assert names_after("d", 0) == third


def test_small_models_and_several_devices_have_none(
    kept: KeptWeights, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    planned = plan_model(FIXTURES / "llama")
    for count, has_file in ((1, True), (2, False)):
        mesh = Mesh(np.asarray(jax.devices()[:count]).reshape((count,) + (1,) * (len(MESH_AXES) - 1)), MESH_AXES)
        shardings = shardings_for(planned.shapes.state, mesh)
        assert (kept.file_of(planned.shapes.state, shardings, planned.shapes.layers) is not None) == has_file
    monkeypatch.setattr(kept_weights, "_LEAST_BYTES", 2**25)
    load(planned, kept)
    assert not kept.folder.exists()


def test_what_changes_a_number_changes_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "model"
    shutil.copytree(FIXTURES / "llama", directory)

    def content(**settings: object) -> str | None:
        config = load_config(None, {"model.path": str(directory), **settings}).config
        (planned,) = plan_stages(config, [one_device_mesh(jax.local_devices()[0])])
        return _content(config, planned.shapes)

    one = content()
    assert one == content() == content(**{"runtime.log_level": "debug", "model.name": "another"})
    found = [
        content(**{"model.dtype": "bfloat16"}),
        content(**{"model.quantization": "int8"}),
        content(**{"model.overrides": {"rms_norm_eps": 0.5}}),
    ]
    weights = directory / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    found.append(content())
    status = weights.stat()
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x3c")
    os.utime(weights, ns=(0, status.st_mtime_ns))
    found.append(content())
    assert None not in found and len({one, *found}) == 6
    assert content(**{"model.random_weights": True}) is None
    monkeypatch.syspath_prepend(FIXTURES.parent / "plugin")
    assert content(**{"model.family": "cousin_family:FAMILY", "model.overrides": {"num_cousins": 2}}) is None
