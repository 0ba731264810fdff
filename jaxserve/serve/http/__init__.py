"""The HTTP door: the APIs of OpenAI, with vLLM's further fields, and of Anthropic, and what operators ask.

    connection ─ server    one port, with TLS or without; headers in time and of bounded size
                 keys      a known key on every route but health
                 guard     bodies in time and of bounded size; a client that leaves cancels its handler
                 bodies    JSON of bounded depth into the frozen models of `requests`
                 chat, responses_api, messages, completions, embeddings, ...     one file a group of routes
                 conversation     what the first three share: a prompt by the template, an answer in pieces
                 door      prompts into requests of the engine, and their updates into one stream
                 tools        the tools of a chat into its prompt, and the grammar of a demanded call
                 formats      thoughts and tool calls out of the text, one file a format
                 errors    every exception into the API's error object

A route is thin: limits, queues, sampling and text are the engine's, as for gRPC, and what a body says is checked by the
same `SamplingParams`. Whole answers and streams are made of the same pieces, so that they cannot differ. Nothing that a
client sends is dropped: an unknown field, or a combination that could not work, is refused by name. A status is chosen
when the first token is there, since a refusal must not come as a 200.

A client that leaves is noticed on its connection and not by the next write, so that its pages are free within a step,
streaming or not.
"""

from jaxserve.serve.http.app import HttpApp, make_app
from jaxserve.serve.http.http_door import HttpDoor

__all__ = ["HttpApp", "HttpDoor", "make_app"]
