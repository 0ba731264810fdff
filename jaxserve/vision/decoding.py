"""From the bytes of a picture file to its pixels, without trusting the bytes.

Each file is decoded by a process that has a bound of memory and of time, and may crash (`decoder_program`): neither
costs more than that picture. What can be refused by the header of a file, or by counting, is refused there before it is
decoded. Offline use takes the same way, so that the same files are taken, and a crash is an error there, too.
"""

import concurrent.futures
import contextlib
import fcntl
import functools
import importlib.util
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from jaxserve.errors import InvalidRequest, JaxserveError
from jaxserve.vision.decoder_program import ANSWER, FULL, PIXELS, QUESTION, REFUSED, Refused, check_pixels, upright

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")

logger = logging.getLogger(__name__)

_PROGRAM = Path(__file__).with_name("decoder_program.py")
# Processor time is what a picture costs, whatever else the machine does. The clock ends what takes none, such as a
# process that somebody has stopped; a machine that is busy comes nowhere near.
_CLOCK_PER_PROCESSOR_S = 12
_LEAST_CLOCK_S = 60.0
_LOOK_MS = 100  # between looks at the clock, and for a caller that has left
_PIPE_BYTES = 1 << 20
_MAX_TEXT_BYTES = 1 << 16


def is_installed() -> bool:
    """Whether Pillow is there, which reads all files."""
    return importlib.util.find_spec("PIL") is not None


class TimeAllowed:
    """What decoding may take for all pictures of one request. Used by one thread.

    Attributes:
      limit_s: of processor time, for all of them.
      left_s: of that, for those that are to come.
    """

    def __init__(self, limit_s: float, has_left: Callable[[], bool]) -> None:
        """`has_left`: whether the caller has gone meanwhile, so that nobody waits for the pictures."""
        self.limit_s = limit_s
        self.left_s = limit_s
        self._clock_s = max(_LEAST_CLOCK_S, _CLOCK_PER_PROCESSOR_S * limit_s)
        self._until_s = time.monotonic() + self._clock_s
        self._has_left = has_left

    def check(self) -> None:
        """Raises InvalidRequest when the time is up, and CancelledError when the caller has left."""
        if self._has_left():
            raise concurrent.futures.CancelledError("the caller has left")
        if self.left_s <= 0:
            raise self.spent()
        if time.monotonic() > self._until_s:
            raise InvalidRequest(
                f"the pictures of the request were not decoded in {self._clock_s:g} s, while they may take "
                f"{self.limit_s:g} s of processor time (vision.decode_s); send smaller ones, or try again later"
            )

    def spent(self) -> InvalidRequest:
        """The error of a request whose pictures take more processor time."""
        return InvalidRequest(
            f"the pictures of the request take more than {self.limit_s:g} s of processor time to decode "
            "(vision.decode_s); send fewer, or smaller ones"
        )


class Decoders:
    """The processes that decode. Threads that decode at the same time have one each, so none waits for another's file.

    One starts when a file comes and none is free, and is kept for the files to come. They end with this object, and
    with the process that has it, however it ends.
    """

    def __init__(self, *, max_pixels: int, max_scans: int, seconds: float, memory_bytes: int) -> None:
        """Limits of a file, as `decoder_program.decode` takes them. `seconds`: of processor time, for all pictures of a
        request. `memory_bytes`: address space of a process."""
        self._max_pixels = max_pixels
        self._max_scans = max_scans
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._free: list[_Decoder] = []
        self._living: set[_Decoder] = set()
        self._asked = threading.local()  # on a thread that works for a caller: `has_left`, whether that one has gone
        weakref.finalize(self, _end_all, self._living)  # also when the interpreter ends

    def for_caller(self, has_left: Callable[[], bool], work: Callable[[], T]) -> Callable[[], T]:
        """`work`, to be done on any thread, for a caller that may leave: then `open` in it raises CancelledError."""
        return self._asked_by(has_left)(work)

    @contextlib.contextmanager
    def _asked_by(self, has_left: Callable[[], bool]) -> Iterator[None]:
        self._asked.has_left = has_left
        try:
            yield
        finally:
            del self._asked.has_left

    def allow(self) -> TimeAllowed:
        """For the pictures of a request that begins now."""
        return TimeAllowed(self._seconds, getattr(self._asked, "has_left", lambda: False))

    def open(self, source: "bytes | Image", allowed: TimeAllowed) -> "Image":
        """The picture upright, in RGB, as transformers loads it: transparency is dropped, of an animation the first
        frame counts.

        `source`: a PNG, JPEG, WebP or GIF file, or a picture that is open. Raises InvalidRequest for other formats,
        broken files, and what is beyond the limits, CancelledError when the caller has left, and JaxserveError when no
        process can run at all.
        """
        silence_pillow()
        if isinstance(source, bytes):
            return self._decode(source, allowed)
        try:
            check_pixels(source, self._max_pixels)
            return upright(source)
        except Refused as error:
            raise InvalidRequest(str(error)) from error

    def _decode(self, data: bytes, allowed: TimeAllowed) -> "Image":
        allowed.check()
        decoder = self._take()
        try:
            answer = decoder.ask(data, allowed)
        except BaseException as error:
            with self._lock:
                self._living.discard(decoder)
            decoder.end()
            logger.warning("a process that decodes pictures was ended: %s", error)
            raise
        with self._lock:
            self._free.append(decoder)
        if isinstance(answer, str):
            raise InvalidRequest(answer)
        return answer

    def _take(self) -> "_Decoder":
        with self._lock:
            while self._free:
                decoder = self._free.pop()
                if decoder.is_alive():
                    return decoder
                self._living.discard(decoder)  # ended from outside, while nobody used it
                decoder.end()
        decoder = _Decoder(self._memory_bytes, self._max_pixels, self._max_scans)
        with self._lock:
            self._living.add(decoder)
        return decoder


