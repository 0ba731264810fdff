"""Worker processes for work that may crash, hang or poison its process: one task at a time, results as JSON lines.

Both ends of the pipe are here: `Pool` hands out tasks and kills workers that take too long; `serve` is the loop of a
worker. A task is a dict with an `id`, of which the worker makes a dict.

They are processes since a CUDA error poisons every later call of its process, and a kernel that waits for ever cannot
be stopped from within.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

Task = dict[str, Any]
Result = dict[str, Any]
_STOP = "budget"  # the outcome of a task that the pool's deadline ended


class Channel:
    """A worker's way to speak. Whatever else prints in the worker goes to its log."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def stage(self, name: str) -> None:
        """What the worker does from now on; the pool knows how long that may take."""
        self.say({"stage": name})

    def part(self, value: Result) -> None:
        """A piece of the result that must not be lost if the rest crashes."""
        self.say({"part": value})

    def say(self, message: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


def serve(handle: Callable[[Task, Channel], Result]) -> None:
    """Works off the tasks on stdin. An exception is a result: {"failure": its last lines}."""
    channel = Channel()
    for line in sys.stdin:
        try:
            result = handle(json.loads(line), channel)
        except Exception as error:  # any task may fail in any way, and the next one must still run
            result = {"failure": error_lines(error)}
        channel.say({"done": result})


def heed_termination() -> None:
    """Lets SIGTERM end a script as Ctrl-C does: what it has is written, and no worker is left behind."""
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


def error_lines(error: BaseException, count: int = 8) -> str:
    """The end of a traceback, short enough for a table's footnote."""
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    return "\n".join(line[:400] for line in lines[-count:])


class Pool:
    """Runs tasks in processes of `command`, one for each entry of `kinds`.

    A process gets only tasks whose "process" (default '') is its own kind: libraries that do not get on with each
    other live apart. `limits_s` says how long a worker may stay in each stage; a new process is in stage 'start', a
    task handed over in stage 'task'. `once` gives each task a process of its own, for libraries that remember what
    they did. `run` may be called again; the processes live on until `close`.
    """

    def __init__(
        self,
        command: Sequence[str],
        kinds: Sequence[str],
        environment: Mapping[str, str],
        limits_s: Mapping[str, float],
        once: bool = False,
    ) -> None:
        self._once = once
        self._workers = [(kind, _Worker(command, environment, limits_s)) for kind in kinds]

    def run(
        self,
        tasks: Sequence[Task],
        deadline: float,
        on_result: Callable[[Task, Result], Sequence[Task]],
        skip: Callable[[Task], str | None] = lambda task: None,
    ) -> list[Task]:
        """Works off `tasks` in order until `deadline` (of time.monotonic); returns those that were not reached.

        `on_result` gets each result as it comes and may return tasks to put at the end. A task that `skip` gives a
        reason for is not started: its result is {"skipped": reason}. Both are called by one thread at a time. Result
        of a worker that died or was killed: {"failure": ..., "crashed": True}; what it had sent before is under
        "parts", here as in any result, and in a task that the deadline ended.
        """
        waiting, lock = list(tasks), threading.Lock()
        unreached: list[Task] = []
        failures: list[BaseException] = []
        running = 0

        def next_task(kind: str) -> Task | None:
            nonlocal running
            while True:
                with lock:
                    task = next((t for t in waiting if t.get("process", "") == kind), None)
                    if failures or time.monotonic() >= deadline or not (task or running):
                        return None
                    if task is not None:
                        waiting.remove(task)
                        reason = skip(task)
                        if reason is None:
                            running += 1
                            return task
                        waiting.extend(on_result(task, {"skipped": reason}))
                        continue
                time.sleep(0.05)  # a task that runs may put others at the end

        def work(kind: str, worker: _Worker) -> None:
            nonlocal running
            try:
                while (task := next_task(kind)) is not None:
                    result = worker.ask(task, deadline)
                    if self._once:
                        worker.stop()
                    with lock:
                        running -= 1
                        if result.get("failure") == _STOP:
                            unreached.append(task | {"parts": result["parts"]})
                        else:
                            waiting.extend(on_result(task, result))
            except BaseException as error:  # a bug of this script, raised again by the caller's thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=worker, daemon=True) for worker in self._workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)  # so that an interrupt is heard
        if failures:
            raise failures[0]
        return unreached + waiting

    def close(self) -> None:
        """Kills all processes."""
        for _, worker in self._workers:
            worker.stop()


class _Worker:
    """One process, started again when it died. Used by one thread."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], limits_s: Mapping[str, float]) -> None:
        self._command, self._environment, self._limits_s = list(command), dict(environment), limits_s
        self._process: subprocess.Popen[str] | None = None
        self._messages: queue.Queue[str | None] = queue.Queue()
        self._log: IO[bytes] | None = None

    def ask(self, task: Task, deadline: float) -> Result:
        start = time.monotonic()
        stage = "task"
        if self._process is None or self._process.poll() is not None:
            self._start()
            stage = "start"
        process = self._process
        assert process is not None and process.stdin is not None
        parts: list[Result] = []
        try:
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
        except OSError:
            return self._lost("the worker was gone", parts)
        while True:
            limit = self._limits_s[stage]
            try:
                line = self._messages.get(timeout=max(0.0, min(limit, deadline - time.monotonic())))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    self.stop()
                    return {"failure": _STOP, "parts": parts}
                return self._lost(f"killed: more than {limit:g} s in stage {stage!r}", parts)
            if line is None:
                return self._lost(f"the worker died in stage {stage!r}, exit status {process.wait()}", parts)
            message = json.loads(line)
            if "stage" in message:
                stage = message["stage"]
            elif "part" in message:
                parts.append(message["part"])
            else:
                result = message["done"] | {"seconds": round(time.monotonic() - start, 1)}
                if parts:
                    result["parts"] = parts
                if "failure" in result:
                    result["stage"] = stage
                if "failure" in result and stage not in ("compile", "host"):
                    self.stop()  # after an error on the device nothing in that process can be trusted
                return result

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _start(self) -> None:
        self.stop()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._messages = queue.Queue()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=self._environment,
            text=True,
        )
        threading.Thread(target=_read, args=(self._process, self._messages), daemon=True).start()

    def _lost(self, reason: str, parts: list[Result]) -> Result:
        self.stop()
        assert self._log is not None
        self._log.seek(0)
        said = self._log.read()[-20000:].decode(errors="replace").strip().splitlines()[-8:]
        return {"failure": "\n".join([reason, *(line[:400] for line in said)]), "crashed": True, "parts": parts}


def _read(process: subprocess.Popen[str], messages: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        messages.put(line)
    messages.put(None)
