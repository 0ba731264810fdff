"""When a prompt is computed on one server before another answers it, and what follows when that fails.

The servers that compute prompts are a `PromptServers`: a router asks them over gRPC (`route_prompts`), the ingress of a
fleet on Ray by Ray's calls (`fleet.ray_prompts`). Nothing here can lose a request: whatever fails, the server that
answers computes the prompt itself.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self

from jaxserve.config.schema import RouteConfig
from jaxserve.routing import PromptKey
from jaxserve.serve.gen import inference_pb2 as pb

logger = logging.getLogger(__name__)

_TEXT_BYTES = 4  # of a token, about


class Missed(NamedTuple):
    """A server that was asked for a prompt and has not computed it.

    Attributes:
      name: of the server, such as its address.
      reason: for logs.
      gone: it has died, or ends.
      drained: it ends in order.
      elsewhere: another server may do what this one does not.
    """

    name: str
    reason: str
    gone: bool
    drained: bool
    elsewhere: bool


class PromptServers(Protocol):
    """The servers that compute prompts for others. Used on one event loop."""

    async def compute(
        self, request: pb.GenerateRequest, key: PromptKey, tried: Sequence[str], timeout_s: float
    ) -> bytes | Missed | None:
        """Has the prompt of a request computed by a server that is not in `tried`, within `timeout_s` seconds.

        Returns the ticket, which is empty when nothing is lent; why there is none; or None when no server is left.
        """
        ...


class Apart(NamedTuple):
    """When prompts are computed elsewhere, and how long that may take; the fields of `route:`."""

    prefill_above: int
    timeout_s: float
    retries: int

    @classmethod
    def of(cls, config: RouteConfig) -> Self:
        return cls(config.prefill_above, config.prefill_timeout_s, config.retries)

    def is_worth(self, request: pb.GenerateRequest) -> bool:
        """Whether the prompt is long, as far as that can be known without a tokenizer, and nothing has begun."""
        if request.HasField("resume") or request.ticket or request.sampling.HasField("prompt_logprobs"):
            return False
        if request.pictures or any(m.pictures for m in request.chat.messages):
            return False
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            return len(request.token_ids.ids) > self.prefill_above
        texts = [m.content for m in request.chat.messages] if kind == "chat" else [request.text]
        return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) > _TEXT_BYTES * self.prefill_above

    async def prepare(
        self,
        servers: PromptServers,
        request: pb.GenerateRequest,
        key: PromptKey,
        answering: str,
        time_left: Callable[[], float | None],
        note_death: Callable[[Missed], bool],
    ) -> None:
        """Puts a ticket into the request, if a server computes its prompt.

        Args:
          answering: the server that has room for the request, and is not asked.
          time_left: seconds until the deadline of the call, None without one.
          note_death: gets each server that is gone while it computes the prompt; returns whether to try no other.
        """
        tried = [answering]
        for _ in range(self.retries + 1):
            left_s = time_left()
            timeout_s = self.timeout_s if left_s is None else min(left_s, self.timeout_s)
            outcome = await servers.compute(request, key, tried, timeout_s)
            if outcome is None:
                return
            if isinstance(outcome, bytes):
                request.ticket = outcome
                return
            logger.info("replica %s does not compute a prompt: %s", outcome.name, outcome.reason)
            if outcome.gone and note_death(outcome):
                return
            if not outcome.elsewhere:
                return  # the server that answers will say what is wrong with the request
            tried.append(outcome.name)
