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

A stream whose server or router is gone goes on at whichever answers at the address then, without a token lost or
repeated; `Retries` says how often that is tried (docs/resume.md). What a server refuses is not sent again:
`RequestFailed.retry_after_s` says when it may be.

Nothing of the engine is loaded, nor anything that needs a device: a program that only calls servers starts in a
fraction of a second.
"""

from jaxserve.client.asynchronous import AsyncClient
from jaxserve.client.blocking import Client
from jaxserve.client.completion import Completion, Output, collect_replies
from jaxserve.client.connection import RequestFailed, Tls
from jaxserve.client.resuming import Retries
from jaxserve.client.values import ServerAdapter, ServerLoad, ServerModel
from jaxserve.serve.convert import CallOptions, ClientPrompt

__all__ = [
    "AsyncClient",
    "CallOptions",
    "Client",
    "ClientPrompt",
    "Completion",
    "Output",
    "RequestFailed",
    "Retries",
    "ServerAdapter",
    "ServerLoad",
    "ServerModel",
    "Tls",
    "collect_replies",
]
