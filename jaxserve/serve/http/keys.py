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
ADMIN_FOLDER = "/admin/"


class ApiKeys:
    """Middleware: `Authorization: Bearer KEY` with a known key on every route but the open ones."""

    def __init__(self, app: ASGIApp, known: KnownKeys | None, admins: KnownKeys | None = None) -> None:
        """`known` None: all routes are open but those for operators, for which `admins` have the keys."""
        self._app = app
        self._known = known
        self._admins = admins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = self.needed_for(scope["path"]) if scope["type"] == "http" else None
        if known is None or known.accept(Headers(scope=scope).get("authorization", "")):
            await self._app(scope, receive, send)
            return
        error = Unauthenticated("this server needs a key that it knows; send the header 'Authorization: Bearer KEY'")
        await error_response(error)(scope, receive, send)

    def needed_for(self, path: str) -> KnownKeys | None:
        """The keys of which a call of this path must have one; None: it needs none."""
        if path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
            return None
        if self._admins is not None and path.startswith(ADMIN_FOLDER):
            return self._admins
        return self._known
