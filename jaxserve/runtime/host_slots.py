"""The bytes of the host slots, and the thread that fills them.

The scheduler says what moves (`sched.host_tier`), the runner when; here are the buffers. A slot has the packed words of
one page (`page_moves`) from each device of this process: in a service of several processes each keeps the shards of
its own devices, and a slot is whole when all have theirs.

What JAX does with NumPy's memory decides the order of things (each point was measured):
  * `np.asarray` of an array on a CPU is a view. Only packed pages are looked at so, which nothing donates: a view of
    the pool would make the next donation copy all of it.
  * `jax.device_put` of aligned memory on a CPU is a view, too, whatever one asks for, and a compiled function reads its
    arguments after it has returned. So a load copies its slots into memory of its own, which is never written again.
"""

import collections
import dataclasses
import queue
import threading
import weakref
from collections.abc import Sequence

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StagePages:
    """How the pages of a stage look when they are packed: `words` [S, W] on each device of `sharding`'s mesh."""

    sharding: jax.sharding.NamedSharding
    words: int

    @property
    def devices(self) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
        """Those of this process."""
        return sorted(self.sharding.addressable_devices, key=lambda device: device.id)


class SlotBytes:
    """Mutated by the thread that dispatches, and by the thread that it starts with the first save.

    The memory is taken from the system slot by slot, as slots are first filled.
    """

    def __init__(self, num_slots: int, stages: Sequence[StagePages]) -> None:
        self._stages = tuple(stages)
        self._words = [np.zeros((len(stage.devices), num_slots, stage.words), np.uint32) for stage in stages]
        self._filling = _Filling()
        self._queue: queue.SimpleQueue[tuple[list[int], list[list[jax.Array]]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def words(self) -> int:
        """32-bit words of a slot: of all stages and devices of this process."""
        return sum(words.shape[0] * words.shape[2] for words in self._words)

    def views(self, slot: int) -> list[memoryview]:
        """The memory of a slot, whose words follow one another in this order. Only for the owner of the slot."""
        return [memoryview(words[number, slot]).cast("B") for words in self._words for number in range(len(words))]

    @property
    def num_draining(self) -> int:
        """Pages that were saved and have not reached their slots. Raises the failure of the thread, if it failed."""
        return self._filling.count()

    def save(self, slots: Sequence[int], packed: Sequence[jax.Array]) -> None:
        """Fills `slots` with the first pages of `packed` [S, W * devices] of each stage, behind the caller's back."""
        shards = [
            [shard.data for shard in sorted(array.addressable_shards, key=lambda shard: shard.device.id)]
            for array in packed
        ]
        for stage in shards:
            for shard in stage:
                shard.copy_to_host_async()
        self._filling.begin(slots)
        if self._thread is None:
            self._thread = threading.Thread(
                target=_drain, args=(self._queue, self._words, self._filling), name="jaxserve-slots", daemon=True
            )
            self._thread.start()
            # The thread knows nothing of this object, and ends with it; at the end of the program before the
            # interpreter, which would end it inside of JAX.
            weakref.finalize(self, _end, self._queue, self._thread)
        self._queue.put((list(slots), shards))

    def close(self) -> None:
        """Gives the memory back, and ends the thread behind what it copies. Nothing is saved or loaded any more."""
        self._words.clear()
        self._queue.put(None)

    def wait_for(self, slots: Sequence[int]) -> None:
        """Returns once no page is on its way to any of `slots`. Raises the failure of the thread, if it failed."""
        self._filling.wait_for(slots)

    def staged(self, slots: Sequence[int], count: int) -> list[jax.Array]:
        """[count, W * devices] of each stage, with the pages of `slots` first, then zeros: on their way to the devices.

        Waits for slots whose pages are still on their way from the device.
        """
        self.wait_for(slots)
        arrays = []
        for stage, words in zip(self._stages, self._words, strict=True):
            shards = []
            for number, device in enumerate(stage.devices):
                pages = np.zeros((count, stage.words), np.uint32)
                np.take(words[number], list(slots), axis=0, out=pages[: len(slots)])
                shards.append(jax.device_put(pages, device))
            shape = (count, stage.words * stage.sharding.mesh.size)
            arrays.append(jax.make_array_from_single_device_arrays(shape, stage.sharding, shards))
        return arrays


class _Filling:
    """The pages on their way to each slot. Shared by the two threads.

    A slot may have several: the scheduler may give it to another page while the one before is still on its way. One
    thread copies them in the order of their saves, so the last one stays.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._slots: collections.Counter[int] = collections.Counter()
        self._failure: BaseException | None = None

    def begin(self, slots: Sequence[int]) -> None:
        with self._changed:
            self._raise_failure()
            self._slots.update(slots)

    def end(self, slots: Sequence[int], failure: BaseException | None) -> None:
        with self._changed:
            self._slots -= collections.Counter(slots)  # which leaves out the slots of no page
            self._failure = self._failure or failure
            self._changed.notify_all()

    def wait_for(self, slots: Sequence[int]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._slots.keys().isdisjoint(slots))
            self._raise_failure()

    def count(self) -> int:
        with self._changed:
            self._raise_failure()
            return self._slots.total()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError("pages could not be copied to host memory") from self._failure


def _end(work: "queue.SimpleQueue[tuple[list[int], list[list[jax.Array]]] | None]", thread: threading.Thread) -> None:
    work.put(None)
    if thread is not threading.current_thread():  # which may be collecting garbage
        thread.join()


def _drain(
    work: "queue.SimpleQueue[tuple[list[int], list[list[jax.Array]]] | None]",
    words: Sequence[np.ndarray],
    filling: _Filling,
) -> None:
    """Copies packed pages into their slots until None comes."""
    while (item := work.get()) is not None:
        slots, shards = item
        failure: BaseException | None = None
        try:
            _copy(slots, shards, words)
        except BaseException as error:  # the boundary of the thread: whoever needs the pages gets the error
            failure = error
        del item, shards
        filling.end(slots, failure)


def _copy(slots: list[int], shards: list[list[jax.Array]], words: Sequence[np.ndarray]) -> None:
    """A function of its own, so that no array of the device stays behind in a variable of the loop."""
    for stage, found in zip(words, shards, strict=True):
        for number, shard in enumerate(found):
            stage[number, slots] = np.asarray(shard)[: len(slots)]
