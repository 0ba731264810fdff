"""Threads that may get stuck: a bounded number of jobs waits, and the process can end although a job does not."""

import collections
import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

Job = Callable[[], None]


class Workers:
    """Daemon threads, since a read of a dead network file system ends never, and neither would the interpreter.

    Started with the first job.
    """

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        self._name = name
        self._num_threads = num_threads
        self._max_waiting = max_waiting
        self._condition = threading.Condition()
        self._jobs: collections.deque[Job] = collections.deque()
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._closed = False

    def submit(self, job: Job) -> bool:
        """False when too many jobs wait already, or after `close`. A job must not raise."""
        with self._condition:
            if self._closed or len(self._jobs) >= self._max_waiting:
                return False
            self._jobs.append(job)
            if len(self._threads) < self._num_threads and len(self._jobs) + self._running > len(self._threads):
                thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._condition.notify()
            return True

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether every job has ended within the time."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._jobs and not self._running, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Lets jobs that wait or run end, within the time; the others are left behind."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        if not self.wait_idle(timeout_s):
            with self._condition:
                logger.warning("%s: %d jobs did not end and are left", self._name, len(self._jobs) + self._running)
                self._jobs.clear()
        for thread in self._threads:
            thread.join(0 if self._running else timeout_s)

    def _work(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._running += 1
            try:
                job()
            except BaseException:  # a job that calls sys.exit() must not end the thread for the jobs after it
                logger.exception("%s: a bug: a job raised", self._name)
            finally:
                with self._condition:
                    self._running -= 1
                    self._condition.notify_all()
