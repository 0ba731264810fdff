"""HTTP over TLS with real certificates: who gets in, who does not, and that nobody holds the port."""

import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from certificates import Authority, Pair
from http_parts import http_served
from serve_parts import LONG_TOKENS, WAIT_S, Served, serve_bytes, serve_slowly, wait_until

from jaxserve import cli
from jaxserve.config.schema import HttpConfig, ServeConfig
from jaxserve.errors import ConfigError
from jaxserve.serve.counts import DoorCounts
from jaxserve.serve.http import HttpDoor
from jaxserve.serve.key_files import KeyFiles

ASK = {"prompt": "a", "max_tokens": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder, "ours")


@pytest.fixture(scope="module")
def stranger(folder: Path) -> Authority:
    return Authority(folder, "theirs")


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.issue("server")


@pytest.fixture(scope="module")
def server(pair: Pair) -> Iterator[Served]:
    with http_served(serve_bytes(), tls_cert=pair.certificate, tls_key=pair.key) as parts:
        yield parts


@pytest.fixture(scope="module")
def hasty(pair: Pair) -> Iterator[Served]:
    """Its limits of time are so short that, on a busy machine, the innocent may miss them too."""
    with http_served(serve_bytes(), tls_cert=pair.certificate, tls_key=pair.key, header_timeout_s=0.5) as parts:
        yield parts


@pytest.fixture(scope="module")
def mutual(pair: Pair, authority: Authority) -> Iterator[Served]:
    with http_served(serve_bytes(), tls_cert=pair.certificate, tls_key=pair.key, tls_client_ca=authority.path) as parts:
        yield parts


def browse(parts: Served, trusted: Authority, shown: Pair | None = None) -> httpx.Client:
    context = ssl.create_default_context(cafile=trusted.path)
    if shown is not None:
        context.load_cert_chain(shown.certificate, shown.key)
    return httpx.Client(base_url=secure_url(parts), verify=context, timeout=WAIT_S)


def secure_url(parts: Served) -> str:
    return parts.http_url.replace("http://", "https://")


def ask(parts: Served, trusted: Authority, shown: Pair | None = None) -> str:
    with browse(parts, trusted, shown) as client:
        return client.post("/v1/completions", json=ASK).json()["choices"][0]["text"]


def connect(parts: Served) -> socket.socket:
    host, port = parts.http_url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def until_closed(raw: socket.socket) -> None:
    """Reads what comes until the other end closes. Raises TimeoutError when it does not."""
    with contextlib.suppress(ConnectionResetError):
        while raw.recv(4096):
            pass


def test_who_trusts_the_authority_is_answered(server: Served, authority: Authority) -> None:
    assert ask(server, authority) == "bcd"
    with (
        openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=authority.path)) as web,
        openai.OpenAI(base_url=f"{secure_url(server)}/v1", api_key="none", http_client=web, max_retries=0) as client,
    ):
        chunks = client.completions.create(model="fake", prompt="a", max_tokens=4, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "bcde"


def test_leaving_a_stream_frees_its_pages(authority: Authority, pair: Pair) -> None:
    slow = http_served(serve_slowly(), tls_cert=pair.certificate, tls_key=pair.key)
    with slow as parts, browse(parts, authority) as client:
        body = {"prompt": "a", "max_tokens": LONG_TOKENS, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()  # kept: when it is thrown away, the client closes the connection
            first = next(lines)
            assert response.status_code == 200, first
            wait_until(lambda: parts.engine.num_live == 1, f"the request lives after its line {first!r}")
            assert not response.is_closed
        wait_until(lambda: parts.scheduler.num_held_pages == 0, "pages are free")
        assert parts.runner.inner.num_steps < LONG_TOKENS, "it ran to its end"


def test_others_are_not(server: Served, authority: Authority, stranger: Authority) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        ask(server, stranger)
    with pytest.raises(httpx.TransportError):  # in the clear
        httpx.post(f"{server.http_url}/v1/completions", json=ASK, timeout=WAIT_S)
    with connect(server) as raw:
        raw.sendall(b"\x00" * 4096)
        until_closed(raw)
    assert ask(server, authority) == "bcd"


def test_old_versions_are_refused(server: Served) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with connect(server) as raw, context.wrap_socket(raw) as secure:
        assert secure.version() == "TLSv1.2"
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with connect(server) as raw, pytest.raises(OSError):  # noqa: PT011  (an SSLError, or a reset)
        context.wrap_socket(raw)


def test_the_handshake_agrees_on_http1(server: Served, authority: Authority) -> None:
    context = ssl.create_default_context(cafile=authority.path)
    context.set_alpn_protocols(["h2", "http/1.1"])
    with connect(server) as raw, context.wrap_socket(raw, server_hostname="localhost") as secure:
        assert secure.selected_alpn_protocol() == "http/1.1"


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["silence", "the beginning of a handshake"])
def test_a_handshake_that_stalls_is_ended(server: Served, hasty: Served, authority: Authority, sent: bytes) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connect(server)).sendall(sent)
        assert ask(server, authority) == "bcd", "others are served meanwhile"
    with connect(hasty) as raw:
        with contextlib.suppress(ConnectionError):
            raw.sendall(sent)
        until_closed(raw)


