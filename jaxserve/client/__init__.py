"""A small client of the gRPC service, blocking and asyncio.

    from jaxserve import SamplingParams
    from jaxserve.client import Client

    with Client("127.0.0.1:8500") as client:
        for reply in client.generate("Once upon a time", SamplingParams(max_tokens=64)):
            print(reply.text, end="", flush=True)

A prompt is text, a list of token ids, or a list of chat messages, each one `{"role": ..., "content": ...}`. Sampling is
the `SamplingParams` of the whole package; all other options are in `CallOptions`. A stream yields the messages of the
protocol as they come, since a wrapper around each token would only cost time; everything that comes once is a frozen
value. A call that fails raises `RequestFailed`, whose `status` is the kind of the error.

There are no retries and there is no balancing: a streamed answer cannot be taken back once a part of it was shown, so
only the caller knows which requests may be sent again. `RequestFailed.retry_after_s` says when.

Nothing of the engine is loaded, nor anything that needs a device: a program that only calls servers starts in a
fraction of a second.
"""

from jaxserve.client.asynchronous import AsyncClient
from jaxserve.client.blocking import Client
from jaxserve.client.completion import Completion, Output, collect_replies
from jaxserve.client.connection import RequestFailed, Tls
from jaxserve.client.values import ServerLoad, ServerModel
from jaxserve.serve.convert import CallOptions, ClientPrompt

__all__ = [
    "AsyncClient",
    "CallOptions",
    "Client",
    "ClientPrompt",
    "Completion",
    "Output",
    "RequestFailed",
    "ServerLoad",
    "ServerModel",
    "Tls",
    "collect_replies",
]
