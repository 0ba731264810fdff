"""The answers of a server about itself (`ServerModel`, `ServerLoad`, `ServerAdapter`), made from messages."""

import dataclasses

from jaxserve.serve.gen import admin_pb2 as admin_pb
from jaxserve.serve.gen import inference_pb2 as pb


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerModel:
    """The served model. `max_model_len` counts tokens of prompt and output together; `version` is the server's."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    has_tokenizer: bool
    has_chat_template: bool
    version: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """The load of a server.

    Attributes:
      num_running: requests with their first token.
      num_waiting, num_waiting_tokens: sequences without one (n for each request), and the tokens of their prompts.
      max_waiting, max_waiting_tokens: above these, requests are refused.
      num_pages, num_used_pages: pages of the KV cache, and those that running requests hold.
      accepting: False while it drains, or when its engine has died.
      num_replicas: of a router, the servers that have answered; 0 for a server.
    """

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    max_waiting: int
    max_waiting_tokens: int
    num_pages: int
    num_used_pages: int
    accepting: bool
    num_replicas: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerAdapter:
    """A LoRA adapter that requests may name.

    Attributes:
      path: the directory on the server's machine that it was read from.
      digest: SHA-256 of its weights as the server holds them.
      loaded_s: when, in seconds of Unix.
      in_memory: False: its weights gave way to others, and are read again when a request needs them.
    """

    name: str
    path: str
    digest: bytes
    loaded_s: float
    in_memory: bool


def model_from_proto(message: pb.GetModelResponse) -> ServerModel:
    return ServerModel(
        name=message.name,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        eos_token_ids=tuple(message.eos_token_ids),
        has_tokenizer=message.has_tokenizer,
        has_chat_template=message.has_chat_template,
        version=message.version,
    )


def load_from_proto(message: pb.GetLoadResponse) -> ServerLoad:
    """Fields have the same names on both sides."""
    return ServerLoad(**{field.name: getattr(message, field.name) for field in dataclasses.fields(ServerLoad)})


def adapter_from_proto(message: admin_pb.AdapterInfo) -> ServerAdapter:
    """Fields have the same names on both sides."""
    return ServerAdapter(**{field.name: getattr(message, field.name) for field in dataclasses.fields(ServerAdapter)})
