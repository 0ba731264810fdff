"""`AsyncClient`: the client for asyncio, with the methods of `blocking.Client` as coroutines."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.api import SamplingParams
from jaxserve.client.completion import Completion, collect_replies
from jaxserve.client.connection import CHANNEL_OPTIONS, RequestFailed, Tls, failure_of, metadata_of
from jaxserve.client.resuming import DEFAULT_RETRIES, Attempts, Retries
from jaxserve.client.values import (
    ServerAdapter,
    ServerLoad,
    ServerModel,
    adapter_from_proto,
    load_from_proto,
    model_from_proto,
)
from jaxserve.serve.convert import (
    NO_OPTIONS,
    CallOptions,
    ClientPrompt,
    detokenize_to_proto,
    request_to_proto,
    tokenize_to_proto,
)
from jaxserve.serve.gen import admin_pb2 as admin_pb
from jaxserve.serve.gen import admin_pb2_grpc as admin_grpc
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.gen import inference_pb2_grpc as pb_grpc

Reply = TypeVar("Reply", bound=Message)

_SHORT_S = 30.0  # for calls that compute nothing
_LOAD_S = 300.0  # for calls that read files


class AsyncClient:
    """The client for asyncio. Belongs to the event loop on which it was made. Raises as `Client` does."""

    def __init__(
        self, address: str, *, tls: Tls | None = None, token: str | None = None, retries: Retries = DEFAULT_RETRIES
    ) -> None:
        """See `Client`."""
        self._metadata = metadata_of(token)
        self._retries = retries
        self._reached = threading.Event()  # a stream of this client has been answered
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            options = (*CHANNEL_OPTIONS, *tls.options())
            self._channel = grpc.aio.secure_channel(address, tls.credentials(), options=options)
        self._stub = pb_grpc.InferenceStub(self._channel)
        self._admin = admin_grpc.AdminStub(self._channel)

    async def generate(
        self,
        prompt: ClientPrompt,
        sampling: SamplingParams,
        options: CallOptions = NO_OPTIONS,
        *,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """See `Client.generate`. Leave early through `contextlib.aclosing`, so that the call ends at once."""
        attempts = Attempts(request_to_proto(prompt, sampling, options), self._retries, timeout_s, self._reached)
        while True:
            call = self._stub.Generate(attempts.message, timeout=attempts.left_s, metadata=self._metadata)
            try:
                async for reply in call:
                    yield attempts.take(reply)
                return
            except grpc.RpcError as error:
                wait_s = attempts.wait_after(error)
            finally:
                call.cancel()
            if wait_s is None:
                return
            await asyncio.sleep(wait_s)

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

    async def tokenize(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        add_special_tokens: bool | None = None,
        timeout_s: float = _SHORT_S,
    ) -> tuple[int, ...]:
        """See `Client.tokenize`."""
        message = tokenize_to_proto(prompt, add_special_tokens)
        return tuple((await self._ask(self._stub.Tokenize, message, timeout_s)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, timeout_s: float = _SHORT_S
    ) -> str:
        """See `Client.detokenize`."""
        message = detokenize_to_proto(token_ids, skip_special_tokens)
        return (await self._ask(self._stub.Detokenize, message, timeout_s)).text

    async def model(self, *, timeout_s: float = _SHORT_S) -> ServerModel:
        """See `Client.model`."""
        return model_from_proto(await self._ask(self._stub.GetModel, pb.GetModelRequest(), timeout_s))

    async def load(self, *, timeout_s: float = _SHORT_S) -> ServerLoad:
        """See `Client.load`."""
        return load_from_proto(await self._ask(self._stub.GetLoad, pb.GetLoadRequest(), timeout_s))

    async def abort(self, *request_ids: str, timeout_s: float = _SHORT_S) -> None:
        """See `Client.abort`."""
        await self._ask(self._stub.Abort, pb.AbortRequest(request_ids=request_ids), timeout_s)

    async def load_adapter(
        self, name: str, path: str, *, replace: bool = False, timeout_s: float = _LOAD_S
    ) -> ServerAdapter:
        """See `Client.load_adapter`."""
        message = admin_pb.LoadAdapterRequest(name=name, path=path, replace=replace)
        return adapter_from_proto(await self._ask(self._admin.LoadAdapter, message, timeout_s))

    async def unload_adapter(self, name: str, *, timeout_s: float = _SHORT_S) -> None:
        """See `Client.unload_adapter`."""
        await self._ask(self._admin.UnloadAdapter, admin_pb.UnloadAdapterRequest(name=name), timeout_s)

    async def adapters(self, *, timeout_s: float = _SHORT_S) -> tuple[ServerAdapter, ...]:
        """See `Client.adapters`."""
        reply = await self._ask(self._admin.ListAdapters, admin_pb.ListAdaptersRequest(), timeout_s)
        return tuple(map(adapter_from_proto, reply.adapters))

    async def is_serving(self, service: str = "", *, timeout_s: float = 5.0, wait_for_ready: bool = False) -> bool:
        """See `Client.is_serving`."""
        try:
            return await self.check_health(service, timeout_s=timeout_s, wait_for_ready=wait_for_ready)
        except RequestFailed:
            return False

    async def check_health(self, service: str = "", *, timeout_s: float = 5.0, wait_for_ready: bool = False) -> bool:
        """See `Client.check_health`."""
        stub: Any = health_pb2_grpc.HealthStub(self._channel)  # the package has no types
        try:
            reply = await stub.Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s, wait_for_ready=wait_for_ready
            )
        except grpc.RpcError as error:
            raise failure_of(error) from error
        return reply.status == health_pb2.HealthCheckResponse.SERVING

    async def close(self) -> None:
        """Closes the connection, which cancels running calls."""
        await self._channel.close()

    async def _ask(self, method: Callable[..., Awaitable[Reply]], message: Message, timeout_s: float) -> Reply:
        try:
            return await method(message, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise failure_of(error) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