def test_headers_that_stall_after_the_handshake(hasty: Served, authority: Authority) -> None:
    context, answers = ssl.create_default_context(cafile=authority.path), []

    def is_told() -> bool:
        """On a busy machine the handshake itself may be late, and then nothing is said."""
        with (
            contextlib.suppress(OSError),
            connect(hasty) as raw,
            context.wrap_socket(raw, server_hostname="localhost") as secure,
        ):
            secure.sendall(b"GET /health HTTP/1.1\r\n")
            answers.append(secure.recv(4096))
        return bool(answers)

    wait_until(is_told, "an answer")
    assert answers[0].startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("who", ["nobody", "stranger", "expired"])
def test_mutual_tls_refuses_bad_peers(mutual: Served, authority: Authority, stranger: Authority, who: str) -> None:
    shown = {"nobody": None, "stranger": stranger.issue("x"), "expired": authority.issue("old", age_days=9)}[who]
    with pytest.raises(httpx.TransportError):
        ask(mutual, authority, shown)
    assert ask(mutual, authority, authority.issue("client")) == "bcd"
    wait_until(lambda: mutual.engine.num_live == 0, "nobody is left")  # the last answer comes before its end is counted


def test_wrong_files_stop_the_start(folder: Path, pair: Pair, authority: Authority) -> None:
    (folder / "noise").write_text("no PEM")
    noise, other = str(folder / "noise"), authority.issue("other")
    for options, text in (
        ({"tls_cert": pair.certificate}, r"serve\.http\.tls_cert and serve\.http\.tls_key go together"),
        ({"tls_key": pair.key}, "go together"),
        ({"tls_client_ca": authority.path}, r"needs serve\.http\.tls_cert"),
        ({"tls_cert": pair.certificate, "tls_key": str(folder / "none")}, "PEM files"),
        ({"tls_cert": pair.certificate, "tls_key": other.key}, "belong together"),
        ({"tls_cert": noise, "tls_key": pair.key}, "PEM files"),
        ({"tls_cert": pair.certificate, "tls_key": pair.key, "tls_client_ca": noise}, "PEM files"),
    ):
        config = ServeConfig(http=HttpConfig(port=0, **options))  # pyright: ignore[reportArgumentType]
        with pytest.raises(ConfigError, match=text):
            HttpDoor(None, config, DoorCounts(), KeyFiles(config))  # pyright: ignore[reportArgumentType]


def test_top_says_whom_it_trusts(server: Served, authority: Authority, capsys: pytest.CaptureFixture[str]) -> None:
    url = secure_url(server)
    assert cli.main(["top", url, "--once", "--tls-ca", authority.path]) == 0
    assert "fake" in capsys.readouterr().out
    assert cli.main(["top", url, "--once"]) == 2
    assert "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().err


def test_certificates_are_renewed_without_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of the server, and of the authority whose clients may connect; a connection that is open goes on."""
    first, second = (Authority(tmp_path, name) for name in ("first", "second"))
    ours, mine = first.issue("server"), first.issue("client")
    next_ours, next_mine = second.issue("next-server"), second.issue("next-client")
    ca = tmp_path / "clients.pem"
    ca.write_bytes(Path(first.path).read_bytes())
    with (
        http_served(serve_bytes(), tls_cert=ours.certificate, tls_key=ours.key, tls_client_ca=str(ca)) as server,
        browse(server, first, mine) as before,
    ):
        assert before.get("/health").status_code == 200
        with pytest.raises(httpx.TransportError):
            ask(server, first, next_mine)
        Path(ours.certificate).write_bytes(Path(next_ours.certificate).read_bytes())
        assert ask(server, first, mine) == ask(server, first, mine) == "bcd"
        assert caplog.text.count("the last certificates stay in use") == 1, "the key is still the old one"
        Path(ours.key).write_bytes(Path(next_ours.key).read_bytes())
        ca.write_bytes(Path(second.path).read_bytes())
        assert ask(server, second, next_mine) == "bcd"
        for trusted, shown in ((first, next_mine), (second, mine)):
            with pytest.raises(httpx.TransportError):
                ask(server, trusted, shown)
        assert before.get("/health").status_code == 200
