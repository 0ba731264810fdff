"""Certificates and tokens: who may connect, who may call, and that nobody else harms the service."""

import hmac
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from certificates import Authority, Pair
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from route_parts import routed
from serve_parts import WAIT_S, Served, serve_bytes, served

from jaxserve import cli
from jaxserve.api import SamplingParams
from jaxserve.client import AsyncClient, Client, RequestFailed, Tls
from jaxserve.config.schema import Config, GrpcConfig, RouteConfig, ServeConfig
from jaxserve.errors import ConfigError, Status
from jaxserve.serve.counts import DoorCounts
from jaxserve.serve.grpc_server import GrpcServer
from jaxserve.serve.key_files import KeyFiles
from jaxserve.serve.keys import KnownKeys, read_keys
from jaxserve.serve.route_access import BackendAccess

SHORT = SamplingParams(temperature=0.0, max_tokens=3)
TOKENS = "# people\nalpha-1\n\nbeta-2\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("access")
    (path / "tokens").write_text(TOKENS)
    return path


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
def mutual(authority: Authority, pair: Pair, folder: Path) -> Iterator[Served]:
    """Asks for a certificate of `authority`, and for a token."""
    config = GrpcConfig(
        port=0,
        tls_cert=pair.certificate,
        tls_key=pair.key,
        tls_client_ca=authority.path,
        tokens_file=str(folder / "tokens"),
    )
    with served(serve_bytes(), grpc_config=config) as server:
        yield server


@pytest.fixture
def ours(authority: Authority) -> Tls:
    mine = authority.issue("client")
    return Tls(ca=authority.path, certificate=mine.certificate, key=mine.key)


# ---- TLS -------------------------------------------------------------------------------------------------------------


def test_tls_answers_who_trusts_it_and_nobody_else(authority: Authority, stranger: Authority, pair: Pair) -> None:
    config = GrpcConfig(port=0, tls_cert=pair.certificate, tls_key=pair.key)
    with (
        served(serve_bytes(), grpc_config=config) as server,
        Client(server.address, tls=Tls(ca=authority.path)) as client,
        Client(server.address) as plain,
        Client(server.address, tls=Tls(ca=stranger.path)) as fooled,
    ):
        assert client.is_serving(timeout_s=WAIT_S)
        for other in (plain, fooled):
            assert not other.is_serving(timeout_s=WAIT_S)
            with pytest.raises(RequestFailed) as caught:
                other.complete("a", SHORT, timeout_s=WAIT_S)
            assert caught.value.status is Status.UNAVAILABLE
        assert client.complete("a", SHORT, timeout_s=WAIT_S).text == "bcd"


@pytest.mark.parametrize("who", ["nobody", "stranger", "expired"])
def test_mutual_tls_refuses_bad_peers(
    mutual: Served, authority: Authority, stranger: Authority, ours: Tls, who: str
) -> None:
    certificate = {"nobody": None, "stranger": stranger.issue("x"), "expired": authority.issue("old", age_days=9)}[who]
    bad = Tls(
        ca=authority.path, certificate=certificate and certificate.certificate, key=certificate and certificate.key
    )
    with Client(mutual.address, tls=bad, token="alpha-1") as client:
        assert not client.is_serving(timeout_s=WAIT_S)
        with pytest.raises(RequestFailed) as caught:
            client.complete("a", SHORT, timeout_s=WAIT_S)
        assert caught.value.status is Status.UNAVAILABLE
    with Client(mutual.address, tls=ours, token="alpha-1") as client:
        assert client.complete("a", SHORT, timeout_s=WAIT_S).text == "bcd"


