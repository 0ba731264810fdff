"""API keys on HTTP routes: the choice of the routes that need one, and whose a call is.

`serve.keys` compares keys and `serve.owners` tells owners apart, for every door.
"""

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.errors import Unauthenticated
from jaxserve.serve.http.errors import error_response
from jaxserve.serve.keys import KnownKeys
from jaxserve.serve.owners import Owner, Owners

OWNER = "jaxserve.owner"  # of a call, in its scope

# Balancers have no key, and the page at / asks its user for one: it holds nothing itself.
PROBES = frozenset({"/health", "/live", "/ready", "/ping"})
OPEN_PATHS = PROBES | {"/"}
OPEN_FOLDER = "/static/"
METRICS = "/metrics"
ADMIN_FOLDER = "/admin/"
SLEEP, WAKE_UP, IS_SLEEPING = "/sleep", "/wake_up", "/is_sleeping"
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SERVER_INFO, RESET_PREFIX_CACHE = "/server_info", "/reset_prefix_cache"
START_PROFILE, STOP_PROFILE, DEBUG_PROFILE = "/start_profile", "/stop_profile", "/debug/profile"
_ADMIN_PATHS = frozenset(
    {
        *(SLEEP, WAKE_UP, IS_SLEEPING, SERVER_INFO, RESET_PREFIX_CACHE, START_PROFILE, STOP_PROFILE),
        *(LOAD_ADAPTER, UNLOAD_ADAPTER, DEBUG_PROFILE),
    }
)  # beside those below ADMIN_FOLDER; most have the paths that tools of vLLM know


class ApiKeys:
    """Middleware: a known key on every route but the open ones, as `Authorization: Bearer KEY` or `X-Api-Key: KEY`."""

    def __init__(
        self, app: ASGIApp, known: KnownKeys | None, admins: KnownKeys | None = None, *, open_metrics: bool = False
    ) -> None:
        """`known` None: all routes are open but those for operators, for which `admins` have the keys."""
        self._app = app
        self._open_paths = OPEN_PATHS | {METRICS} if open_metrics else OPEN_PATHS
        self._known = known
        self._admins = admins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = self.needed_for(scope["path"]) if scope["type"] == "http" else None
        if known is None or known.accept(_authorization(Headers(scope=scope))):
            await self._app(scope, receive, send)
            return
        error = Unauthenticated("this server needs a key that it knows; send the header 'Authorization: Bearer KEY'")
        await error_response(error)(scope, receive, send)

    def needed_for(self, path: str) -> KnownKeys | None:
        """The keys of which a call of this path must have one; None: it needs none."""
        if path in self._open_paths or path.startswith(OPEN_FOLDER):
            return None
        if self._admins is not None and (path.startswith(ADMIN_FOLDER) or path in _ADMIN_PATHS):
            return self._admins
        return self._known


def find_owner(owners: Owners, scope: Scope) -> Owner:
    """Whose call this is, once it may be made."""
    client = scope.get("client")
    return owners.of_http(_authorization(Headers(scope=scope)), client[0] if client else "")


def owner_of(call: Request) -> Owner:
    """Whose call this is, as the layers around the routes have found, or the runner of a batch has said."""
    owner: Owner = call.scope[OWNER]
    return owner


def _authorization(headers: Headers) -> str:
    """The key in OpenAI's way. Anthropic's clients send it in a header of their own, some of them in both."""
    given = headers.get("authorization")
    if given is None and "x-api-key" in headers:
        return f"Bearer {headers['x-api-key']}"
    return given or ""
