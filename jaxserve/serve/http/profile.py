"""JAX profiles of a running server, one at a time, into a directory that the operator named.

TensorBoard's profile plugin and Perfetto read them.
"""

import asyncio
import datetime
from pathlib import Path

from jaxserve.serve.http.errors import HttpRefusal

MAX_SECONDS = 60.0


class ProfileCapture:
    """Used on one event loop. `directory` None: profiling is off."""

    def __init__(self, directory: str | None) -> None:
        self._directory = None if directory is None else Path(directory).expanduser()
        self._task: asyncio.Task[Path] | None = None

    async def capture(self, seconds: float) -> Path:
        """Records for `seconds` and returns the directory of the files.

        A client that leaves does not end the capture. Raises HttpRefusal: 404 when it is off, 409 when one runs, 500
        when the directory cannot be written to.
        """
        if self._directory is None:
            raise HttpRefusal(404, "profiling is off; start the server with serve.http.profile_dir set to a directory")
        if self._task is not None and not self._task.done():
            raise HttpRefusal(409, "a profile is being captured already; try again when it is done")
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S.%f")
        self._task = asyncio.create_task(_capture(self._directory / f"profile-{stamp}", seconds))
        return await asyncio.shield(self._task)


async def _capture(target: Path, seconds: float) -> Path:
    import jax  # a server on a fake device needs none

    try:
        target.mkdir(parents=True)
    except OSError as error:
        raise HttpRefusal(500, f"serve.http.profile_dir cannot be written to: {error}") from error
    try:
        await asyncio.to_thread(jax.profiler.start_trace, target)
    except RuntimeError as error:  # another profile runs in this process, of a notebook, say
        raise HttpRefusal(409, f"JAX cannot record now: {error}") from error
    try:
        await asyncio.sleep(seconds)
    finally:
        await asyncio.to_thread(jax.profiler.stop_trace)  # writes the files, which takes a while
    return target