def test_old_protocols_and_noise_are_refused(mutual: Served, ours: Tls) -> None:
    host, port = mutual.address.split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as raw:
        raw.sendall(b"\x00" * 4096)
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(4096):
            pass
    assert _shake_hands(mutual, ours, ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
    with pytest.warns(DeprecationWarning, match="TLSv1_1"), pytest.raises(OSError):  # noqa: PT011  (SSLError or a reset)
        _shake_hands(mutual, ours, ssl.TLSVersion.TLSv1_1)
    with Client(mutual.address, tls=ours, token="beta-2") as client:
        assert client.complete("a", SHORT, timeout_s=WAIT_S).text == "bcd"


def _shake_hands(server: Served, ours: Tls, newest: ssl.TLSVersion) -> str | None:
    """The version that a client gets which can do everything up to `newest`."""
    context = ssl.create_default_context(cafile=ours.ca)
    context.load_cert_chain(str(ours.certificate), ours.key)
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version, context.maximum_version = ssl.TLSVersion.MINIMUM_SUPPORTED, newest
    context.set_alpn_protocols(["h2"])
    host, port = server.address.split(":")
    with (
        socket.create_connection((host, int(port)), timeout=WAIT_S) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as secure,
    ):
        return secure.version()


def test_the_health_command_asks_over_tls(mutual: Served, ours: Tls, capsys: pytest.CaptureFixture[str]) -> None:
    mine = ["--ca", str(ours.ca), "--certificate", str(ours.certificate), "--key", str(ours.key)]
    assert cli.main(["health", mutual.address, *mine]) == 0
    assert cli.main(["health", mutual.address, *mine, "--server-name", "elsewhere"]) == 1
    assert cli.main(["health", mutual.address, "--ca", str(ours.ca), "--timeout", "1"]) == 1
    assert cli.main(["health", mutual.address, *mine[2:]]) == 2
    assert cli.main(["health", mutual.address, *mine[:4]]) == 2
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["SERVING", "NO_ANSWER", "NO_ANSWER"]
    assert "add --ca FILE" in err
    assert "needs its key" in err


async def test_the_asyncio_client_shows_its_certificate_and_token(mutual: Served, ours: Tls) -> None:
    async with AsyncClient(mutual.address, tls=ours, token="beta-2") as client:
        assert (await client.complete("a", SHORT, timeout_s=WAIT_S)).text == "bcd"
        assert (await client.load()).accepting


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, "alpha-", "alpha-11", "ALPHA-1", "#", "people"])
def test_no_token_or_a_wrong_one_is_unauthenticated(mutual: Served, ours: Tls, token: str | None) -> None:
    with Client(mutual.address, tls=ours, token=token) as client:
        assert client.is_serving(timeout_s=WAIT_S), "health is for balancers, which have no token"
        for ask in (client.model, client.load, lambda: client.abort("x"), lambda: client.tokenize("a")):
            with pytest.raises(RequestFailed, match="needs a token") as caught:
                ask()
            assert caught.value.status is Status.UNAUTHENTICATED
        with pytest.raises(RequestFailed, match="needs a token"):
            client.complete("a", SHORT, timeout_s=WAIT_S)
    assert mutual.engine.num_live == 0


def test_reflection_and_unknown_methods_need_a_token_too(folder: Path) -> None:
    config = GrpcConfig(port=0, tokens_file=str(folder / "tokens"))
    with served(serve_bytes(), grpc_config=config) as server, grpc.insecure_channel(server.address) as channel:
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        for header in ((), (("authorization", "alpha-1"),), (("authorization", "Basic alpha-1"),)):
            with pytest.raises(grpc.RpcError) as caught:
                list(reflection.ServerReflectionInfo(iter([listing]), timeout=WAIT_S, metadata=header))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        good = (("authorization", "bearer alpha-1"),)
        assert len(list(reflection.ServerReflectionInfo(iter([listing]), timeout=WAIT_S, metadata=good))) == 1
        unknown = channel.unary_unary("/jaxserve.v1.Inference/Nothing")
        for header, code in (((), grpc.StatusCode.UNAUTHENTICATED), (good, grpc.StatusCode.UNIMPLEMENTED)):
            with pytest.raises(grpc.RpcError) as caught:
                unknown(b"", timeout=WAIT_S, metadata=header)
            assert caught.value.code() is code
        twice = (*good, ("authorization", "bearer wrong"))
        with pytest.raises(grpc.RpcError) as caught:
            unknown(b"", timeout=WAIT_S, metadata=twice)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_every_known_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    real = hmac.compare_digest
    monkeypatch.setattr("jaxserve.serve.keys.hmac.compare_digest", lambda a, b: compared.append(b) or real(a, b))
    assert KnownKeys(["one", "two", "three"]).accept("Bearer one")
    assert len(compared) == 3
    assert {len(digest) for digest in compared} == {32}


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "ключ"])
def test_tokens_that_no_header_carries_are_refused_by_the_client(token: str) -> None:
    with pytest.raises(ConfigError, match="printable ASCII"):
        Client("127.0.0.1:1", token=token)


