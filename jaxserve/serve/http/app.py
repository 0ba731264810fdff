"""All routes as one application, and the order of the layers around them.

From the outside: the counts of all answers; names under which the server is reached; CORS, since a browser's preflight
carries no key; keys, before anything of a body is read; limits and the watch for clients that leave; then the routes.
"""

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from jaxserve.config.schema import HttpConfig, ServeConfig
from jaxserve.engine import Answering, AnyEngine, AsyncEngine
from jaxserve.serve.counts import DoorCounts
from jaxserve.serve.http.chat import chat_router
from jaxserve.serve.http.completions import completions_router
from jaxserve.serve.http.counted import Counted
from jaxserve.serve.http.door import Door
from jaxserve.serve.http.embeddings import embeddings_router
from jaxserve.serve.http.errors import ErrorResponse, add_handlers
from jaxserve.serve.http.formats import choose_thinking_format, choose_tool_format
from jaxserve.serve.http.guard import FILES, Guard
from jaxserve.serve.http.hosts import KnownHosts, allowed_names
from jaxserve.serve.http.keys import ApiKeys, find_owner, owner_of
from jaxserve.serve.http.messages import messages_router
from jaxserve.serve.http.pieces import PART_BYTES, PartsResponse
from jaxserve.serve.http.probes import probes_router
from jaxserve.serve.http.requests import ChatRequest, CompletionRequest
from jaxserve.serve.http.rerank import rerank_router
from jaxserve.serve.http.responses_api import responses_router
from jaxserve.serve.http.tokens import tokens_router
from jaxserve.serve.key_files import KeyFiles
from jaxserve.serve.large_reads import LargeReads


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HttpApp:
    """`asgi` is what a server runs; `guard` counts the requests in it; `api` is the inner application."""

    asgi: ASGIApp
    guard: Guard
    api: FastAPI


def make_app(
    engine: AsyncEngine[AnyEngine],
    config: ServeConfig,
    counts: DoorCounts,
    keys: KeyFiles,
    more: tuple[APIRouter, ...] = (),
) -> HttpApp:
    """`keys`: who may call. `more`: further routers.

    Raises ConfigError for names of formats that do not exist.
    """
    door = make_door(engine, config.http, counts)
    own = (embeddings_router(door), rerank_router(door), probes_router(engine.engine, counts))
    return join_routers("jaxserve", (*answering_routers(door), *own, *more), config, counts, keys)


def make_door(
    engine: AsyncEngine[Answering], config: HttpConfig, counts: DoorCounts, *, any_model: bool = False
) -> Door:
    """`any_model`: see `Door`. Raises ConfigError for names of formats that do not exist."""
    tokenizer = engine.engine.tokenizer
    template = None if tokenizer is None else tokenizer.chat_template
    for_tools = None if tokenizer is None else tokenizer.named_chat_templates.get("tool_use", template)
    return Door(
        engine=engine,
        config=config,
        counts=counts,
        tool_format=choose_tool_format(config.tool_parser, for_tools, reads_bare_calls=config.bare_tool_calls),
        thinking_format=choose_thinking_format(config.reasoning_parser, template),
        any_model=any_model,
    )


def answering_routers(door: Door) -> tuple[APIRouter, ...]:
    """The APIs of OpenAI and Anthropic for text, and the tokenizer."""
    return (
        completions_router(door),
        chat_router(door),
        responses_router(door),
        messages_router(door),
        tokens_router(door),
    )


def join_routers(
    title: str, routers: Sequence[APIRouter], config: ServeConfig, counts: DoorCounts, keys: KeyFiles
) -> HttpApp:
    """One application with all layers around it. `keys`: as of `make_app`."""
    http = config.http
    # No pages of documentation, which load scripts from foreign hosts; the document itself is there.
    # No redirects of paths that end with a slash either: an id may, and is then not found.
    api = FastAPI(title=title, openapi_url=None, separate_input_output_schemas=False, redirect_slashes=False)
    _add_document(api)
    api.state.counts = counts
    api.state.max_json_parts = http.max_json_parts
    api.state.large_reads = LargeReads()
    for router in routers:
        api.include_router(router)
    routes = [route for router in (api, *routers) for route in router.routes if isinstance(route, Route)]
    add_handlers(api, routes)
    guard = Guard(
        api,
        max_body_bytes=http.max_body_bytes,
        max_bodies_bytes=http.max_bodies_bytes,
        max_answers_bytes=http.max_answers_bytes,
        body_timeout_s=http.body_timeout_s,
        request_timeout_s=http.request_timeout_s,
        larger={FILES: (http.batch_file_bytes, "serve.http.batch_file_bytes")},
        find_owner=functools.partial(find_owner, keys.http),
    )
    asgi: ASGIApp = guard
    checked = None
    if keys.http.known is not None or keys.admins is not None:
        asgi = checked = ApiKeys(asgi, keys.http.known, keys.admins, open_metrics=http.open_metrics)
    if http.cors_origins:
        asgi = CORSMiddleware(asgi, allow_origins=http.cors_origins, allow_methods=["*"], allow_headers=["*"])
    if (names := allowed_names(http, config.host)) is not None:
        asgi = KnownHosts(asgi, names)
    _complete_document(api, checked, config.max_n)
    return HttpApp(asgi=Counted(asgi, counts, routes), guard=guard, api=api)


def _add_document(api: FastAPI) -> None:
    """Its route, as FastAPI has it, but for its making: that takes seconds, in which the event loop goes on."""
    written = b""

    def write() -> bytes:
        return json.dumps(api.openapi(), ensure_ascii=False, separators=(",", ":")).encode()

    async def document(call: Request) -> Response:
        nonlocal written
        reads: LargeReads = api.state.large_reads
        written = written or await reads.run(owner_of(call).id, write)
        parts = [written[start : start + PART_BYTES] for start in range(0, len(written), PART_BYTES)]
        return PartsResponse(parts, {"content-type": "application/json"})

    api.add_route("/openapi.json", document, include_in_schema=False)


def _complete_document(api: FastAPI, keys: ApiKeys | None, max_n: int) -> None:
    """Adds to the OpenAPI document what only the settings say. It is made when it is first asked for."""
    make = api.openapi

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            document = make()
            if keys is not None:
                _declare_keys(document, keys)
            schemas = document.get("components", {}).get("schemas", {})
            for name in {CompletionRequest.__name__, ChatRequest.__name__} & set(schemas):
                schemas[name]["properties"]["n"]["anyOf"][0]["maximum"] = max_n
        assert api.openapi_schema is not None, "made above"
        return api.openapi_schema

    api.openapi = openapi


def _declare_keys(document: dict[str, Any], keys: ApiKeys) -> None:
    """Declares which routes need a key, and their answer without one."""
    components = document.setdefault("components", {})
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorResponse.__name__}"}}}
    for path, operations in document["paths"].items():
        if keys.needed_for(path) is None:
            continue
        for operation in operations.values():
            operation["security"] = [{"key": []}]
            if "4XX" not in operation["responses"]:
                operation["responses"]["401"] = {"description": "No key, or an unknown one.", "content": body}
