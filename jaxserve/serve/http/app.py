"""All routes as one application, and the order of the layers around them.

From the outside: the counts of all answers; names under which the server is reached; CORS, since a browser's preflight
carries no key; keys, before anything of a body is read; limits and the watch for clients that leave; then the routes.
"""

import dataclasses

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from jaxserve.config.schema import ServeConfig
from jaxserve.engine import AsyncEngine
from jaxserve.serve.counts import DoorCounts
from jaxserve.serve.http.chat import chat_router
from jaxserve.serve.http.completions import completions_router
from jaxserve.serve.http.counted import Counted
from jaxserve.serve.http.door import Door
from jaxserve.serve.http.errors import ErrorResponse, add_handlers
from jaxserve.serve.http.guard import Guard
from jaxserve.serve.http.hosts import KnownHosts, allowed_names
from jaxserve.serve.http.keys import ApiKeys
from jaxserve.serve.http.probes import probes_router
from jaxserve.serve.http.rerank import rerank_router
from jaxserve.serve.http.tokens import tokens_router
from jaxserve.serve.http.tool_parsers import choose_parser
from jaxserve.serve.keys import KnownKeys, read_keys


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HttpApp:
    """`asgi` is what a server runs; `guard` counts the requests in it; `api` is the inner application."""

    asgi: ASGIApp
    guard: Guard
    api: FastAPI


def make_app(
    engine: AsyncEngine,
    config: ServeConfig,
    counts: DoorCounts,
    more: tuple[APIRouter, ...] = (),
    admins: KnownKeys | None = None,
) -> HttpApp:
    """`more`: further routers. `admins`: the keys of routes for operators, if there are such routes.

    Raises ConfigError for keys that cannot be read.
    """
    http = config.http
    tokenizer = engine.engine.tokenizer
    parser = choose_parser(http.tool_parser, None if tokenizer is None else tokenizer.chat_template)
    door = Door(engine=engine, config=http, tool_parser=parser)
    # The pages of documentation load scripts from foreign hosts; the document itself stays.
    api = FastAPI(title="jaxserve", docs_url=None, redoc_url=None, separate_input_output_schemas=False)
    routers = (
        completions_router(door),
        chat_router(door),
        tokens_router(door),
        rerank_router(door),
        probes_router(door, config.stall_s),
        *more,
    )
    for router in routers:
        api.include_router(router)
    add_handlers(api)
    routes = [route for router in (api, *routers) for route in router.routes if isinstance(route, Route)]
    guard = Guard(
        api,
        max_body_bytes=http.max_body_bytes,
        body_timeout_s=http.body_timeout_s,
        request_timeout_s=http.request_timeout_s,
    )
    asgi: ASGIApp = guard
    known = None
    if http.api_keys_file is not None:
        known = KnownKeys(read_keys(http.api_keys_file, "serve.http.api_keys_file"))
    if known is not None or admins is not None:
        keys = ApiKeys(asgi, known, admins)
        _declare_keys(api, keys)
        asgi = keys
    if http.cors_origins:
        asgi = CORSMiddleware(asgi, allow_origins=http.cors_origins, allow_methods=["*"], allow_headers=["*"])
    if (names := allowed_names(http, config.host)) is not None:
        asgi = KnownHosts(asgi, names)
    return HttpApp(asgi=Counted(asgi, counts, routes), guard=guard, api=api)


def _declare_keys(api: FastAPI, keys: ApiKeys) -> None:
    """Declares in the OpenAPI document which routes need a key, and their answer without one."""
    document = api.openapi()
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