# ---- settings --------------------------------------------------------------------------------------------------------


def test_wrong_files_stop_the_start(folder: Path, pair: Pair, authority: Authority) -> None:
    (folder / "noise").write_text("no PEM")
    (folder / "empty").write_text("# nobody\n")
    other = authority.issue("other")
    cases = [
        ({"tls_cert": pair.certificate}, "go together"),
        ({"tls_client_ca": authority.path}, "needs serve.grpc.tls_cert"),
        ({"tls_cert": pair.certificate, "tls_key": str(folder / "none")}, "PEM files"),
        ({"tls_cert": pair.certificate, "tls_key": other.key}, "belong together"),
        ({"tls_cert": str(folder / "noise"), "tls_key": pair.key}, "PEM files"),
        ({"tls_cert": pair.certificate, "tls_key": pair.key, "tls_client_ca": str(folder / "noise")}, "PEM files"),
        ({"tokens_file": str(folder / "none")}, "cannot read"),
        ({"tokens_file": str(folder / "empty")}, "holds nothing"),
    ]
    for options, text in cases:
        config = ServeConfig(grpc=GrpcConfig(port=0, **options))
        with pytest.raises(ConfigError, match=text):
            GrpcServer(
                None, DoorCounts(), host="127.0.0.1", config=config.grpc, keys=KeyFiles(config), max_connections=1
            )
    assert read_keys(str(folder / "tokens"), "x") == ("alpha-1", "beta-2")


@pytest.mark.parametrize(
    "setting", ["serve.grpc.tokens_file", "serve.http.api_keys_file", "serve.grpc.tls_cert", "serve.http.tls_cert"]
)
def test_a_wrong_file_is_told_before_anything_is_loaded(
    setting: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jaxserve.run._built", lambda *_: pytest.fail("it loads"))
    ports = ["--set", "serve.grpc.port=0", "--set", "serve.http.port=0"]
    assert cli.main(["run", *ports, "--set", f"{setting}=/nowhere"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {setting}")


def test_a_client_certificate_needs_its_key() -> None:
    with pytest.raises(ConfigError, match="needs its key"):
        Tls(certificate="a.pem")
    with pytest.raises(ConfigError, match="cannot read"):
        Client("127.0.0.1:1", tls=Tls(ca="/nowhere/ca.pem"))


# ---- a router before servers with both -------------------------------------------------------------------------------


def test_a_router_has_a_certificate_and_a_token_of_its_own(mutual: Served, authority: Authority, folder: Path) -> None:
    mine = authority.issue("router")
    (folder / "router").write_text("beta-2\n")
    access = {
        "tls_ca": authority.path,
        "tls_cert": mine.certificate,
        "tls_key": mine.key,
        "token_file": str(folder / "router"),
    }
    with routed(mutual.address, access=access) as router, Client(router.address) as client:
        assert client.complete("a", SHORT, timeout_s=WAIT_S).text == "bcd"
        assert client.detokenize(client.tokenize("abc"), skip_special_tokens=True) == "abc"
        assert client.model().name == "fake"
        assert (client.load().num_replicas, client.load().num_pages) == (1, 256)
    for options, text in (
        ({"tls_cert": mine.certificate}, "go together"),
        ({"tls_name": "x"}, "set route.tls_ca"),
        ({"tls_ca": str(folder / "none")}, "cannot read"),
    ):
        with pytest.raises(ConfigError, match=text):
            BackendAccess.of(RouteConfig(**options))
    assert Config().route.tls_ca is None
