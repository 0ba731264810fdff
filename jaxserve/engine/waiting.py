"""The bound on waiting requests, and the estimate of when a refused client should try again.

It counts the sequences that have no token yet, in the inbox or in the scheduler. Sequences are counted, not requests,
since each of the n that a request asks for has a text, a place in the queue and a copy of the prompt: a call of a few
kilobytes can ask for millions. Tokens are bounded as well, since memory and waiting time follow the tokens: a thousand
chats are less work than ten books. Each amount is counted by the owners of the requests, which share it as `SharedRoom`
has it: one who fills the queue leaves a part of it for others.
"""

import collections
import math
import threading
from collections.abc import Callable
from typing import NamedTuple

from jaxserve.api import Request
from jaxserve.engine.load import NOTHING_PENDING, Load, Pending
from jaxserve.engine.shared_room import SharedRoom
from jaxserve.errors import DeadlineExceeded, QueueFull

_WINDOW = 64  # starts from which the pace is estimated
_LEAST_S, _MOST_S = 1.0, 60.0  # sooner, many clients would come back at once; later would be a guess


class _Start(NamedTuple):
    at_s: float
    num_tokens: int


class Waiting:
    """Mutated by any thread, under a lock of its own.

    Args:
      max_sequences, max_tokens, max_picture_bytes: more is refused, but for the part of owners that have little. One
        request may exceed any of them when nothing waits, as it could never run otherwise.
      clock: seconds, monotonic.

    Attributes:
      sheds: new requests are refused while others wait, see `ladder.Rung`. Set by the loop.
      num_requests: requests of which no sequence has a token yet.
    """

    def __init__(
        self,
        max_sequences: int,
        max_tokens: int,
        clock: Callable[[], float],
        max_picture_bytes: int = 2**30,
    ) -> None:
        self.sheds = False
        self.num_requests = 0
        self._sequences: SharedRoom[str] = SharedRoom(max_sequences)
        self._tokens: SharedRoom[str] = SharedRoom(max_tokens)
        self._picture_bytes: SharedRoom[str] = SharedRoom(max_picture_bytes)
        self._num_untaken = 0  # requests that are still in the inbox
        self._clock = clock
        self._starts: collections.deque[_Start] = collections.deque(maxlen=_WINDOW)
        self._lock = threading.Lock()

    @property
    def num_sequences(self) -> int:
        """Sequences that have no token yet."""
        return self._sequences.total

    @property
    def num_tokens(self) -> int:
        """Of the prompts of these sequences; a prompt counts for each of them."""
        return self._tokens.total

    @property
    def num_picture_bytes(self) -> int:
        """Of the pixels of these requests."""
        return self._picture_bytes.total

    def load(self, num_live: int) -> Load:
        """`num_live`: requests that the loop has taken."""
        running = max(0, num_live - (self.num_requests - self._num_untaken))
        return Load(running, self.num_sequences, self.num_tokens, self._sequences.most, self._tokens.most)

    def check_room(self, num_sequences: int, owner: str, pending: Pending = NOTHING_PENDING) -> None:
        """Raises QueueFull when these sequences would be refused now. Counts nothing.

        `pending`: sequences by owner that are about to enter, and count as if they waited.
        """
        with self._lock:
            self._check_sequences(num_sequences, owner, pending)

    def enter(self, request: Request, *, bounded: bool = True) -> None:
        """Counts a request. Raises QueueFull, unless not `bounded`, when there is no room for it."""
        owner, count = request.owner, len(request.open_indices)
        num_tokens, picture_bytes = _num_tokens(request), _picture_bytes(request)
        with self._lock:
            if bounded and self.num_sequences:
                if self.sheds and request.resume is None:  # one that began elsewhere has been accepted there
                    raise QueueFull(
                        f"the server is overloaded, and {self.num_sequences} sequences wait; it takes no new requests "
                        "before they run (degradation: refuse); try again later",
                        retry_after_s=self._seconds_for(self.num_sequences, len(self._starts)),
                    )
                self._check_sequences(count, owner, NOTHING_PENDING)
                self._check_tokens(num_tokens, owner)
                self._check_pictures(picture_bytes, owner)
            self._sequences.enter(owner, count, at_any_rate=True)
            self._tokens.enter(owner, num_tokens, at_any_rate=True)
            self._picture_bytes.enter(owner, picture_bytes, at_any_rate=True)
            self.num_requests += 1
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
            self.num_requests = self._num_untaken = 0
            for room in (self._sequences, self._tokens, self._picture_bytes):
                room.clear()

    def _subtract(self, request: Request, num_sequences: int, first: bool) -> None:
        self.num_requests -= first
        if first:
            self._picture_bytes.leave(request.owner, _picture_bytes(request))
        self._sequences.leave(request.owner, num_sequences)
        self._tokens.leave(request.owner, num_sequences * len(request.prompt_token_ids))
        assert self.num_requests >= 0, self.num_requests

    def _check_sequences(self, count: int, owner: str, pending: Pending) -> None:
        lacking = self._sequences.lacking(owner, count, pending)
        if lacking:
            raise queue_full(
                "sequences are waiting",
                f"{count} more are asked for",
                "sched.max_waiting",
                self._sequences,
                owner,
                pending,
                retry_after_s=self._seconds_for(lacking, len(self._starts)),
            )

    def _check_tokens(self, num_tokens: int, owner: str) -> None:
        lacking = self._tokens.lacking(owner, num_tokens)
        if lacking:
            raise queue_full(
                "prompt tokens are waiting",
                f"this request has {num_tokens}",
                "sched.max_waiting_tokens",
                self._tokens,
                owner,
                retry_after_s=self._seconds_for(lacking, sum(start.num_tokens for start in self._starts)),
            )

    def _check_pictures(self, num_bytes: int, owner: str) -> None:
        if num_bytes and self._picture_bytes.lacking(owner, num_bytes):
            raise queue_full(
                "bytes of pictures are waiting",
                f"those of this request have {num_bytes}",
                "vision.max_waiting_bytes",
                self._picture_bytes,
                owner,
                retry_after_s=self._seconds_for(1, len(self._starts)),
            )

    def _seconds_for(self, excess: int, started: int) -> float:
        """Seconds until `excess` sequences will have started, at the pace of the last starts."""
        if not self._starts:
            return _LEAST_S
        window_s = self._clock() - self._starts[0].at_s
        return min(max(excess * window_s / started, _LEAST_S), _MOST_S)


def queue_full(
    what: str,
    asked: str,
    setting: str,
    room: SharedRoom[str],
    owner: str,
    pending: Pending = NOTHING_PENDING,
    *,
    retry_after_s: float,
) -> QueueFull:
    """The error for an owner that a room has no more for, with the figures of this owner and those of all.

    `what`: waits there, with a verb; `asked`: what there is no room for; `setting`: the name of the room's limit.
    """
    total = room.total + sum(pending.values())
    limit, again = f"{setting} is {room.most}", f"try again in {math.ceil(retry_after_s)} s"
    if not owner:  # stands for all callers that are not told apart: the figures of all are all there is to say
        return QueueFull(f"{total} {what} and {asked}; {limit}; {again}", retry_after_s=retry_after_s)
    own = room.held(owner) + pending.get(owner, 0)
    return QueueFull(
        f"{total} {what}, {own} of them yours, and {asked}; {limit}, and while it is full a caller may have "
        f"{room.part(owner, pending)}; {again}",
        retry_after_s=retry_after_s,
    )


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
