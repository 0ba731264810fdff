"""A trial compile of each grammar in a process of its own, which may crash.

llguidance bounds the cost of a grammar once it runs, but compiling a schema of one kilobyte can take years, one of a
hundred kilobytes can overflow the stack, which no handler of Python's survives, and reading some GBNF holds the
interpreter for a minute. A grammar whose trial ends in time and in memory, with an error or without, is compiled again
where it is used; errors are reported there.
"""

import signal
import struct
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import IO

from jaxserve.errors import InvalidRequest, JaxserveError, UnsupportedOption

_PROGRAM = Path(__file__).with_name("trial_process.py")
# Threads of the server have 8 MiB on Linux and 16 on macOS, so a grammar that fits here leaves them room.
_STACK_BYTES = 2**20
_MEMORY_BYTES = 2**32


class Trial:
    """Says which grammars are safe to compile. May be used from several threads, which then wait for each other.

    The process starts with the first grammar, takes milliseconds for each, and ends with this object.
    """

    def __init__(self, *, seconds: float, max_items_in_row: int, max_lexer_states: int) -> None:
        """`seconds`: of processor time for one grammar. The other two are limits of llguidance."""
        self.seconds = seconds
        self._limits = (str(max_items_in_row), str(max_lexer_states))
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._finalizer: weakref.finalize[..., Trial] | None = None

    def check(self, what: str, text: str, *, is_gbnf: bool = False) -> str:
        """The source that llguidance may compile: `text`, or its Lark form when it is GBNF. It may still be invalid.

        `what`: its name in messages. Raises UnsupportedOption when compiling it does not end, InvalidRequest when it
        is GBNF that cannot be read, JaxserveError when the process cannot run at all.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is not None:  # ended from outside
                self._process.end()
                self._process = None
            if self._process is None:
                self._process = self._start()
            answer = self._process.ask(text, is_gbnf)
            if isinstance(answer, int):
                self._process = None
        if isinstance(answer, str):
            return answer if is_gbnf else text
        if answer == -signal.SIGPROF:
            raise UnsupportedOption(f"the {what} takes more than {self.seconds:g} s to compile; give a simpler one")
        if answer > 0:
            raise JaxserveError(f"the process that compiles grammars ended with status {answer}; see the log")
        raise UnsupportedOption(
            f"the {what} is nested too deep to be compiled, or takes too much memory; give a simpler one"
        )

    def _start(self) -> "_Process":
        numbers = (str(self.seconds), str(_STACK_BYTES), str(_MEMORY_BYTES), *self._limits)
        process = _Process([sys.executable, "-P", str(_PROGRAM), *numbers])
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, process.end)  # also when the interpreter ends
        return process


class _Process:
    """One life of the program. Used by one thread at a time."""

    def __init__(self, command: list[str]) -> None:
        # A session of its own: Ctrl-C in a terminal is for the server, which may still have requests to finish.
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
            )
        except OSError as error:
            raise JaxserveError(f"the process that compiles grammars cannot start: {error}") from error
        assert process.stdin is not None and process.stdout is not None
        self._popen = process
        self._stdin: IO[bytes] = process.stdin
        self._stdout: IO[bytes] = process.stdout

    def poll(self) -> int | None:
        return self._popen.poll()

    def ask(self, text: str, is_gbnf: bool) -> str | int:
        """The answer, or the exit status of the process, negative for a signal. Raises InvalidRequest as `check`."""
        data = text.encode()
        message = memoryview(struct.pack("<i?", len(data), is_gbnf) + data)
        try:
            while message:
                message = message[self._stdin.write(message) :]
            header = self._read(4)
            size = struct.unpack("<i", header)[0] if header else 0
            answer = self._read(size if size >= 0 else ~size)
        except BrokenPipeError:
            return self.end()
        if not header or answer is None:
            return self.end()
        if size < 0:
            raise InvalidRequest(f"the grammar cannot be read: {answer.decode()}")
        return answer.decode()

    def _read(self, size: int) -> bytes | None:
        """Reads the next bytes; None when the process has ended before."""
        found = b""
        while len(found) < size:
            part = self._stdout.read(size - len(found))
            if not part:
                return None
            found += part
        return found

    def end(self) -> int:
        """Ends the process and returns its status."""
        self._stdin.close()
        self._stdout.close()
        self._popen.kill()
        return self._popen.wait()
