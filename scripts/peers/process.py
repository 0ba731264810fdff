"""This side of an engine: its process, stopped whenever it is not its turn.

A stopped process uses no processor whatever its threads would do, which no setting of any engine promises; libraries
for parallel loops spin for a while after each.
"""

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers.noise import most_memory, others_share, read_used
from peers.values import Answer, Ask, Settings, answers_from_json, asks_to_json

SCRIPTS = Path(__file__).parent.parent


class PeerError(Exception):
    """An engine could not be started, or ended. Says which, why and where its messages are."""


class PeerProcess:
    """One engine, loaded and stopped. To be used by one thread."""

    def __init__(
        self, name: str, module: str, python: str, settings: Settings, log: Path, timeout_s: float, env: dict[str, str]
    ) -> None:
        """Starts `engine_MODULE` under the interpreter `python` and waits until it is loaded. Raises PeerError.

        `env` is added to the environment. Nothing that takes longer than `timeout_s` is waited for.
        """
        self.name, self._log, self._timeout_s = name, log, timeout_s
        more = filter(None, [env.get("PYTHONPATH"), os.environ.get("PYTHONPATH")])
        paths = os.pathsep.join([str(SCRIPTS), *more])
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("w") as messages:
                self._process = subprocess.Popen(
                    [python, "-m", "peers.worker", module],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=messages,
                    env={**os.environ, **env, "PYTHONPATH": paths},
                    start_new_session=True,  # so that a signal reaches whatever it starts itself
                )
        except OSError as error:
            raise PeerError(f"{name}: cannot run {python}: {error}; make its environment, or leave it out") from error
        self._buffer = b""
        try:
            self.about: dict[str, Any] = self._ask(dataclasses.asdict(settings))["about"]
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    @property
    def process_id(self) -> int:
        return self._process.pid

    def run(self, asks: list[Ask], before: list[Ask]) -> tuple[list[Answer], float | None]:
        """One run, and ahead of it, in the same turn, one whose answers nobody needs.

        Returns the answers and the share of the machine that others used meanwhile. Raises PeerError.
        """
        with self._turn():
            self._ask(asks_to_json(before))
            used = read_used(self._process.pid)
            reply = self._ask(asks_to_json(asks))
            return answers_from_json(reply["answers"]), others_share(used, read_used(self._process.pid))

    def most_memory(self) -> int | None:
        """Bytes that it had in memory at most since its start, loading included; None where that is not known."""
        return most_memory(self._process.pid)

    def close(self) -> None:
        """Ends the process and what it has started."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "both are pipes"
            with contextlib.suppress(OSError):  # what was still to be written has no reader any more
                pipe.close()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _ask(self, value: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None, "both are pipes"
        try:
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerError(f"{self.name}: its process has ended; see {self._log}") from error
        reply = json.loads(self._read_line())
        if "error" in reply:
            raise PeerError(f"{self.name}: {reply['error']}; see {self._log}")
        return reply

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None, "a pipe"
        deadline_s = time.monotonic() + self._timeout_s
        file = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([file], [], [], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise PeerError(f"{self.name}: no answer within {self._timeout_s:g} s; see {self._log}")
            piece = os.read(file, 2**20)
            if not piece:
                raise PeerError(f"{self.name}: its process has ended; see {self._log}")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line
