"""The rates of this machine: bytes that it reads and products that it adds up in a second.

Two loops over NumPy run in a process of their own, for about a second and a half, since a library's own threads can
only be switched off before it is loaded. Two records can be compared where these rates are alike, and a busy machine
shows in them.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

_THREADS = (1, 2)
_WINDOW_S = 0.15
_WINDOWS = 2  # the better one counts: others can only take away
_READ_BYTES = 128 * 2**20  # of each thread; beyond any cache
_PRODUCT = 512  # rows and columns
_TIMEOUT_S = 60.0
_LIBRARY_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def machine_rates() -> dict[str, dict[str, float]] | None:
    """{"read_gb_per_s", "multiply_add_gflop_per_s": {"1 thread", "2 threads": float}}, float32; a multiply-add is two.

    None where they cannot be measured.
    """
    command = ["env", *(f"{name}=1" for name in _LIBRARY_THREADS), sys.executable, "-P", __file__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
        return json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def measure_rates(
    make_read: Callable[[], Callable[[], float]], make_product: Callable[[], Callable[[], float]]
) -> dict:
    """Measures both rates. An argument makes the work of one thread; each call of it returns billions of operations."""
    works = {"read_gb_per_s": make_read, "multiply_add_gflop_per_s": make_product}
    return {
        name: {f"{n} thread{'s' * (n > 1)}": round(_rate([make() for _ in range(n)]), 1) for n in _THREADS}
        for name, make in works.items()
    }


def _rate(works: list[Callable[[], float]]) -> float:
    """Operations of all threads together in a second, in the best window."""
    for work in works:
        work()  # touches its memory

    def run_one(place: int, found: list[float], gate: threading.Barrier) -> None:
        gate.wait()
        start_s, done = time.perf_counter(), 0.0
        while (passed_s := time.perf_counter() - start_s) < _WINDOW_S or not done:
            done += works[place]()
        found[place] = done / passed_s

    best = 0.0
    for _ in range(_WINDOWS):
        found, gate = [0.0] * len(works), threading.Barrier(len(works))
        threads = [threading.Thread(target=run_one, args=(place, found, gate)) for place in range(len(works))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = max(best, sum(found))
    return best


def _make_read() -> Callable[[], float]:
    values = np.ones(_READ_BYTES // 4, np.float32)

    def read() -> float:
        values.max()
        return values.nbytes / 1e9

    return read


def _make_product() -> Callable[[], float]:
    left, right = np.ones((_PRODUCT, _PRODUCT), np.float32), np.ones((_PRODUCT, _PRODUCT), np.float32)
    out = np.empty_like(left)

    def multiply() -> float:
        np.matmul(left, right, out=out)
        return 2 * _PRODUCT**3 / 1e9

    return multiply


if __name__ == "__main__":
    print(json.dumps(measure_rates(_make_read, _make_product)))
