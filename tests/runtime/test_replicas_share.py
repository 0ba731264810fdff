"""Replicas that start together: each program is traced and compiled once, the weights are read once."""

import dataclasses
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from whole import FIXTURES

from jaxserve.models.loading import one_device_mesh, plan_model
from jaxserve.runtime import build
from jaxserve.runtime.compile import Compiler, Job, build_replicas
from jaxserve.runtime.store import ExecutableStore, Stored

pytestmark = pytest.mark.usefixtures("store_alone")

WAIT_S = 120.0  # for what must happen: far more than a busy machine takes


class Programs:
    """One program for a few replicas, each of which has `size` devices; counts how often it is traced."""

    def __init__(self, num_replicas: int, size: int = 1) -> None:
        devices = np.asarray(jax.devices()[: num_replicas * size]).reshape(num_replicas, size)
        self.meshes = [Mesh(mine, ("model",)) for mine in devices]
        self.traced: list[str] = []

    def jobs(self, number: int, names: tuple[str, ...] = ("made",)) -> list[Job]:
        mesh = self.meshes[number]
        cut = NamedSharding(mesh, PartitionSpec("model"))

        def fn(name: str, x: jax.Array) -> jax.Array:
            self.traced.append(name)
            spread = jax.shard_map(lambda part: jax.lax.psum(part, "model"), mesh=mesh, in_specs=PartitionSpec("model"),
                                   out_specs=PartitionSpec())  # fmt: skip
            return jnp.cumsum(spread(x)) * len(name)

        x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=cut)
        return [
            Job(name=name, fn=lambda x, name=name: fn(name, x), args=(x,), donate=(0,), options={}) for name in names
        ]

    def start(self, directory: Path | None, *names: str) -> list[dict[str, np.ndarray]]:
        """What the executables of each replica compute on its devices."""
        store = ExecutableStore(directory, [], list(self.meshes[0].devices.flat))
        compilers = [Compiler(mesh, store.on(list(mesh.devices.flat))) for mesh in self.meshes]
        jobs = [self.jobs(number, names) for number in range(len(self.meshes))]
        told: list[int] = []
        built = build_replicas(compilers, jobs, 4, lambda done, total, newest: told.append(done))
        assert told == list(range(1, len(names) * len(self.meshes) + 1))
        found = []
        for mesh, replica in zip(self.meshes, built, strict=True):
            found.append({})
            for name, compiled in replica.items():
                x = jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh, PartitionSpec("model")))
                out = compiled.call(x)
                assert out.devices() == set(mesh.devices.flat)
                found[-1][name] = np.asarray(out)
        return found


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_each_program_is_traced_once_for_all_replicas(size: int, kept: bool, tmp_path: Path) -> None:
    directory = tmp_path if kept else None
    one, three = Programs(1, size), Programs(3, size)
    [expected] = one.start(tmp_path / "one", "first", "second")
    found = three.start(directory, "first", "second")
    assert three.traced == one.traced == ["first", "second"]
    for replica in found:
        for name, values in expected.items():
            np.testing.assert_array_equal(replica[name], values)
    if kept:
        assert len(list(tmp_path.glob("first-*"))) == 1, "one file for all replicas"
        three.start(directory, "first", "second")
        assert three.traced == one.traced, "a warm start traces nothing"


def test_replicas_load_at_the_same_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    together = threading.Barrier(2)  # of the two replicas that do not compile
    load = ExecutableStore.load

    def meet(store: ExecutableStore, name: str) -> Stored | None:
        together.wait(WAIT_S)
        return load(store, name)

    monkeypatch.setattr(ExecutableStore, "load", meet)
    programs = Programs(3)
    programs.start(tmp_path, "made")
    assert programs.traced == ["made"] and not together.broken


def test_what_cannot_be_kept_is_compiled_by_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ExecutableStore, "save", lambda *_: None)
    programs = Programs(3)
    first, *others = programs.start(tmp_path, "made")
    assert programs.traced == ["made"] * 3
    for other in others:
        np.testing.assert_array_equal(other["made"], first["made"])


def test_weights_are_read_once_and_lie_on_the_devices_of_each() -> None:
    meshes = [one_device_mesh(device) for device in jax.devices()[:3]]
    planned = plan_model(FIXTURES / "qwen3", dtype="float32", mesh=meshes[0])
    reads = []

    def fill():
        reads.append(True)
        return planned.fill()

    found, _ = build._load_all([dataclasses.replace(planned, fill=fill)], [[mesh] for mesh in meshes[1:]], None)
    loaded = [models for models, _ in found]
    assert len(reads) == 1 and len(loaded) == 3
    first = jax.tree.leaves(loaded[0][0].state)
    for mesh, [model] in zip(meshes, loaded, strict=True):
        assert model.mesh == mesh
        for array, same in zip(jax.tree.leaves(model.state), first, strict=True):
            assert array.devices() == set(mesh.devices.flat)
            np.testing.assert_array_equal(array, same)
