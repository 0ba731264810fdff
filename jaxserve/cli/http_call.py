"""Calls of a server's HTTP door by commands, with the standard library alone: nothing of an engine is loaded."""

import contextlib
import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jaxserve.cli.options import one_line
from jaxserve.errors import ConfigError

TIMEOUT_S = 10.0
_LONGEST_ERROR = 100_000  # bytes that are read of an answer that refuses


def http_url(given: str, route: str) -> str:
    """The URL of a route: 'localhost:8000' and '/health' -> 'http://localhost:8000/health'.

    `given` may end with the route. Raises ConfigError for anything but an address.
    """
    url = given if "://" in given else f"http://{given}"
    problem = ConfigError(f"{given!r} is no address; give HOST:PORT or http://HOST:PORT")
    try:
        parts = urllib.parse.urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:  # such as a port that is no number
        raise problem from error
    if not is_address or any(character <= " " for character in url):
        raise problem
    return url if parts.path.endswith(route) else url.rstrip("/") + route


@contextlib.contextmanager
def call(
    url: str,
    *,
    body: Mapping[str, Any] | None = None,
    api_key: str | None = None,
    tls_ca: str | None = None,
    timeout_s: float = TIMEOUT_S,
    good: Collection[int] = (200,),
) -> Iterator[http.client.HTTPResponse]:
    """The answer to a GET, or to a POST with a JSON body, while it comes.

    Args:
      tls_ca: PEM file of the authorities of an https server; without it those of the system.
      timeout_s: for the connection, and for each wait for further bytes.
      good: statuses that are no error.

    Raises ConfigError, saying what is wrong; also when the answer breaks off within the block.
    """
    headers = {} if body is None else {"content-type": "application/json"}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    if api_key is not None:
        # The bytes of the file: servers compare bytes, and http.client writes each character as one.
        request.add_header("authorization", f"Bearer {api_key}".encode().decode("latin-1"))
    context = _tls_context(tls_ca) if url.startswith("https://") else None
    try:
        with _opened(request, timeout_s, context) as answer:
            if answer.status not in good:
                hint = "; give the key's file with --api-key-file" if answer.status == 401 else ""
                raise ConfigError(f"{url} answers {answer.status} {answer.reason}{_words(answer)}{hint}")
            yield answer
    except (http.client.HTTPException, UnicodeError) as error:
        raise ConfigError(f"what {url} answers is no HTTP; is it the HTTP port of jaxserve?") from error
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ConfigError(f"{url} does not answer: {reason}; is serve.http.port set, and is it this one?") from error


def _opened(request: urllib.request.Request, timeout_s: float, context: ssl.SSLContext | None) -> Any:
    try:
        return urllib.request.urlopen(request, timeout=timeout_s, context=context)
    except urllib.error.HTTPError as error:  # an answer as others
        return error


def _words(answer: http.client.HTTPResponse) -> str:
    """What a refusal of OpenAI's form says."""
    try:
        message = json.loads(answer.read(_LONGEST_ERROR))["error"]["message"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    return f": {one_line(ValueError(message))}"


def _tls_context(tls_ca: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=tls_ca)
    except OSError as error:
        raise ConfigError(f"--tls-ca: cannot read {tls_ca}: {error}") from error
