"""Pages packed, kept in slots and unpacked: the same bytes, whatever a cache holds and however it is cut."""

import dataclasses
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models.sharding import MESH_AXES, TENSOR_PARALLEL, spec_for
from jaxserve.runtime import host_slots
from jaxserve.runtime.host_slots import SlotBytes, StagePages
from jaxserve.runtime.mesh import on_mesh
from jaxserve.runtime.page_moves import gather_pages, page_words, pages_of_launch, scatter_pages
from jaxserve.runtime.step import DeviceState

PAGES, HEADS = 6, 4
BY_HEADS = spec_for((None, "kv_heads"), TENSOR_PARALLEL)
# Two layers of different arrays each, and one whose page is no whole number of words.
SHAPES = {
    "float32": ((HEADS, 3, 5), (HEADS, 5, 3)),
    "bfloat16": ((HEADS, 3, 5), (HEADS, 2, 2)),
    "float8_e4m3fn": ((HEADS, 1, 3), (HEADS, 4)),
    "int8": ((HEADS, 7), (HEADS, 2, 2)),
}


def state_of(dtype: str) -> DeviceState:
    rng = np.random.default_rng(0)
    size = jnp.dtype(dtype).itemsize

    def pages(shape: tuple[int, ...]) -> jax.Array:
        """All bit patterns, but for NaN in bfloat16, which XLA's CPU backend may replace by another NaN."""
        raw = rng.integers(0, 256, (PAGES, *shape, size), np.uint8)
        if dtype == "bfloat16":
            # NaN has all bits of the exponent (seven of the high byte, one of the low), and one of the fraction.
            high, low = raw[..., 1], raw[..., 0]
            high[(high & 0x7F == 0x7F) & (low > 0x80)] &= 0xBF
            raw[5].reshape(-1, 2)[0] = 0x80, 0x7F  # infinity, in a page that is moved
        return jax.lax.bitcast_convert_type(jnp.asarray(raw if size > 1 else raw[..., 0]), jnp.dtype(dtype))

    caches = tuple({"keys": pages(shape), "values": pages(shape)} for shape in SHAPES[dtype])
    empty = jnp.zeros(1, jnp.int32)
    return DeviceState(caches=caches, block_tables=jnp.zeros((1, 1), jnp.int32), length=empty, sampling=None)


def as_bytes(state: DeviceState) -> list[np.ndarray]:
    return [np.asarray(leaf).view(np.uint8) for leaf in jax.tree.leaves(state.caches)]


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("dtype", SHAPES)
def test_pages_come_back_as_they_were(dtype: str, num_devices: int) -> None:
    mesh = Mesh(np.array(jax.devices()[:num_devices]).reshape(1, num_devices), MESH_AXES)
    whole = PartitionSpec()
    state = state_of(dtype)
    specs = jax.tree.map(lambda _: whole, state)
    specs = dataclasses.replace(specs, caches=jax.tree.map(lambda _: BY_HEADS, state.caches))
    state = jax.device_put(state, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    before = as_bytes(state)
    gather = jax.jit(on_mesh(gather_pages, mesh, (specs, whole), BY_HEADS))
    scatter = jax.jit(on_mesh(scatter_pages, mesh, (specs, whole, BY_HEADS), (specs, whole)), donate_argnums=0)
    sharding = NamedSharding(mesh, BY_HEADS)
    local = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype), state.caches
    )
    slots = SlotBytes(5, [StagePages(sharding=sharding, words=page_words(local))])
    assert slots.words == num_devices * page_words(local)

    put = lambda ids: jax.device_put(np.array(ids, np.int32), NamedSharding(mesh, whole))  # noqa: E731
    slots.save([3, 1], [gather(state, put([2, 5, 0, 0]))])
    slots.wait_for([3, 1])
    assert slots.num_draining == 0
    [packed] = slots.staged([1, 3], 4)
    state, done = scatter(state, put([4, 1, 0, 0]), packed)
    done.block_until_ready()
    for old, new in zip(before, as_bytes(state), strict=True):
        assert np.array_equal(new[4], old[5]) and np.array_equal(new[1], old[2])
        assert all(np.array_equal(new[page], old[page]) for page in (2, 3, 5))
    # What a store sees of a slot is all of it, and what it writes there is what is loaded.
    page = b"".join(slots.views(3))
    assert len(page) == 4 * slots.words
    for view, part in zip(slots.views(0), np.split(np.frombuffer(page, np.uint8), num_devices), strict=True):
        view[:] = part.tobytes()
    [packed] = slots.staged([0], 1)
    state, _ = scatter(state, put([3]), packed)
    assert all(np.array_equal(new[3], old[2]) for old, new in zip(before, as_bytes(state), strict=True))


def test_a_slot_that_is_saved_again_while_its_page_is_on_its_way_gets_the_later_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slot is ready once the result of its plan is read, and may be given to another page at once."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), MESH_AXES)
    slots = SlotBytes(2, [StagePages(sharding=NamedSharding(mesh, BY_HEADS), words=3)])
    first, later = jnp.full((2, 3), 1, jnp.uint32), jnp.full((1, 3), 2, jnp.uint32)
    going = threading.Event()

    def slow(array: jax.Array) -> np.ndarray:
        assert going.wait(60)
        return np.asarray(array)

    monkeypatch.setattr(host_slots, "np", SimpleNamespace(asarray=slow))  # NumPy itself is everybody's
    slots.save([0, 1], [first])
    slots.save([1], [later])
    assert slots.num_draining == 3
    going.set()
    slots.wait_for([0, 1])
    monkeypatch.undo()
    [staged] = slots.staged([0, 1], 2)
    assert np.asarray(staged).tolist() == [[1, 1, 1], [2, 2, 2]]
    assert slots.num_draining == 0


def test_a_copy_that_fails_is_told_to_whoever_needs_the_page() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), MESH_AXES)
    slots = SlotBytes(2, [StagePages(sharding=NamedSharding(mesh, BY_HEADS), words=3)])
    slots.save([0], [jnp.zeros((1, 4), jnp.uint32)])  # of another size
    with pytest.raises(RuntimeError, match="could not be copied"):
        slots.wait_for([0])
    with pytest.raises(RuntimeError, match="could not be copied"):
        slots.staged([1], 1)


def test_launches() -> None:
    assert [pages_of_launch(count, (1, 4, 16)) for count in (1, 2, 4, 5, 16, 40)] == [1, 4, 4, 16, 16, 16]
