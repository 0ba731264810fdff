"""How a client goes on with a stream whose server, or router, is gone: `Retries`, and `Attempts` of one request.

The request is sent again with what the client has of its answer, under the same id and seed. Any server of the same
model answers the rest, so nothing is lost and nothing comes twice.
"""

import dataclasses
import logging
import random
import secrets
import time
import uuid

import grpc

from jaxserve.api import ResumeReason
from jaxserve.errors import ConfigError
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.received import Received

logger = logging.getLogger(__name__)

_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often a lost call is sent again, and after how many seconds.

    Attributes:
      attempts: without a new token between them; 0 sends none again.
      first_wait_s: before the first of them. Each wait is twice as long as the one before, less up to half at random.
      longest_wait_s: no wait is longer.
    """

    attempts: int = 8
    first_wait_s: float = 0.1
    longest_wait_s: float = 5.0

    def __post_init__(self) -> None:
        if self.attempts < 0 or not 0 < self.first_wait_s <= self.longest_wait_s:
            raise ConfigError(f"{self} cannot be: attempts are 0 or more, and waits more than 0 and in order")


DEFAULT_RETRIES = Retries()


class Attempts:
    """The calls of one request. Mutated by its stream.

    Attributes:
      message: of the next call.
    """

    def __init__(self, message: pb.GenerateRequest, retries: Retries, timeout_s: float | None) -> None:
        """`timeout_s`: for all calls together."""
        self.message = message
        self._retries = retries
        self._received = Received(message.sampling.n, message.resume.sequences)
        self._num_tokens = self._received.num_tokens  # at the last loss
        self._num_lost = 0  # calls since the last token
        self._begun_s = time.monotonic()
        self._deadline_s = None if timeout_s is None else self._begun_s + timeout_s
        self._own_s = message.timeout_s if message.HasField("timeout_s") else None
        if retries.attempts:
            message.request_id = message.request_id or uuid.uuid4().hex
            if not message.sampling.HasField("seed"):
                message.sampling.seed = secrets.randbits(63)

    @property
    def left_s(self) -> float | None:
        """For the next call."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    @property
    def begun(self) -> bool:
        """A message has come."""
        return self._received.begun

    def take(self, reply: pb.GenerateResponse) -> pb.GenerateResponse:
        """The message without what had come before."""
        self._received.take(reply)
        return reply

    def wait_after(self, code: grpc.StatusCode, retry_after_s: float | None, reached: bool) -> float | None:
        """Seconds until `message` is to be sent again; None: the error is the answer.

        `reached`: the server has answered this client before. A call to one that never did is not repeated, since its
        address is likely wrong.
        """
        if code not in _LOST or not (self.begun or (reached and code is grpc.StatusCode.UNAVAILABLE)):
            return None
        if self._received.num_tokens > self._num_tokens:
            self._num_lost, self._num_tokens = 0, self._received.num_tokens
        if self._num_lost >= self._retries.attempts:
            return None
        wait_s = min(self._retries.first_wait_s * 2**self._num_lost, self._retries.longest_wait_s)
        wait_s = max(wait_s * random.uniform(0.5, 1.0), retry_after_s or 0.0)
        self._num_lost += 1
        left_s = self.left_s
        if left_s is not None and left_s <= wait_s:
            return None
        if self._own_s is not None:
            self.message.timeout_s = self._own_s - (time.monotonic() - self._begun_s) - wait_s
            if self.message.timeout_s <= 0:
                return None
        if self.begun:
            logger.info("request %r lost its server after %d tokens", self.message.request_id, self._num_tokens)
            self.message.resume.CopyFrom(self._received.resume(ResumeReason.CLIENT))
        return wait_s

    @property
    def complete(self) -> bool:
        """All that was missing is the status."""
        return self._received.complete
