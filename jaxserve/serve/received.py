"""`Received`: what has come of one `Generate` call, which with the request is the whole state of its stream.

A router and a client keep one for each call. When the server of the call is gone they send the request again, with what
they have in its field `resume`.
"""

import collections
import time

from jaxserve.api import Known, Resume, ResumeReason
from jaxserve.errors import DeadlineExceeded, EngineStopped
from jaxserve.serve.convert import resume_to_proto
from jaxserve.serve.gen import inference_pb2 as pb


class _Part:
    """One sequence so far."""

    __slots__ = ("finished", "num_chars", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.num_chars = 0
        self.finished = False


class Received:
    """The messages of one request, from however many calls. Mutated by its receiver.

    Attributes:
      begun: a message has come.
      num_tokens: of all sequences.
    """

    def __init__(self, request: pb.GenerateRequest) -> None:
        """`request` has come or is made now; it may itself be a resumed one."""
        self.begun = False
        self._count = max(request.sampling.n, 1)  # not checked by a server yet, so nothing is made for each
        self._parts: collections.defaultdict[int, _Part] = collections.defaultdict(_Part)
        self._arrived_s = time.monotonic()
        self._age_s = request.resume.age_s  # when it came here
        self._timeout_s = request.timeout_s if request.HasField("timeout_s") else None
        for index, one in enumerate(request.resume.sequences):
            part = self._parts[index]
            part.token_ids += one.token_ids
            part.num_chars, part.finished = one.text_len, one.finished
        self.num_tokens = sum(len(part.token_ids) for part in self._parts.values())
        self._num_cached_tokens = 0

    @property
    def complete(self) -> bool:
        """Every sequence has ended."""
        return len(self._parts) == self._count and all(part.finished for part in self._parts.values())

    @property
    def open_indices(self) -> list[int]:
        """The sequences that have not ended; of a request that has not begun, those that it named, or the first."""
        count = self._count if self.begun else max(len(self._parts), 1)
        return [index for index in range(count) if not self._parts[index].finished]

    def offsets(self, index: int) -> tuple[int, int]:
        """Tokens and characters that have come of a sequence."""
        part = self._parts[index]
        return len(part.token_ids), part.num_chars

    def take(self, reply: pb.GenerateResponse) -> None:
        """Counts a message, and cuts from it what had come before. Raises EngineStopped when something is missing."""
        part = self._parts[reply.index]
        self._cut(reply, part)
        part.token_ids += reply.token_ids
        part.num_chars += len(reply.text)
        part.finished |= reply.finish_reason != pb.FINISH_REASON_UNSPECIFIED
        self.num_tokens += len(reply.token_ids)
        if not self.begun:
            self._num_cached_tokens = reply.prompt.num_cached_tokens
        else:  # a resumed call tells of the prompt once more, and of pages that the first server did not have
            reply.ClearField("prompt")
            if reply.HasField("usage"):
                reply.usage.num_cached_tokens = self._num_cached_tokens
        self.begun = True

    def go_on(self, request: pb.GenerateRequest, reason: ResumeReason, wait_s: float = 0.0) -> None:
        """Makes the request one for what has not come, to be sent again in `wait_s` seconds.

        Raises DeadlineExceeded when its own `timeout_s`, which counts from its arrival here, is over by then.
        """
        given_s, passed_s = self._timeout_s, time.monotonic() - self._arrived_s + wait_s
        if given_s is not None and given_s > 0:  # an invalid one is for a server to refuse
            left_s = given_s - passed_s
            if left_s <= 0:
                raise DeadlineExceeded(f"the {given_s:g} s of the request are over, and its server is gone; allow more")
            request.timeout_s = left_s
        if self.begun:
            parts = map(self._parts.__getitem__, range(self._count))
            known = tuple(Known(tuple(part.token_ids), part.num_chars, part.finished) for part in parts)
            resume = Resume(sequences=known, reason=reason, age_s=self._age_s + passed_s)
            request.resume.CopyFrom(resume_to_proto(resume))

    def _cut(self, reply: pb.GenerateResponse, part: _Part) -> None:
        """A server of an older version tells no offsets, and resumes nothing."""
        if reply.HasField("token_offset") and (excess := len(part.token_ids) - reply.token_offset):
            self._check(excess, "tokens", reply)
            del reply.token_ids[:excess]
            del reply.logprobs[:excess]
            reply.token_offset += excess
        if reply.HasField("text_offset") and (excess := part.num_chars - reply.text_offset):
            self._check(excess, "characters", reply)
            reply.text = reply.text[excess:]
            reply.text_offset += excess

    def _check(self, excess: int, what: str, reply: pb.GenerateResponse) -> None:
        if excess < 0:
            raise EngineStopped(
                f"{-excess} {what} of sequence {reply.index} are missing in the stream of request {reply.request_id!r}"
            )
