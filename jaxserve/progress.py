"""Progress of a long job: its phases, counts, and a sign of life in long steps.

    with show_progress() as progress:
        progress.begin("loading weights")
        progress.begin("compiling")
        progress.count(3, 7, "decode 16x16")

On a terminal it is one bar that is gone at the end; elsewhere plain lines, one when a phase begins, one with its
seconds when a long one has ended, and one every ten seconds meanwhile. In a notebook each line takes the place of the
one before it, every two seconds. A heartbeat writes them, since a single step (a compile, a read) may take longer than
a person waits without doubt. Results belong to stdout, so all of it goes to stderr or the log.
"""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import rich.console
import rich.logging
import rich.progress

logger = logging.getLogger(__name__)

EVERY_S = 10.0  # between two lines of one phase
_REPLACED_EVERY_S = 2.0  # where a line takes the place of the one before
_SHORT_S = 1.0  # the end of a shorter phase is told by the beginning of the next
_BEAT_S = 0.5


class Progress(Protocol):
    """Where a long job reports its phases, from the one thread that does it."""

    def begin(self, phase: str) -> None:
        """The next phase, before its work: a few words such as "loading weights"."""
        ...

    def count(self, done: int, total: int, newest: str = "") -> None:
        """How far the phase is. `newest` names what was finished last."""
        ...


class Quiet:
    """Reports nothing."""

    def begin(self, phase: str) -> None:
        """Nothing."""

    def count(self, done: int, total: int, newest: str = "") -> None:
        """Nothing."""


class Lines:
    """Plain lines for `write`. `tick` may be called from another thread, often: it writes a line when one is due.

    `every_s`: between two lines of one phase; None: `EVERY_S`.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        every_s: float | None = None,
    ) -> None:
        self._write, self._clock = write, clock
        self._every_s = EVERY_S if every_s is None else every_s
        self._lock = threading.Lock()
        self._phase = self._counted = ""
        self._begin_s = self._last_s = clock()

    def begin(self, phase: str) -> None:
        with self._lock:
            self._tell_end()
            self._phase, self._counted = phase, ""
            self._begin_s = self._last_s = self._clock()
            self._write(phase)

    def count(self, done: int, total: int, newest: str = "") -> None:
        with self._lock:
            self._counted = f": {done} of {total}{f', {newest}' if newest else ''}"
            self._tell()

    def end(self) -> None:
        """The last phase has ended as it should."""
        with self._lock:
            self._tell_end()

    def clear(self) -> None:
        """An empty line, in place of the last one."""
        with self._lock:
            self._write("")

    def tick(self) -> None:
        """Writes a line when the last one is old."""
        with self._lock:
            self._tell()

    def _tell(self) -> None:
        now_s = self._clock()
        if self._phase and now_s - self._last_s >= self._every_s:
            self._last_s = now_s
            self._write(f"{self._phase}{self._counted} ({now_s - self._begin_s:.0f} s)")

    def _tell_end(self) -> None:
        seconds = self._clock() - self._begin_s
        if self._phase and seconds >= _SHORT_S:
            self._write(f"{self._phase}: done in {seconds:.0f} s")
        self._phase = ""


class _Bar:
    """One line of rich, which draws itself on a thread of its own."""

    def __init__(self, bar: rich.progress.Progress) -> None:
        self._bar = bar
        self._task: rich.progress.TaskID | None = None
        self._phase = ""

    def begin(self, phase: str) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._phase = phase
        self._task = self._bar.add_task(phase, total=None)

    def count(self, done: int, total: int, newest: str = "") -> None:
        assert self._task is not None, "a phase begins before it counts"
        text = f"{self._phase}: {done} of {total} {newest}".rstrip()
        self._bar.update(self._task, completed=done, total=total, description=text)


@contextlib.contextmanager
def show_progress(*, shown: bool = True, write: Callable[[str], None] | None = None) -> Iterator[Progress]:
    """A bar on a terminal; one line below the cell in a notebook; else lines for `write`; None: the log where that
    shows them, else stderr."""
    if not shown:
        yield Quiet()
        return
    console = error_console()
    if console.is_jupyter:
        write = _notebook_line()
    elif console.is_terminal:
        columns = (
            rich.progress.SpinnerColumn(),
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.TimeElapsedColumn(),
        )
        with rich.progress.Progress(*columns, console=console, transient=True) as bar:
            yield _Bar(bar)
        return
    every_s = _REPLACED_EVERY_S if console.is_jupyter else None
    lines = plain_lines() if write is None else Lines(write, every_s=every_s)
    ended = threading.Event()
    heart = threading.Thread(target=_beat, args=(lines, ended), name="jaxserve-progress", daemon=True)
    heart.start()
    try:
        yield lines
        lines.end()
    finally:
        ended.set()
        heart.join()
        if console.is_jupyter:
            lines.clear()


def error_console() -> rich.console.Console:
    """The console of the log, where that writes to a terminal: a bar moves aside only for lines of its own console."""
    handlers = logging.getLogger(__package__).handlers
    return next(
        (handler.console for handler in handlers if isinstance(handler, rich.logging.RichHandler)),
        rich.console.Console(stderr=True),
    )


def plain_lines() -> Lines:
    """Lines for the log where that shows them, else for stderr."""
    return Lines(logger.info if _log_shows_lines() else _to_stderr)


def _beat(lines: Lines, ended: threading.Event) -> None:
    while not ended.wait(_BEAT_S):
        lines.tick()


def _notebook_line() -> Callable[[str], None]:
    """Writes below the cell that runs. Not a bar of rich: its widget takes messages from the cell's own thread alone,
    and a heartbeat has another."""
    from IPython.display import display

    handle = display({"text/plain": ""}, raw=True, display_id=True)
    assert handle is not None, "a display with an id has a handle"
    return lambda line: handle.update({"text/plain": line}, raw=True)


def _log_shows_lines() -> bool:
    return logger.hasHandlers() and logger.isEnabledFor(logging.INFO)


def _to_stderr(line: str) -> None:
    print(f"jaxserve: {line}", file=sys.stderr, flush=True)
