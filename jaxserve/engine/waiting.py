"""The bound on waiting requests, and the estimate of when a refused client should try again.

It counts the sequences that have no token yet, in the inbox or in the scheduler. Sequences are counted, not requests,
since each of the n that a request asks for has a text, a place in the queue and a copy of the prompt: a call of a few
kilobytes can ask for millions. Tokens are bounded as well, since memory and waiting time follow the tokens: a thousand
chats are less work than ten books.
"""

import collections
import threading
from collections.abc import Callable
from typing import NamedTuple

from jaxserve.api import Request
from jaxserve.engine.base import Load
from jaxserve.errors import DeadlineExceeded, QueueFull

_WINDOW = 64  # starts from which the pace is estimated
_LEAST_S, _MOST_S = 1.0, 60.0  # sooner, many clients would come back at once; later would be a guess


class _Start(NamedTuple):
    at_s: float
    num_tokens: int


class Waiting:
    """Mutated by any thread, under a lock of its own.

    Args:
      max_sequences, max_tokens, max_picture_bytes: more is refused. One request may exceed any of them when nothing
        waits, as it could never run otherwise.
      clock: seconds, monotonic.

    Attributes:
      sheds: new requests are refused while others wait, see `ladder.Rung`. Set by the loop.
      num_requests: requests of which no sequence has a token yet.
      num_sequences: sequences that have no token yet.
      num_tokens: of the prompts of these sequences; a prompt counts for each of them.
      num_picture_bytes: of the pixels of these requests.
    """

    def __init__(
        self,
        max_sequences: int,
        max_tokens: int,
        clock: Callable[[], float],
        max_picture_bytes: int = 2**30,
    ) -> None:
        self.max_sequences = max_sequences
        self.max_tokens = max_tokens
        self.sheds = False
        self.max_picture_bytes = max_picture_bytes
        self.num_picture_bytes = 0
        self.num_requests = 0
        self.num_sequences = 0
        self.num_tokens = 0
        self._num_untaken = 0  # requests that are still in the inbox
        self._clock = clock
        self._starts: collections.deque[_Start] = collections.deque(maxlen=_WINDOW)
        self._lock = threading.Lock()

    def load(self, num_live: int) -> Load:
        """`num_live`: requests that the loop has taken."""
        running = max(0, num_live - (self.num_requests - self._num_untaken))
        return Load(running, self.num_sequences, self.num_tokens, self.max_sequences, self.max_tokens)

    def check_room(self, num_sequences: int) -> None:
        """Raises QueueFull when these sequences would be refused now. Counts nothing."""
        with self._lock:
            self._check_sequences(num_sequences)

    def enter(self, request: Request, *, bounded: bool = True) -> None:
        """Counts a request. Raises QueueFull, unless not `bounded`, when there is no room for it."""
        count, num_tokens = len(request.open_indices), _num_tokens(request)
        with self._lock:
            if bounded and self.num_sequences:
                if self.sheds and request.resume is None:  # one that began elsewhere has been accepted there
                    raise QueueFull(
                        f"the server is overloaded, and {self.num_sequences} sequences wait; it takes no new requests "
                        "before they run (degradation: refuse); try again later",
                        retry_after_s=self._seconds_for(self.num_sequences, len(self._starts)),
                    )
                self._check_sequences(count)
                self._check_tokens(num_tokens)
                self._check_pictures(_picture_bytes(request))
            self.num_picture_bytes += _picture_bytes(request)
            self.num_requests += 1
            self.num_sequences += count
            self.num_tokens += num_tokens
            self._num_untaken += 1

    def take(self) -> None:
        """The loop has taken a request out of its inbox; the request still waits."""
        with self._lock:
            self._num_untaken -= 1

    def begin(self, request: Request, *, first: bool) -> None:
        """One sequence has its first token; `first`: no other of its request has one."""
        with self._lock:
            self._subtract(request, 1, first)
            self._starts.append(_Start(self._clock(), len(request.prompt_token_ids)))

    def leave(self, request: Request, num_sequences: int, *, first: bool) -> None:
        """So many sequences have ended without a token; `first`: no other of their request has one."""
        with self._lock:
            self._subtract(request, num_sequences, first)

    def clear(self) -> None:
        """Nothing waits any more."""
        with self._lock:
            self.num_requests = self.num_sequences = self.num_tokens = self._num_untaken = 0
            self.num_picture_bytes = 0

    def _subtract(self, request: Request, num_sequences: int, first: bool) -> None:
        self.num_requests -= first
        if first:
            self.num_picture_bytes -= _picture_bytes(request)
        self.num_sequences -= num_sequences
        self.num_tokens -= num_sequences * len(request.prompt_token_ids)
        assert self.num_requests >= 0, self.num_requests
        assert self.num_sequences >= 0, self.num_sequences
        assert self.num_tokens >= 0, self.num_tokens
        assert self.num_picture_bytes >= 0, self.num_picture_bytes

    def _check_sequences(self, count: int) -> None:
        excess = self.num_sequences + count - self.max_sequences
        if excess > 0:
            raise QueueFull(
                f"{self.num_sequences} sequences are waiting and {count} more are asked for; sched.max_waiting is "
                f"{self.max_sequences}; try again later",
                retry_after_s=self._seconds_for(excess, len(self._starts)),
            )

    def _check_tokens(self, num_tokens: int) -> None:
        excess = self.num_tokens + num_tokens - self.max_tokens
        if excess > 0:
            raise QueueFull(
                f"{self.num_tokens} prompt tokens are waiting and this request has {num_tokens}; "
                f"sched.max_waiting_tokens is {self.max_tokens}; try again later",
                retry_after_s=self._seconds_for(excess, sum(start.num_tokens for start in self._starts)),
            )

    def _check_pictures(self, num_bytes: int) -> None:
        if num_bytes and self.num_picture_bytes + num_bytes > self.max_picture_bytes:
            raise QueueFull(
                f"pictures of {self.num_picture_bytes} bytes are waiting and those of this request have {num_bytes}; "
                f"vision.max_waiting_bytes is {self.max_picture_bytes}; try again later",
                retry_after_s=self._seconds_for(1, len(self._starts)),
            )

    def _seconds_for(self, excess: int, started: int) -> float:
        """Seconds until `excess` sequences will have started, at the pace of the last starts."""
        if not self._starts:
            return _LEAST_S
        window_s = self._clock() - self._starts[0].at_s
        return min(max(excess * window_s / started, _LEAST_S), _MOST_S)


def _num_tokens(request: Request) -> int:
    return len(request.open_indices) * len(request.prompt_token_ids)


def _picture_bytes(request: Request) -> int:
    return sum(len(placed.picture.pixels) for placed in request.pictures)


def deadline_error(request: Request, started: bool) -> DeadlineExceeded:
    """The error for a request that has passed its deadline."""
    has = "had begun to answer" if started else "was waiting"
    allowed_s = request.deadline_s - request.arrival_s
    shown_s = round(allowed_s, 2) or allowed_s  # a timeout that came by gRPC is a few milliseconds short
    return DeadlineExceeded(f"the request {has} when its {shown_s:.3g} s were over; allow more (timeout_s)")
