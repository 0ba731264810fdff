"""The writer of the step log while the loop runs: the file, the queue before it and the thread that writes the lines.

The form of a line is defined in `sched.record`; the loop measures the times.

The loop hands over values that it has anyway, and the lines are made while it waits for its device. When the disk is
slower than the steps, the loop waits for it, since a log with a gap cannot be replayed beyond the gap. When the disk
stands still, the loop goes on without a log: serving comes first, and lost steps are counted, in the log and in the
file.
"""

import atexit
import contextlib
import logging
import os
import queue
import threading
from pathlib import Path
from typing import IO, NamedTuple

from jaxserve.engine.observers import EndedStep, StepObserver, StepTimes
from jaxserve.errors import ConfigError
from jaxserve.sched.plan import Drafted, Limits, StepPlan
from jaxserve.sched.record import LogEnd, LogHeader, StepRecord

logger = logging.getLogger(__name__)

QUEUED_STEPS = 1024
PATIENCE_S = 1.0  # one halt of this length is worse than none, and better than losing the log to a short stall
CLOSE_S = 10.0


class _Step(NamedTuple):
    plan: StepPlan
    limits: Limits
    token_ids: list[int]
    times: StepTimes
    missing: int
    counts: list[int] | None
    drafts: list[list[Drafted]] | None


class StepLogWriter(StepObserver):
    """One file. `note` belongs to the loop's thread, `close` to any; the end of the program closes it, too.

    Attributes:
      path: the file. One that exists is never written over: then it is NAME.2, NAME.3, … before the ending.
    """

    def __init__(
        self,
        path: Path | str,
        header: LogHeader,
        *,
        start_s: float,
        capacity: int = QUEUED_STEPS,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`start_s`: zero of the times in the log, on the engine's clock. Raises ConfigError when it cannot write."""
        asked = Path(path).expanduser()
        self.path, self._file = _open_new(asked)
        if self.path != asked:
            logger.warning("runtime.step_log: %s exists, so the steps of this run are in %s", asked, self.path)
        self._start_s = start_s
        self._patience_s = patience_s
        self._queue: queue.Queue[_Step | None] = queue.Queue(capacity)
        self._may_wait = True
        self._missing = 0  # since the last step that was taken; written by the loop
        self._dropped = 0  # of all lost steps; written by the loop
        self._records = self._unwritten = 0  # written by the writing thread
        self._closing = threading.Lock()
        self._closed = False
        self._write(header.to_json())
        self._file.flush()
        self._thread = threading.Thread(target=self._run, name="jaxserve-step-log", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        logger.info("steps are written to %s; it holds the prompts", self.path)

    def note(self, step: EndedStep) -> None:
        """Takes a step that has ended. Waits for a slow disk; for one that stands still, once."""
        if self._closed:
            return
        # Not the result itself: its log-probabilities may be large, and the log has none.
        plan, limits, result, times = step
        line = _Step(plan, limits, result.token_ids, times, self._missing, result.counts, result.drafts)
        try:
            if self._may_wait:
                self._queue.put(line, timeout=self._patience_s)
            else:
                self._queue.put_nowait(line)
        except queue.Full:
            if self._may_wait:
                logger.warning("%s cannot be written fast enough; steps are missing from it", self.path)
            self._may_wait = False
            self._missing += 1
            self._dropped += 1
            return
        self._missing = 0
        self._may_wait = True

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Writes what is queued and the last line. Says in the log how many steps are missing, if any are."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            missing = self._dropped + self._queue.qsize()
            logger.error("%s: the disk stands still; its end and about %d steps are missing", self.path, missing)
        elif missing := self._dropped + self._unwritten:
            logger.warning("%s: %d steps, and %d are missing", self.path, self._records, missing)
        else:
            logger.info("%s: %d steps", self.path, self._records)

    def _run(self) -> None:
        while (step := self._queue.get()) is not None:
            if self._unwritten:
                self._unwritten += 1
                continue
            try:
                self._write(self._record(step).to_json())
                if self._queue.empty():
                    self._file.flush()
                self._records += 1
            except Exception as error:  # a full disk, or a defect: serving goes on
                logger.error("%s cannot be written any more: %r; the steps from now on are lost", self.path, error)
                self._unwritten = 1
        try:
            if not self._unwritten:
                self._write(LogEnd(records=self._records, dropped=self._dropped).to_json())
            self._file.close()
        except OSError as error:
            logger.error("%s has no end: %s", self.path, error)

    def _record(self, step: _Step) -> StepRecord:
        plan, times, counts, drafts = step.plan, step.times, step.counts, step.drafts
        bucket = step.limits.bucket_of(plan)
        assert bucket is not None, f"step {plan.step_id} was run in no bucket"
        return StepRecord(
            plan=plan,
            bucket=bucket,
            token_ids=tuple(step.token_ids),
            counts=None if counts is None else tuple(counts),
            drafts=None if drafts is None else tuple(map(tuple, drafts)),
            start_s=times.begun_s - self._start_s,
            schedule_ms=1e3 * (times.planned_s - times.begun_s),
            pack_ms=1e3 * (times.launched_s - times.planned_s),
            device_ms=1e3 * times.since(times.launched_s),
            wait_ms=1e3 * (times.ready_s - times.asked_s),
            commit_ms=1e3 * times.commit_s,
            missing=step.missing,
        )

    def _write(self, line: str) -> None:
        self._file.write(line.encode() + b"\n")


def check_step_log(path: str) -> None:
    """Raises ConfigError when no log can be written there, before minutes are spent on loading."""
    directory = Path(path).expanduser().absolute().parent
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        raise ConfigError(
            f"runtime.step_log is {path}, but {directory} is no directory that can be written to; make it"
        )


def replica_path(path: str, replica: int, num_replicas: int) -> str:
    """The file of one replica: its number goes before the ending where there are several."""
    if num_replicas == 1:
        return path
    whole = Path(path)
    return str(whole.with_name(f"{whole.stem}.replica{replica}{whole.suffix}"))


def _open_new(path: Path) -> tuple[Path, IO[bytes]]:
    number, name = 1, path
    while True:
        try:
            # The log holds prompts, so only the user who runs the engine may read it.
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            number += 1
            name = path.with_name(f"{path.stem}.{number}{path.suffix}")
        except OSError as error:
            raise ConfigError(f"runtime.step_log: cannot write {name}: {error.strerror}") from error
        else:
            return name, os.fdopen(descriptor, "wb")
