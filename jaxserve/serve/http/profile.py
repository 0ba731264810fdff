"""JAX profiles of a running server, one at a time, into a directory that the operator named.

TensorBoard's profile plugin and Perfetto read them.
"""

import asyncio
import datetime
import logging
from pathlib import Path

from jaxserve.errors import UserError
from jaxserve.serve.http.errors import HttpRefusal

logger = logging.getLogger(__name__)

MAX_SECONDS = 60.0
MAX_OPEN_S = 600.0  # of a profile that waits for its end to be asked for: events fill the memory of the process


class ProfileCapture:
    """Used on one event loop. `directory` None: profiling is off."""

    def __init__(self, directory: str | None) -> None:
        self._directory = None if directory is None else Path(directory).expanduser()
        self._running: _Recording | None = None

    async def capture(self, seconds: float) -> Path:
        """Records for `seconds` and returns the directory of the files.

        A client that leaves does not end the capture. Raises HttpRefusal: 404 when it is off, 409 when one runs, 500
        when the directory cannot be written to.
        """
        return await self._begin(seconds).written()

    async def begin(self) -> Path:
        """Records until `end`, and for MAX_OPEN_S at most; returns the directory of the files that are to come.

        Raises as `capture`.
        """
        return await self._begin(MAX_OPEN_S).begun()

    async def end(self) -> Path:
        """Ends the profile that runs; returns the directory of its files.

        Raises HttpRefusal: 404 when it is off, 409 when none runs.
        """
        self._need_directory()
        if self._running is None or self._running.done:
            raise HttpRefusal(
                409, f"no profile is being recorded; begin one with /start_profile (it ends after {MAX_OPEN_S:.0f} s)"
            )
        self._running.enough.set()
        return await self._running.written()

    def _begin(self, seconds: float) -> "_Recording":
        directory = self._need_directory()
        if self._running is not None and not self._running.done:
            raise HttpRefusal(409, "a profile is being captured already; try again when it is done")
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S.%f")
        self._running = _Recording(directory / f"profile-{stamp}", seconds)
        return self._running

    def _need_directory(self) -> Path:
        if self._directory is None:
            raise HttpRefusal(404, "profiling is off; start the server with serve.http.profile_dir set to a directory")
        return self._directory


class _Recording:
    """One profile, as a task of its own: calls that ask for it may be cancelled. `enough` ends it early."""

    def __init__(self, target: Path, seconds: float) -> None:
        self.enough = asyncio.Event()
        self._target = target
        self._has_begun = asyncio.Event()
        self._task = asyncio.create_task(self._record(seconds))
        self._task.add_done_callback(_tell)

    @property
    def done(self) -> bool:
        return self._task.done()

    async def begun(self) -> Path:
        """Waits until it records. Raises HttpRefusal when it cannot."""
        waiting = asyncio.ensure_future(self._has_begun.wait())
        try:
            await asyncio.wait({waiting, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        return self._target if self._has_begun.is_set() else await self.written()

    async def written(self) -> Path:
        """Waits for its files. Raises HttpRefusal when there are none."""
        return await asyncio.shield(self._task)

    async def _record(self, seconds: float) -> Path:
        import jax  # a server on a fake device needs none

        try:
            self._target.mkdir(parents=True)
        except OSError as error:
            raise HttpRefusal(500, f"serve.http.profile_dir cannot be written to: {error}") from error
        try:
            await asyncio.to_thread(jax.profiler.start_trace, self._target)
        except RuntimeError as error:  # another profile runs in this process, of a notebook, say
            raise HttpRefusal(409, f"JAX cannot record now: {error}") from error
        self._has_begun.set()
        try:
            await asyncio.wait_for(self.enough.wait(), seconds)
        except TimeoutError:
            pass
        finally:
            await asyncio.to_thread(jax.profiler.stop_trace)  # writes the files, which takes a while
        return self._target


def _tell(task: asyncio.Task[Path]) -> None:
    """One that ended by itself has no call to tell how."""
    if task.cancelled():
        return
    if (error := task.exception()) is None:
        logger.info("a profile is in %s", task.result())
    elif not isinstance(error, UserError):
        logger.error("a profile failed", exc_info=error)
