"""Paths of other servers, and base URLs with too much or too little: the answer says where to go, which exists."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from http_parts import browse, http_served
from serve_parts import Served

from jaxserve.config import field_docs
from jaxserve.engine import Reranker
from jaxserve.serve.http.other_routes import ROWS
from jaxserve.testing import ByteTokenizer

SETTINGS = {doc.name for doc in field_docs()}
PATHS = [path for row in ROWS for path in row.paths.split()]


def byte_server() -> Served:
    judges = Reranker(template="{query} {document}", instruction="", yes_id=ord("y"), no_id=ord("n"))
    return Served(tokenizer=ByteTokenizer(), vocab_size=259, reranker=judges)


@pytest.fixture(scope="module")
def plain() -> Iterator[httpx.Client]:
    with http_served(byte_server()) as parts, browse(parts) as client:
        yield client


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """With all that settings turn on."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "tokens").write_text("the-token")
    more: dict[str, Any] = {"admin_tokens_file": str(folder / "tokens"), "batch_dir": str(folder / "batches")}
    with http_served(byte_server(), **more) as parts, browse(parts, authorization="Bearer the-token") as client:
        yield client


def routes(client: httpx.Client) -> dict[str, set[str]]:
    found = client.get("/openapi.json").json()["paths"]
    methods = {path: {name.upper() for name in operations} for path, operations in found.items()}
    return {**methods, "/openapi.json": {"GET"}}


def refusal(client: httpx.Client, path: str, method: str = "POST", status: int = 404) -> str:
    response = client.request(method, path)
    assert response.status_code == status, response.text
    return response.json()["error"]["message"]


def test_what_rows_point_to_exists(whole: httpx.Client) -> None:
    there = {**routes(whole), "/admin/weights": {"POST"}, "/sleep": {"POST"}, "/wake_up": {"POST"}}
    assert len(PATHS) == len(set(PATHS))
    for row in ROWS:
        assert row.here or row.note or row.setting
        named = re.findall(r"(GET|POST) (/[\w./]+)", f"{row.here} {row.note}")
        assert len(named) >= bool(row.here)
        for method, path in named:
            assert method in there[path], path
        assert set(row.setting.split(" and ")) <= SETTINGS | {""}


@pytest.mark.parametrize("path", PATHS)
def test_each_path_is_answered(plain: httpx.Client, path: str) -> None:
    status = 405 if path.startswith("/v1/responses/") else 404
    assert re.search("; (here it is|it is there only|not )", refusal(plain, path, status=status)), path


def test_own_routes_name_their_setting(plain: httpx.Client, whole: httpx.Client) -> None:
    """Whatever a setting turns on is answered with that setting where it is off."""
    for path in set(routes(whole)) - set(routes(plain)):
        said = refusal(plain, re.sub("{.*?}", "x", path), "GET")
        assert re.search(r"; it is there only with serve\.(admin_tokens_file|http\.batch_dir) \(", said), said
    assert refusal(whole, "/v1/files/a/b/c") == "there is nothing at /v1/files/a/b/c"
    assert refusal(whole, "/admin/nothing") == "there is nothing at /admin/nothing"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/api/chat", "; here it is POST /v1/chat/completions (in the form of OpenAI's API)"),
        ("/api/blobs/sha256:1", "; not needed here: jaxserve downloads nothing"),
        ("/v1beta/models/demo:generateContent", "; here it is POST /v1/chat/completions"),
        ("/flush_cache", "; here it is POST /reset_prefix_cache, with serve.admin_tokens_file (for operators)"),
        ("/chat/completions", "; here it is /v1/chat/completions (the base URL of OpenAI's clients ends with /v1"),
        ("/v1/v1/messages", "; here it is /v1/messages (the base URL of OpenAI's clients ends with /v1, that of Anth"),
        ("/openai/deployments/demo/chat/completions", "; here it is /v1/chat/completions ("),
        ("/v1/chat/completions/", "; here it is /v1/chat/completions ("),
        ("/models", "; here it is /v1/models ("),
        ("/proxy/health", "; here it is /health"),
        ("/v1/", "; the base URL of OpenAI's clients"),
    ],
)
def test_not_found(plain: httpx.Client, path: str, words: str) -> None:
    assert refusal(plain, path).startswith(f"there is nothing at {path}{words}")


@pytest.mark.parametrize("path", ["/nonsense", "/v1/nonsense", "/api", "/api/chats", "/" + "a/" * 3000])
def test_nothing_is_said_of_what_nobody_has(plain: httpx.Client, path: str) -> None:
    assert refusal(plain, path) == f"there is nothing at {path}"


def test_another_method_is_named(plain: httpx.Client) -> None:
    assert refusal(plain, "/v1/messages", "GET", 405) == "GET is not possible here; POST is"
    assert refusal(plain, "/v1/models", "PUT", 405) == "PUT is not possible here; GET is"
    assert "; here it is POST /tokenize (its 'count'" in refusal(plain, "/v1/responses/input_tokens", status=405)


def test_clients_with_the_base_url_of_the_other(plain: httpx.Client) -> None:
    url = str(plain.base_url).rstrip("/")
    ask: Any = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    with (
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
        pytest.raises(openai.NotFoundError, match="here it is /v1/chat/completions"),
    ):
        client.chat.completions.create(**ask)
    with (
        anthropic.Anthropic(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(anthropic.NotFoundError, match="here it is /v1/messages"),
    ):
        client.messages.create(**ask)


def test_the_page_names_the_table() -> None:
    assert "other_routes.py" in (Path(__file__).parents[3] / "docs/differences.md").read_text()
