"""How a client goes on with a stream whose server, or router, is gone: `Retries`, and `Attempts` of one request.

The request is sent again with what the client has of its answer, under the same id and seed. Any server of the same
model answers the rest, so nothing is lost and nothing comes twice.
"""

import dataclasses
import logging
import random
import secrets
import threading
import time
import uuid

import grpc

from jaxserve.api import ResumeReason
from jaxserve.client.connection import RequestFailed, failure_of
from jaxserve.errors import ConfigError, DeadlineExceeded, EngineStopped, Status
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.received import Received

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often a lost call is sent again, and after how many seconds.

    Attributes:
      attempts: without a new token between them; 0 sends none again.
      first_wait_s: before the first of them. Each wait is twice as long as the one before, less up to half at random.
      longest_wait_s: no wait is longer, but for one that a full server asks for.
    """

    attempts: int = 8
    first_wait_s: float = 0.1
    longest_wait_s: float = 5.0

    def wait_s(self, num_failed: int) -> float:
        """Seconds before the next call, after so many that failed before the last one."""
        return min(self.first_wait_s * 2**num_failed, self.longest_wait_s) * random.uniform(0.5, 1.0)

    def __post_init__(self) -> None:
        if self.attempts < 0 or not 0 < self.first_wait_s <= self.longest_wait_s:
            raise ConfigError(f"{self} cannot be: attempts are 0 or more, and waits more than 0 and in order")


DEFAULT_RETRIES = Retries()


class Attempts:
    """The calls of one request. Mutated by its stream.

    Attributes:
      message: of the next call.
    """

    def __init__(
        self, message: pb.GenerateRequest, retries: Retries, timeout_s: float | None, reached: threading.Event
    ) -> None:
        """`timeout_s`: for all calls together. `reached`: of the client; a stream of it has been answered."""
        self.message = message
        self._retries = retries
        self._reached = reached
        self._received = Received(message)
        self._num_tokens = self._received.num_tokens  # at the last loss
        self._num_lost = 0  # calls since the last token
        self._cause = ""  # what ended the first of them
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        if retries.attempts:
            message.request_id = message.request_id or uuid.uuid4().hex
            if not message.sampling.HasField("seed"):
                message.sampling.seed = secrets.randbits(63)

    @property
    def left_s(self) -> float | None:
        """For the next call."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    def take(self, reply: pb.GenerateResponse) -> pb.GenerateResponse:
        """The message without what had come before. Raises RequestFailed when something is missing before it."""
        try:
            self._received.take(reply)
        except EngineStopped as error:
            raise RequestFailed(error.status, str(error)) from error
        self._reached.set()
        return reply

    def wait_after(self, error: grpc.RpcError) -> float | None:
        """Seconds until `message` is to be sent again; None: only the status of a whole answer was lost.

        Raises RequestFailed when nothing is sent again: with the error, and with what ended the stream in the first
        place where the error is that of a later call.
        """
        if self._received.complete:
            return None
        failure = failure_of(error)
        if self._received.num_tokens > self._num_tokens:
            self._num_lost, self._num_tokens = 0, self._received.num_tokens
        wait_s = self._wait_s(failure)
        if wait_s is None:
            if self._num_lost:
                text = f"{failure} (call {self._num_lost + 1} since the stream was lost: {self._cause})"
                failure = RequestFailed(
                    failure.status, text, retry_after_s=failure.retry_after_s, draining=failure.draining
                )
            raise failure from error
        if not self._num_lost:
            self._cause = str(failure)
        self._num_lost += 1
        if self._received.begun:
            logger.info("request %r lost its server after %d tokens", self.message.request_id, self._num_tokens)
        return wait_s

    def _wait_s(self, failure: RequestFailed) -> float | None:
        """None: the message is not sent again. One that never reached a server is not: its address is likely wrong."""
        lost = failure.status is Status.UNAVAILABLE and (self._received.begun or self._reached.is_set())
        full = failure.status is Status.OVERLOADED and self._received.begun
        if not (lost or full) or self._num_lost >= self._retries.attempts:
            return None
        wait_s = max(self._retries.wait_s(self._num_lost), failure.retry_after_s or 0.0)
        left_s = self.left_s
        if left_s is not None and left_s <= wait_s:
            return None
        try:
            reason = ResumeReason.DRAINED if failure.draining else ResumeReason.CLIENT
            self._received.go_on(self.message, reason, wait_s)
        except DeadlineExceeded:
            return None
        return wait_s
