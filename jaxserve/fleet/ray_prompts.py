"""How an ingress asks the replicas that compute prompts: `PromptServers` (`serve.route_apart`) by Ray's calls.

Ray chooses the replica (`ray_router`), and holds a call for as long as there is none. A request must not wait for that:
its prompt is then computed where it is answered.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.handle import DeploymentHandle

from jaxserve.errors import Status
from jaxserve.fleet.messages import Accepted, Refusal
from jaxserve.routing import PromptKey
from jaxserve.serve.gen import handoff_pb2 as handoff_pb
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.route_apart import Missed

logger = logging.getLogger(__name__)

_TAKE_S = 2.0  # for a replica to take a call
_ABSENT_S = 5.0  # for which none is asked after that
_NOBODY = "that computes prompts"
# Another replica may do what one that says so does not.
_ELSEWHERE = (Status.UNAVAILABLE, Status.OVERLOADED, Status.DEADLINE)


class FleetPrompts:
    """The replicas of the deployment `Prefill`. Used on one event loop."""

    def __init__(self, engines: DeploymentHandle) -> None:
        self._prefill = engines.options(method_name="prefill", stream=True)
        self._absent_until_s = 0.0

    async def compute(
        self, request: pb.GenerateRequest, key: PromptKey, tried: Sequence[str], timeout_s: float
    ) -> bytes | Missed | None:
        """See `PromptServers`."""
        now_s = asyncio.get_running_loop().time
        if now_s() < self._absent_until_s:
            return None
        stream: Any = self._prefill.remote(request.SerializeToString(), prompt_key=key, avoid=tuple(tried))
        name, ended = _NOBODY, False
        try:
            async with asyncio.timeout(_TAKE_S) as limit:
                async for item in stream:
                    if isinstance(item, Accepted):
                        name = item.replica
                        if name in tried:
                            return None  # there is no other
                        limit.reschedule(now_s() + timeout_s)
                        continue
                    ended = True
                    if not isinstance(item, Refusal):
                        return handoff_pb.PrefillResponse.FromString(item).ticket
                    gone = item.status is Status.UNAVAILABLE
                    return Missed(name, item.text, gone, item.drained, item.status in _ELSEWHERE)
            ended = True
            return Missed(name, "it has ended without an answer", gone=True, drained=False, elsewhere=True)
        except TimeoutError:
            taken = name is not _NOBODY
            if not taken:
                self._absent_until_s = now_s() + _ABSENT_S
            reason = f"it took more than {timeout_s:g} s" if taken else f"none took it within {_TAKE_S:g} s"
            return Missed(name, reason, gone=False, drained=False, elsewhere=taken)
        except TaskCancelledError:
            raise  # the client is gone
        except RayTaskError as error:  # a defect, which another replica would have too
            logger.exception("replica %s could not compute a prompt", name)
            return Missed(name, type(error).__name__, gone=False, drained=False, elsewhere=False)
        except RayError as error:
            ended = True
            return Missed(name, f"it is lost: {error}", gone=True, drained=False, elsewhere=True)
        finally:
            if not ended:  # nobody waits for it any more
                stream.cancel()
