"""The bound on what waits, and when to come again.

Owns the counts of requests that have no token yet, in the inbox or in the scheduler, and the refusal of more. Refuses
order: who is next is the scheduler's. Tokens are bounded beside requests since memory and waiting time follow the
tokens: a thousand chats are less work than ten books.
"""

import collections
import threading
from collections.abc import Callable
from typing import NamedTuple

from jaxserve.api import Request
from jaxserve.engine.base import Load
from jaxserve.errors import DeadlineExceeded, QueueFull

_WINDOW = 64  # starts from which the pace is judged
_LEAST_S, _MOST_S = 1.0, 60.0  # sooner would be a storm, and later a guess


class _Start(NamedTuple):
    at_s: float
    num_tokens: int


class Waiting:
    """Mutated by any thread, under a lock of its own.

    Args:
      max_requests, max_tokens: more is refused. One request may exceed `max_tokens` when nothing waits, as it could
        never run otherwise.
      clock: seconds, monotonic.
    """

    def __init__(self, max_requests: int, max_tokens: int, clock: Callable[[], float]) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_requests = 0
        self.num_tokens = 0  # of their prompts
        self._num_untaken = 0  # of them, those that the loop does not know yet
        self._clock = clock
        self._starts: collections.deque[_Start] = collections.deque(maxlen=_WINDOW)
        self._lock = threading.Lock()

    def load(self, num_live: int) -> Load:
        """`num_live`: requests that the loop has taken."""
        running = max(0, num_live - (self.num_requests - self._num_untaken))
        return Load(running, self.num_requests, self.num_tokens, self.max_requests, self.max_tokens)

    def enter(self, request: Request, *, bounded: bool = True) -> None:
        """Counts a request. Raises QueueFull, unless not `bounded`, when there is no room for it."""
        num_tokens = len(request.prompt_token_ids)
        with self._lock:
            if bounded:
                self._check(num_tokens)
            self.num_requests += 1
            self.num_tokens += num_tokens
            self._num_untaken += 1

    def take(self) -> None:
        """The loop has taken one out of its inbox; it waits on."""
        with self._lock:
            self._num_untaken -= 1

    def leave(self, request: Request, *, started: bool) -> None:
        """Takes one out: it has its first token, or it has ended before."""
        num_tokens = len(request.prompt_token_ids)
        with self._lock:
            self.num_requests -= 1
            self.num_tokens -= num_tokens
            assert self.num_requests >= 0, self.num_requests
            assert self.num_tokens >= 0, self.num_tokens
            if started:
                self._starts.append(_Start(self._clock(), num_tokens))

    def clear(self) -> None:
        """Nothing waits any more."""
        with self._lock:
            self.num_requests = self.num_tokens = self._num_untaken = 0

    def _check(self, num_tokens: int) -> None:
        if self.num_requests >= self.max_requests:
            excess = self.num_requests + 1 - self.max_requests
            raise QueueFull(
                f"{self.num_requests} requests are waiting; sched.max_waiting is {self.max_requests}; try again later",
                retry_after_s=self._seconds_for(excess, len(self._starts)),
            )
        if self.num_requests and self.num_tokens + num_tokens > self.max_tokens:
            excess = self.num_tokens + num_tokens - self.max_tokens
            raise QueueFull(
                f"{self.num_tokens} prompt tokens are waiting and this request has {num_tokens}; "
                f"sched.max_waiting_tokens is {self.max_tokens}; try again later",
                retry_after_s=self._seconds_for(excess, sum(start.num_tokens for start in self._starts)),
            )

    def _seconds_for(self, excess: int, started: int) -> float:
        """Until `excess` will have started, at the pace of the last starts."""
        if not self._starts:
            return _LEAST_S
        window_s = self._clock() - self._starts[0].at_s
        return min(max(excess * window_s / started, _LEAST_S), _MOST_S)


def deadline_error(request: Request, started: bool) -> DeadlineExceeded:
    """What the sender of a request is told that was not done in time."""
    has = "had begun to answer" if started else "was waiting"
    allowed_s = request.deadline_s - request.arrival_s
    shown_s = round(allowed_s, 2) or allowed_s  # what came by gRPC has lost a few milliseconds on its way
    return DeadlineExceeded(f"the request {has} when its {shown_s:.3g} s were over; allow more (timeout_s)")
