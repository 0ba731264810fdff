"""What a start tells people: the line that asks the server something, and where its page is."""

import json
import shlex

from jaxserve.config.addresses import reached_at
from jaxserve.config.schema import HttpConfig


def how_to_call(address: str, model: str, config: HttpConfig, *, chats: bool) -> list[str]:
    """Lines about an HTTP door that has opened at `address` (HOST:PORT). `chats`: the model takes messages."""
    scheme = "http" if config.tls_cert is None else "https"
    root = f"{scheme}://{reached_at(address)}"
    asked = {"messages": [{"role": "user", "content": "Hello"}]} if chats else {"prompt": "Once upon a time"}
    route = "/v1/chat/completions" if chats else "/v1/completions"
    headers = ["content-type: application/json"]
    if config.api_keys_file is not None:
        headers.append("authorization: Bearer KEY")
    certificate = [] if config.tls_client_ca is None else ["--cert", "CERTIFICATE", "--key", "KEY"]
    options = [*certificate, *(part for header in headers for part in ("-H", header))]
    body = json.dumps({"model": model, **asked, "max_tokens": 64}, ensure_ascii=False)
    lines = [
        f"clients of OpenAI's API take base_url {root}/v1 and the model {model!r}; or:",
        shlex.join(["curl", f"{root}{route}", *options, "-d", body]),
    ]
    return lines + ([f"a page to chat, and to watch the engine: {root}/"] if config.web_page else [])
