"""`Client`: the blocking client."""

import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
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


class Client:
    """Blocking client. May be used from several threads. Every method raises RequestFailed when its call fails."""

    def __init__(
        self, address: str, *, tls: Tls | None = None, token: str | None = None, retries: Retries = DEFAULT_RETRIES
    ) -> None:
        """`address` is `host:port`, or several as gRPC has them: `ipv4:10.0.0.1:8000,10.0.0.2:8000`.

        Nothing is connected before the first call. `tls` None connects in the clear. `token` goes with every call, so
        give one only together with `tls`, or on a network that nobody else reads. `retries`: of streams whose server is
        gone. Raises ConfigError for certificates or a token that cannot be used.
        """
        self._metadata = metadata_of(token)
        self._retries = retries
        self._reached = threading.Event()  # a stream of this client has been answered
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            options = (*CHANNEL_OPTIONS, *tls.options())
            self._channel = grpc.secure_channel(address, tls.credentials(), options=options)
        self._stub = pb_grpc.InferenceStub(self._channel)
        self._admin = admin_grpc.AdminStub(self._channel)

    def generate(
        self,
        prompt: ClientPrompt,
        sampling: SamplingParams,
        options: CallOptions = NO_OPTIONS,
        *,
        timeout_s: float | None = None,
    ) -> Generator[pb.GenerateResponse, None, None]:
        """Yields the messages of the server as they come. Leaving early cancels the call, and frees its memory there.

        When the server is gone, the stream goes on at whichever answers at the address then (`retries`). `timeout_s`
        ends the request on the server too. Raises RequestFailed, or InvalidRequest for values that cannot be sent.
        """
        attempts = Attempts(request_to_proto(prompt, sampling, options), self._retries, timeout_s, self._reached)
        while True:
            call = self._stub.Generate(attempts.message, timeout=attempts.left_s, metadata=self._metadata)
            try:
                for reply in call:
                    yield attempts.take(reply)
                return
            except grpc.RpcError as error:
                wait_s = attempts.wait_after(error)
            finally:
                call.cancel()
            if wait_s is None:
                return
            time.sleep(wait_s)

    def complete(
        self,
        prompt: ClientPrompt,
        sampling: SamplingParams,
        options: CallOptions = NO_OPTIONS,
        *,
        timeout_s: float | None = None,
    ) -> Completion:
        """Returns the whole answer. Raises as `generate` does."""
        return collect_replies(list(self.generate(prompt, sampling, options, timeout_s=timeout_s)))

    def tokenize(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        add_special_tokens: bool | None = None,
        timeout_s: float = _SHORT_S,
    ) -> tuple[int, ...]:
        """Ids of a text, or of chat messages. `add_special_tokens` None: as for a prompt."""
        message = tokenize_to_proto(prompt, add_special_tokens)
        return tuple(self._ask(self._stub.Tokenize, message, timeout_s).token_ids)

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, timeout_s: float = _SHORT_S
    ) -> str:
        """Text of ids."""
        message = detokenize_to_proto(token_ids, skip_special_tokens)
        return self._ask(self._stub.Detokenize, message, timeout_s).text

    def model(self, *, timeout_s: float = _SHORT_S) -> ServerModel:
        """The model that is served."""
        return model_from_proto(self._ask(self._stub.GetModel, pb.GetModelRequest(), timeout_s))

    def load(self, *, timeout_s: float = _SHORT_S) -> ServerLoad:
        """The load of the server now."""
        return load_from_proto(self._ask(self._stub.GetLoad, pb.GetLoadRequest(), timeout_s))

    def abort(self, *request_ids: str, timeout_s: float = _SHORT_S) -> None:
        """Ends requests of any client. Unknown ids are no error: a request may just have ended."""
        self._ask(self._stub.Abort, pb.AbortRequest(request_ids=request_ids), timeout_s)

    def load_adapter(self, name: str, path: str, *, replace: bool = False, timeout_s: float = _LOAD_S) -> ServerAdapter:
        """Has the server read a LoRA adapter from a directory, relative to its `adapters.directory`.

        `replace`: another adapter of the name gives way, for requests from now on. This and the next two are for
        clients with a token for operators, which opens no other calls.
        """
        message = admin_pb.LoadAdapterRequest(name=name, path=path, replace=replace)
        return adapter_from_proto(self._ask(self._admin.LoadAdapter, message, timeout_s))

    def unload_adapter(self, name: str, *, timeout_s: float = _SHORT_S) -> None:
        """No request may name the adapter any more; those that run end with it."""
        self._ask(self._admin.UnloadAdapter, admin_pb.UnloadAdapterRequest(name=name), timeout_s)

    def adapters(self, *, timeout_s: float = _SHORT_S) -> tuple[ServerAdapter, ...]:
        """The adapters that requests may name, in the order in which they were loaded."""
        reply = self._ask(self._admin.ListAdapters, admin_pb.ListAdaptersRequest(), timeout_s)
        return tuple(map(adapter_from_proto, reply.adapters))

    def is_serving(self, service: str = "", *, timeout_s: float = 5.0, wait_for_ready: bool = False) -> bool:
        """Asks the server's health. False when it says NOT_SERVING or does not answer.

        `service` is a name of the health service: "" is the whole server, "live" whether its process is worth keeping.
        `wait_for_ready` waits for a server that is still starting, up to `timeout_s`.
        """
        try:
            return self.check_health(service, timeout_s=timeout_s, wait_for_ready=wait_for_ready)
        except RequestFailed:
            return False

    def check_health(self, service: str = "", *, timeout_s: float = 5.0, wait_for_ready: bool = False) -> bool:
        """As `is_serving`, but raises RequestFailed where there is no answer, or no such service."""
        stub: Any = health_pb2_grpc.HealthStub(self._channel)  # the package has no types
        try:
            reply = stub.Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s, wait_for_ready=wait_for_ready
            )
        except grpc.RpcError as error:
            raise failure_of(error) from error
        return reply.status == health_pb2.HealthCheckResponse.SERVING

    def close(self) -> None:
        """Closes the connection, which cancels running calls."""
        self._channel.close()

    def _ask(self, method: Callable[..., Reply], message: Message, timeout_s: float) -> Reply:
        try:
            return method(message, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise failure_of(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
