"""The check of the header `Host`: the names by which the server may be reached.

A page of any site can point its own name at 127.0.0.1 (DNS rebinding): to the browser the server then belongs to that
page, which may read every answer. Such a request still says the page's name. An address can be nobody's name, so
addresses always pass, and with them most clients and all probes of orchestrators.
"""

import socket
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.config.addresses import is_address, is_loopback
from jaxserve.config.schema import HttpConfig
from jaxserve.serve.http.errors import HttpRefusal, error_response
from jaxserve.serve.http.keys import PROBES

ANY = "*"
# Names that cannot be registered: of this machine, of its network, and of the host that runs a container.
_RESERVED = ("localhost", ".localhost", ".local", ".internal")


def allowed_names(config: HttpConfig, listening_on: str) -> tuple[str, ...] | None:
    """Names and, beginning with a dot, ends of names; None where all pass.

    Without a setting the names of this machine, where nothing else keeps a page out: the server listens on the
    loopback alone, without keys and without TLS, whose certificate no other name has.
    """
    given = tuple(name.lower() for name in config.allowed_hosts)
    if ANY in given:
        return None
    if given:
        return given
    if not is_loopback(listening_on) or config.api_keys_file is not None or config.tls_cert is not None:
        return None
    return (*_RESERVED, socket.gethostname().lower())


class KnownHosts:
    """Middleware: 403 for a name that is not known. Probes pass: they reveal nothing, and balancers invent names."""

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        self._app = app
        self._names = frozenset(names)
        self._ends = tuple(name for name in self._names if name.startswith("."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PROBES:
            for header, value in scope["headers"]:
                if header == b"host" and not self._knows(name := host_name(value.decode("latin-1"))):
                    text = f"this server is not known as {name!r:.200}; name it in serve.http.allowed_hosts"
                    await error_response(HttpRefusal(403, text))(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _knows(self, name: str) -> bool:
        return not name or name in self._names or name.endswith(self._ends) or is_address(name)


def host_name(header: str) -> str:
    """The name in a header `Host`, without port, brackets and the dot of the root."""
    host = header.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")
