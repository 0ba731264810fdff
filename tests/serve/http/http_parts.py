"""What the HTTP tests share: the served engine of `serve_parts` behind HTTP alone, and clients of it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import httpx
import openai
from serve_parts import WAIT_S, Served, served

from jaxserve.config.schema import GrpcConfig, HttpConfig
from jaxserve.testing import ByteTokenizer

NO_GRPC = GrpcConfig()


class ToolTokenizer(ByteTokenizer):
    """With a template that shows tools in Hermes' way."""

    chat_template = (
        "{% if tools %}tools: {{ tools | tojson }}\n<tool_call>{% endif %}"
        "{% for m in messages %}<|chat|>{{ m['role'] }}: {{ m['content'] }}\n"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}<|chat|>assistant: {% endif %}"
    )


@contextlib.contextmanager
def http_served(
    parts: Served, *, drain_s: float = WAIT_S, admin_tokens_file: str | None = None, **http: Any
) -> Iterator[Served]:
    """`served` with an HTTP port and no other. Its limits of time are those of a test that hangs."""
    config = HttpConfig(**{"port": 0, "header_timeout_s": WAIT_S, "body_timeout_s": WAIT_S, **http})
    with served(parts, drain_s, grpc_config=NO_GRPC, http_config=config, admin_tokens_file=admin_tokens_file):
        yield parts


@contextlib.contextmanager
def browse(parts: Served, **headers: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=parts.http_url, timeout=WAIT_S, headers=headers) as client:
        yield client


@contextlib.contextmanager
def openai_client(parts: Served, key: str = "none") -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{parts.http_url}/v1", api_key=key, max_retries=0, timeout=WAIT_S) as client:
        yield client


def say(request_id: str, text: str, index: int = 0) -> dict[tuple[str, int], dict[int, int]]:
    """Makes the fake runner write `text` and end, for one sequence of one request."""
    return {(request_id, index): _tokens(text)}


class Script(dict[tuple[str, int], dict[int, int]]):
    """Makes the fake runner write the next of `texts` for each request that it sees, whatever its id is.

    Without texts the runner writes as it would by itself. For clients that give their requests no names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def get(self, key: tuple[str, int], default: Any = None) -> Any:
        if key not in self and self.texts:
            self[key] = _tokens(self.texts.pop(0))
        return super().get(key, default)


def _tokens(text: str) -> dict[int, int]:
    return dict(enumerate([*text.encode(), 257]))
