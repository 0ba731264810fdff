"""The program of the process that `apart` starts: it gives way to all others, then does what it is ordered.

It is run by its path, so that nothing of the package is imported before the process has its low priority. Standard
library only.
"""

import contextlib
import ctypes
import importlib
import os
import pickle
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _give_way() -> None:
    """The lowest priority, for all threads to come. Linux's class for idle processes would be lower still, and stand
    still as long as anything else keeps the cores busy."""
    with contextlib.suppress(OSError):
        os.nice(19)


def _die_with(parent: int) -> None:
    """The kernel kills this process when the thread that started it ends: that reaches a stopped process, too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(0)


def _end_with_orders() -> None:
    os.read(0, 1)  # until the other end is closed, be it by the death of its process
    os._exit(0)


def _main() -> None:
    _give_way()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # text that a library prints is no answer

    def tell(name: str, seconds: float | None, error: BaseException | None) -> None:
        kind, text = ("built", f"{seconds:.3f}") if error is None else ("failed", " ".join(repr(error).split()))
        answers.write(f"{kind}\t{name}\t{text}\n")

    parent, paths, module = pickle.load(sys.stdin.buffer)
    _die_with(parent)
    sys.path[:] = paths
    orders = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_orders, daemon=True).start()
    importlib.import_module(module).carry_out(orders, tell)


if __name__ == "__main__":
    _main()