def _end_all(living: "set[_Decoder]") -> None:
    for decoder in list(living):
        decoder.end()


class _Decoder:
    """One process. Used by one thread at a time; `end` may be called by another."""

    def __init__(self, memory_bytes: int, max_pixels: int, max_scans: int) -> None:
        """Raises JaxserveError where none can start."""
        self._memory_bytes = memory_bytes
        self._max_pixels = max_pixels
        numbers = map(str, (memory_bytes, max_pixels, max_scans))
        # A session of its own: Ctrl-C in a terminal is for the server, which may still have requests to finish.
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM), json.dumps(sys.path), *numbers],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise JaxserveError(f"the process that decodes pictures cannot start: {error}") from error
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._stdin: IO[bytes] = process.stdin
        self._stdout: IO[bytes] = process.stdout
        self._writable, self._readable = select.poll(), select.poll()
        self._writable.register(self._stdin, select.POLLOUT)
        self._readable.register(self._stdout, select.POLLIN)
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)
            if sys.platform == "linux":  # fewer turns; what a user's pipes may have in all is limited
                with contextlib.suppress(OSError):
                    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, data: bytes, allowed: TimeAllowed) -> "Image | str":
        """The picture of a file, or why it is refused. Raises as `Decoders.open`; then the process is of no use."""
        header = bytearray(ANSWER.size)
        try:
            self._write(QUESTION.pack(len(data), allowed.left_s), allowed)
            self._write(data, allowed)
            self._read(header, allowed)
            kind, seconds, columns, rows = ANSWER.unpack(header)
            # The process may have been taken over by the file. What it says is as little trusted.
            known = {PIXELS: columns * rows <= self._max_pixels, REFUSED: columns <= _MAX_TEXT_BYTES, FULL: not columns}
            if not known.get(kind):
                raise InvalidRequest("a picture cannot be decoded: what its decoder answers is no picture")
            content = bytearray(3 * columns * rows if kind == PIXELS else columns)
            self._read(content, allowed)
        except (BrokenPipeError, EOFError):
            raise self._lost(allowed) from None
        allowed.left_s -= max(seconds, 0.0)
        if kind == FULL:
            return (
                f"a picture takes more than {self._memory_bytes} bytes of memory to decode (vision.decode_bytes); send "
                "a smaller one"
            )
        if kind == REFUSED:
            return content.decode(errors="replace")
        from PIL import Image

        return Image.frombytes("RGB", (columns, rows), content)

    def _write(self, data: bytes, allowed: TimeAllowed) -> None:
        """Raises BrokenPipeError when the process has ended."""
        left = memoryview(data)
        while left:
            allowed.check()
            if self._writable.poll(_LOOK_MS):
                left = left[self._stdin.write(left) or 0 :]

    def _read(self, target: bytearray, allowed: TimeAllowed) -> None:
        """Raises EOFError when the process has ended."""
        left = memoryview(target)
        while left:
            allowed.check()
            if self._readable.poll(_LOOK_MS):
                count = self._stdout.readinto(left)  # pyright: ignore
                if count == 0:
                    raise EOFError
                left = left[count or 0 :]

    def _lost(self, allowed: TimeAllowed) -> JaxserveError:
        """Why the process has ended."""
        status = self.end()
        if status == -signal.SIGPROF:
            return allowed.spent()
        if status >= 0:
            return JaxserveError(f"the process that decodes pictures ended with status {status}; see the log")
        name = signal.Signals(-status).name
        return InvalidRequest(f"a picture cannot be decoded: its decoder was ended by {name}; is the file whole?")

    def end(self) -> int:
        """Ends the process and returns its status."""
        self._process.kill()
        status = self._process.wait()
        self._stdin.close()
        self._stdout.close()
        return status


@functools.cache
def silence_pillow() -> None:
    """Once for the process, since filters of warnings are no matter of a thread: Pillow would warn of sizes, whose
    limit is the caller's."""
    from PIL import Image

    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
