"""Attention of one layer by count: compiled alone for a chip that is not here, and walked with the lengths of a batch.

libtpu prints what a process compiles only if it was told so before it was loaded. A process that does other things has
the counting done by `counting_process`.
"""

import concurrent.futures
import contextlib
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax.numpy as jnp

from jaxserve.kernels.cases import Case, Room, attend_layers
from jaxserve.kernels.pallas.tpu_implementation import make_attention
from jaxserve.kernels.tuning import TunedTable
from jaxserve.lab.compiled.attention import abstract_inputs, compile_attend
from jaxserve.lab.compiled.topology import device_of_topology
from jaxserve.lab.ledger.bundles import UnknownSchedule
from jaxserve.lab.ledger.calls import KernelCall, kernel_calls
from jaxserve.lab.ledger.capture import captured_kernels, print_schedules
from jaxserve.lab.ledger.predict import KernelTime, time_of_call
from jaxserve.values.chips import parse_topology

_LARGE = 2**30  # bytes of a cache that no compiler keeps in the fast memory

CountedCalls = Sequence[tuple[str, KernelTime]]  # (name of the kernel, its time), in the order of the calls


def count_attention(
    case: Case, topology: str, folder: Path, room: Room | None = None, table: TunedTable | None = None
) -> CountedCalls:
    """The kernels of one call of `attend` on a batch, `folder` being where libtpu prints.

    `room` None: a cache so large that the compiler leaves it in the main memory, as it is in a server. `table` replaces
    the sizes that ship. Raises UnknownSchedule.
    """
    room = _large_room(case) if room is None else room
    attention = make_attention(device_of_topology(topology), table)
    cache, args = abstract_inputs(case, attention, room)
    calls = kernel_calls(attend_layers(case, attention), [cache], *args)
    shutil.rmtree(folder, ignore_errors=True)
    compile_attend(case, attention, topology, room=room)
    return times_of_calls(calls, topology, folder)


def times_of_calls(calls: Sequence[KernelCall], topology: str, folder: Path) -> CountedCalls:
    """Times of the calls of the one program that was printed into `folder`. Raises UnknownSchedule."""
    chip = parse_topology(topology).chip
    printed = {captured.name.rpartition(".")[0] or captured.name: captured for captured in captured_kernels(folder)}
    if missing := [call.name for call in calls if call.name not in printed]:
        raise UnknownSchedule(f"libtpu printed no schedule of {missing[0]}")
    return [(call.name, time_of_call(printed[call.name].program(), call, chip)) for call in calls]


def _large_room(case: Case) -> Room:
    page_bytes = case.page_size * case.spec.num_kv_heads * case.spec.head_dim * 2 * jnp.dtype(case.cache_dtype).itemsize
    columns = [-(-context // case.page_size) for _, context in case.rows]
    return Room(columns=max(columns) + 1, num_pages=max(sum(columns) + 3, _LARGE // page_bytes))


# (batch, topology, sizes of tables and cache) -> the counted calls, once they are there.
Counting = Callable[[Case, str, Room], "concurrent.futures.Future[CountedCalls]"]


@contextlib.contextmanager
def counting_process() -> Iterator[Counting]:
    """A process beside this one that counts what it is handed, one after the other."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "dump"
        pool = concurrent.futures.ProcessPoolExecutor(
            1, mp_context=multiprocessing.get_context("spawn"), initializer=print_schedules, initargs=(folder,)
        )
        try:
            yield lambda case, topology, room: pool.submit(count_attention, case, topology, folder, room)
        finally:
            pool.shutdown(cancel_futures=True)
