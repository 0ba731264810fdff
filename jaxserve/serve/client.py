"""A small client of the gRPC service, blocking and asyncio.

Owns the way from `SamplingParams` to a call and back. Refuses retries and balancing: a streamed answer cannot be taken
back once a part of it was shown, so only the caller knows what may be sent again. Loads nothing of the engine.

    with Client("127.0.0.1:8500") as client:
        for reply in client.generate("Once upon a time", SamplingParams(max_tokens=64)):
            print(reply.text, end="", flush=True)

A prompt is text, a list of token ids, or a list of chat messages `{"role": ..., "content": ...}`. What is neither
prompt nor sampling goes into `CallOptions(request_id="mine", echo=True)`. Leaving the iterator early cancels the call
and frees its memory on the server.
"""

import contextlib
from collections.abc import AsyncGenerator, Generator
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.api import SamplingParams
from jaxserve.errors import JaxserveError, Status
from jaxserve.serve.completion import Completion, collect_replies
from jaxserve.serve.convert import NO_OPTIONS, CallOptions, ClientPrompt, request_to_proto
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.gen import inference_pb2_grpc as pb_grpc
from jaxserve.serve.status import status_of_grpc

_OPTIONS = (("grpc.max_receive_message_length", -1),)  # prompt log-probabilities exceed gRPC's default of 4 MiB


class RequestFailed(JaxserveError):
    """The call ended without an answer. `status` says of which kind; the text is the server's."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """Blocking client. May be used from several threads."""

    def __init__(self, address: str) -> None:
        """`address` is `host:port`. Nothing is connected before the first call."""
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._stub = pb_grpc.InferenceStub(self._channel)

    def generate(
        self,
        prompt: ClientPrompt,
        sampling: SamplingParams,
        options: CallOptions = NO_OPTIONS,
        *,
        timeout_s: float | None = None,
    ) -> Generator[pb.GenerateResponse, None, None]:
        """Yields the messages of the server as they come.

        `timeout_s` ends the request on the server too. Raises RequestFailed, or InvalidRequest for what cannot even
        be sent.
        """
        call = self._stub.Generate(request_to_proto(prompt, sampling, options), timeout=timeout_s)
        try:
            yield from call
        except grpc.RpcError as error:
            raise _failed(error) from error
        finally:
            call.cancel()

    def complete(
        self,
        prompt: ClientPrompt,
        sampling: SamplingParams,
        options: CallOptions = NO_OPTIONS,
        *,
        timeout_s: float | None = None,
    ) -> Completion:
        """The whole answer. Raises as `generate` does."""
        return collect_replies(list(self.generate(prompt, sampling, options, timeout_s=timeout_s)))

    def is_serving(self, service: str = "", *, timeout_s: float = 5.0, wait_for_ready: bool = False) -> bool:
        """Asks the server's health. False when it says NOT_SERVING or does not answer.

        `service` is a name of the health service: "" is the whole server, "live" whether its process is worth keeping.
        `wait_for_ready` waits for a server that is still starting, up to `timeout_s`.
        """
        stub: Any = health_pb2_grpc.HealthStub(self._channel)  # the package has no types
        try:
            reply = stub.Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s, wait_for_ready=wait_for_ready
            )
        except grpc.RpcError:
            return False
        return reply.status == health_pb2.HealthCheckResponse.SERVING

    def close(self) -> None:
        """Cancels what is running."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class AsyncClient:
    """The same for asyncio. Belongs to the event loop on which it was made."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub = pb_grpc.InferenceStub(self._channel)

    async def generate(
        self,
        prompt: ClientPrompt,
        sampling: SamplingParams,
        options: CallOptions = NO_OPTIONS,
        *,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """See `Client.generate`. Leave early through `contextlib.aclosing`, so that the call ends at once."""
        call = self._stub.Generate(request_to_proto(prompt, sampling, options), timeout=timeout_s)
        try:
            async for reply in call:
                yield reply
        except grpc.RpcError as error:
            raise _failed(error) from error
        finally:
            call.cancel()

    async def complete(
        self,
        prompt: ClientPrompt,
        sampling: SamplingParams,
        options: CallOptions = NO_OPTIONS,
        *,
        timeout_s: float | None = None,
    ) -> Completion:
        """See `Client.complete`."""
        replies = self.generate(prompt, sampling, options, timeout_s=timeout_s)
        async with contextlib.aclosing(replies):
            return collect_replies([reply async for reply in replies])

    async def is_serving(self, service: str = "", *, timeout_s: float = 5.0, wait_for_ready: bool = False) -> bool:
        """See `Client.is_serving`."""
        stub: Any = health_pb2_grpc.HealthStub(self._channel)  # the package has no types
        try:
            reply = await stub.Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s, wait_for_ready=wait_for_ready
            )
        except grpc.RpcError:
            return False
        return reply.status == health_pb2.HealthCheckResponse.SERVING

    async def close(self) -> None:
        """Cancels what is running."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


def _failed(error: grpc.RpcError) -> RequestFailed:
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError), f"an error without a status: {error!r}"
    return RequestFailed(status_of_grpc(error.code()), error.details() or str(error.code()))
