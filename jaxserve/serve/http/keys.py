"""API keys on HTTP routes: the choice of the routes that need one. `serve.keys` compares keys, for every door."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.errors import Unauthenticated
from jaxserve.serve.http.errors import error_response
from jaxserve.serve.keys import KnownKeys

# Balancers have no key, and the page at / asks its user for one: it holds nothing itself.
PROBES = frozenset({"/health", "/live", "/ready"})
OPEN_PATHS = PROBES | {"/"}
OPEN_FOLDER = "/static/"


class ApiKeys:
    """Middleware: `Authorization: Bearer KEY` with a known key on every route but the open ones."""

    def __init__(self, app: ASGIApp, known: KnownKeys) -> None:
        self._app = app
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or needs_no_key(scope["path"]) or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        error = Unauthenticated("this server needs a key that it knows; send the header 'Authorization: Bearer KEY'")
        await error_response(error)(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        return self._known.accept(Headers(scope=scope).get("authorization", ""))


def needs_no_key(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)
