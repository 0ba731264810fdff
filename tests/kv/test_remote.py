"""`jaxserve kv-server` and its client: limits, certificates, a server that dies, and one that lies."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import pytest
from certificates import Authority, Pair
from kv_servers import SECRET, WAIT_S, KVServer, connect

from jaxserve.client import Client
from jaxserve.config import load_config
from jaxserve.config.addresses import is_loopback
from jaxserve.config.schema import KVServerConfig
from jaxserve.errors import ConfigError
from jaxserve.kv.conformance import AMPLE_S, LAYOUT, SCOPES, get, key_of, page_of, put
from jaxserve.kv.gen import pages_pb2 as pb
from jaxserve.kv.gen import pages_pb2_grpc as pb_grpc
from jaxserve.kv.guarded import Guarded
from jaxserve.kv.memory_store import MemoryStore
from jaxserve.kv.names import BlobName
from jaxserve.kv.page_format import PageLayout
from jaxserve.kv.remote import remote_store
from jaxserve.kv.store import Outcome, StoreOptions, StoreUnavailable
from jaxserve.serve.kv_server import PagesService

GOOD = pb.Name(scope="0" * 32, page="1" * 48)


def serve(**settings: object) -> KVServer:
    return KVServer(KVServerConfig.model_validate(settings))


def test_names_and_sizes_are_checked(tmp_path: Path) -> None:
    server = serve(directory=str(tmp_path / "s"), max_page_bytes=2000)
    (tmp_path / "secret of somebody").write_text("x")
    with grpc.insecure_channel(server.address) as channel:
        stub = pb_grpc.PagesStub(channel)

        def code(method: str, request: object) -> grpc.StatusCode:
            with pytest.raises(grpc.RpcError) as caught:
                getattr(stub, method)(request, timeout=WAIT_S)
            return caught.value.code()  # type: ignore[attr-defined]

        invalid, exhausted = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
        for scope, page in [("..", "1" * 48), ("0" * 32, "../../secret of somebody"), ("0" * 32, "A" * 48), ("", "")]:
            bad = pb.Name(scope=scope, page=page)
            assert code("Read", pb.ReadRequest(name=bad, max_bytes=10)) == invalid
            assert code("Write", pb.WriteRequest(name=bad, data=b"x")) == invalid
            assert code("Delete", pb.DeleteRequest(names=[bad])) == invalid
            assert code("SetAside", pb.SetAsideRequest(name=bad)) == invalid
        assert code("Flush", pb.FlushRequest(scope="..")) == invalid
        assert code("Exists", pb.ExistsRequest(names=[GOOD] * 257)) == invalid
        assert code("Write", pb.WriteRequest(name=GOOD, data=bytes(2001))) == exhausted
        assert code("Write", pb.WriteRequest(name=GOOD, data=bytes(100_000))) == exhausted, "by gRPC itself"
        assert stub.Write(pb.WriteRequest(name=GOOD, data=b"seven b"), timeout=WAIT_S).taken
        assert stub.Read(pb.ReadRequest(name=GOOD, max_bytes=7), timeout=WAIT_S).data == b"seven b"
        short = stub.Read(pb.ReadRequest(name=GOOD, max_bytes=6), timeout=WAIT_S)
        assert not short.HasField("data") and "7 bytes, of 6" in short.unfit
    server.stop()


@pytest.mark.parametrize(
    "method", [f"{pb.DESCRIPTOR.services_by_name['Pages'].full_name}/Read", "grpc.health.v1.Health/Check"]
)
def test_what_cannot_be_decoded_is_no_defect_of_the_server(method: str, caplog: pytest.LogCaptureFixture) -> None:
    server = serve()

    with grpc.insecure_channel(server.address) as channel:
        for body in (b"\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/{method}")(body, timeout=WAIT_S)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    server.stop()
    assert "Traceback" not in caplog.text and not caplog.records


def test_a_server_that_lies_is_found_out() -> None:
    """It has the bytes of a page, and not the secret."""
    server = serve()
    mine = connect(server, LAYOUT)
    put(mine, [key_of(1)])
    thief = remote_store(LAYOUT, StoreOptions(location=server.address, secret=b"another secret, as long as 32 bytes"))
    assert get(thief, [key_of(1)]) == [Outcome.MISS]
    with grpc.insecure_channel(server.address) as channel:
        name = mine._name(key_of(1))
        write = pb.WriteRequest(name=pb.Name(scope=name.scope, page=name.page), data=b"chosen by the server")
        assert pb_grpc.PagesStub(channel).Write(write, timeout=WAIT_S).taken
    assert get(mine, [key_of(1)]) == [Outcome.BAD]
    assert get(mine, [key_of(1)]) == [Outcome.MISS]
    thief.close()
    mine.close()
    server.stop()


def test_a_server_is_bounded_by_its_policy() -> None:
    server = serve(max_bytes=30_000, max_page_bytes=2000, admission="always")
    store = connect(server, LAYOUT)
    keys = [key_of(number) for number in range(60)]
    for key in keys:
        put(store, [key])
    there = store.contains(keys)
    assert there == sorted(there) and 15 < sum(there) < 30, "the last ones are there"
    store.close()
    server.stop()


def test_a_page_whose_client_has_gone_is_not_stored() -> None:
    """It waited for a thread, and is deleted meanwhile, since the client's put was late."""

    class Ended:
        def is_active(self) -> bool:
            return False

        def abort(self, code: grpc.StatusCode, details: str) -> None:
            raise grpc.RpcError(code, details)

    blobs = MemoryStore(None, 1 << 20)
    service = PagesService(blobs, max_page_bytes=2000)
    with pytest.raises(grpc.RpcError, match="the call has ended"):
        service.Write(pb.WriteRequest(name=GOOD, data=b"late"), Ended())  # type: ignore[arg-type]
    assert blobs.exists([BlobName(GOOD.scope, GOOD.page)], 1.0) == [False]


def test_a_write_that_was_late_is_waited_for_by_a_deletion(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has the page in hand when the client's patience ends; the deletion comes after it, not between."""
    entered, go, write, delete = threading.Event(), threading.Event(), MemoryStore.write, MemoryStore.delete
    order: list[str] = []

    def slowly(self: MemoryStore, name: BlobName, data: bytes, timeout_s: float) -> bool:
        entered.set()
        assert go.wait(WAIT_S)
        order.append("write")
        return write(self, name, data, timeout_s)

    def delete_in_order(self: MemoryStore, names: Sequence[BlobName], timeout_s: float) -> None:
        order.append("delete")
        delete(self, names, timeout_s)

    monkeypatch.setattr(MemoryStore, "write", slowly)
    monkeypatch.setattr(MemoryStore, "delete", delete_in_order)
    server = serve()
    store = connect(server, LAYOUT)
    go.set()
    put(store, [key_of(2)])  # the connection is there now
    go.clear()
    entered.clear()
    order.clear()
    assert store.put([key_of(1)], [memoryview(page_of(key_of(1)))], 0.5) == [Outcome.LATE]
    assert entered.wait(WAIT_S)
    deleting = threading.Thread(target=store.delete, args=([key_of(1)],))
    deleting.start()
    deleting.join(0.1)  # time for a deletion that would not wait
    go.set()
    deleting.join(WAIT_S)
    assert not deleting.is_alive() and store.contains([key_of(1)]) == [False]
    assert order == ["write", "delete"]
    store.close()
    server.stop()


@pytest.fixture
def pairs(tmp_path: Path) -> tuple[Authority, Pair, Pair]:
    authority = Authority(tmp_path, "ca")
    return authority, authority.issue("server"), authority.issue("client")


def test_mutual_tls(tmp_path: Path, pairs: tuple[Authority, Pair, Pair]) -> None:
    authority, server_pair, client_pair = pairs
    server = serve(tls_cert=server_pair.certificate, tls_key=server_pair.key, tls_client_ca=authority.path)
    tls = {"tls_ca": authority.path, "tls_cert": client_pair.certificate, "tls_key": client_pair.key}
    store = connect(server, LAYOUT, **tls)
    put(store, [key_of(1)])
    assert get(store, [key_of(1)]) == [Outcome.OK]
    strangers = Authority(tmp_path, "strangers")
    stranger = strangers.issue("stranger")
    for bad in (
        {**tls, "tls_cert": stranger.certificate, "tls_key": stranger.key},
        {**tls, "tls_ca": strangers.path},
        {},
    ):
        outsider = connect(server, LAYOUT, **bad)
        assert outsider.put([key_of(2)], [memoryview(page_of(key_of(2)))], 2.0)[0] in (Outcome.FAILED, Outcome.LATE)
        with pytest.raises(StoreUnavailable):
            outsider.flush(None)
        outsider.close()
    assert get(store, [key_of(1), key_of(2)]) == [Outcome.OK, Outcome.MISS]
    store.close()
    server.stop()


def test_certificates_are_renewed_without_a_restart(
    tmp_path: Path, pairs: tuple[Authority, Pair, Pair], caplog: pytest.LogCaptureFixture
) -> None:
    authority, server_pair, client_pair = pairs
    server = serve(tls_cert=server_pair.certificate, tls_key=server_pair.key, tls_client_ca=authority.path)
    (tmp_path / "new").mkdir()
    newer = Authority(tmp_path / "new", "newer")
    next_pair, next_client = newer.issue("server"), newer.issue("client")
    old = {"tls_ca": authority.path, "tls_cert": client_pair.certificate, "tls_key": client_pair.key}
    new = {"tls_ca": newer.path, "tls_cert": next_client.certificate, "tls_key": next_client.key}

    def reaches(tls: dict[str, str]) -> bool:
        store = connect(server, LAYOUT, **tls)
        outcome = store.put([key_of(1)], [memoryview(page_of(key_of(1)))], 5.0)
        store.close()
        return outcome == [Outcome.OK]

    old_ca = Path(authority.path).read_bytes()
    assert reaches(old) and not reaches(new)
    Path(server_pair.key).write_text("half of a file")
    with caplog.at_level(logging.WARNING):
        assert reaches(old) and reaches(old)
    assert caplog.text.count("the last certificates stay in use") == 1
    Path(server_pair.certificate).write_bytes(Path(next_pair.certificate).read_bytes())
    Path(server_pair.key).write_bytes(Path(next_pair.key).read_bytes())
    Path(authority.path).write_bytes(Path(newer.path).read_bytes())
    assert reaches(new)
    Path(authority.path).write_bytes(old_ca)
    assert not reaches(old), "its server's certificate is not one of the old authority any more"
    server.stop()


def test_a_dead_server_costs_three_calls_and_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = serve(directory=str(tmp_path / "s"))
    now_s = [0.0]
    inner = connect(server, LAYOUT)
    store = Guarded(inner, clock=lambda: now_s[0])
    put(store, [key_of(1)])
    port = server.address.rpartition(":")[2]
    server.stop()
    with caplog.at_level(logging.WARNING):
        start = time.monotonic()
        for _ in range(50):
            assert get(store, [key_of(1)], 2.0)[0] in (Outcome.FAILED, Outcome.LATE)
        assert time.monotonic() - start < AMPLE_S
    assert store.counts["opened"] == 1 and store.counts["skipped"] == 47
    with pytest.raises(StoreUnavailable):
        store.flush(SCOPES[0])
    again = serve(directory=str(tmp_path / "s"), port=int(port))
    for _ in range(100):  # until gRPC has connected again
        now_s[0] += 100.0
        if get(store, [key_of(1)], 2.0) == [Outcome.OK]:
            break
        time.sleep(0.1)
    assert get(store, [key_of(1)], 2.0) == [Outcome.OK]
    store.close()
    again.stop()


def test_what_may_not_listen_or_connect(tmp_path: Path, pairs: tuple[Authority, Pair, Pair]) -> None:
    authority, server_pair, _ = pairs
    tls = {"tls_cert": server_pair.certificate, "tls_key": server_pair.key}
    for settings in ({}, tls):
        with pytest.raises(ConfigError, match=r"clients must show a certificate.*tls_client_ca"):
            serve(host="0.0.0.0", **settings)
    with pytest.raises(ConfigError, match=r"kv_server.max_bytes is 1024, less than"):
        serve(max_bytes=1024)
    with pytest.raises(ConfigError, match="no tier policy is called 'lruu'"):
        serve(policy="lruu")
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="mode 755"):
        serve(directory=str(tmp_path / "open"))
    options = StoreOptions(location="10.0.0.1:7000", secret=SECRET)
    with pytest.raises(ConfigError, match="another machine; set tls_ca, tls_cert and tls_key"):
        remote_store(LAYOUT, options)
    for location in ("127.0.0.1", "127.0.0.1:port"):
        with pytest.raises(ConfigError, match="must be HOST:PORT"):
            remote_store(LAYOUT, StoreOptions(location=location, secret=SECRET))
    with pytest.raises(ConfigError, match="needs all of.*not set: tls_cert, tls_key"):
        remote_store(LAYOUT, StoreOptions(location="h:1", secret=SECRET, tls_ca=authority.path))
    with pytest.raises(ConfigError, match="tls_name is set, but TLS .* needs all of tls_ca, tls_cert and tls_key"):
        remote_store(LAYOUT, StoreOptions(location="127.0.0.1:1", secret=SECRET, tls_name="pages"))
    whole = {"tls_ca": authority.path, "tls_cert": server_pair.certificate, "tls_key": server_pair.key}
    for name, path, words in (
        ("tls_ca", server_pair.key, "the remote store's tls_ca: .* holds no certificates"),
        ("tls_key", authority.path, "are no pair of PEM files"),
        ("tls_cert", str(tmp_path / "none"), "the remote store's tls_cert: cannot read"),
    ):
        with pytest.raises(ConfigError, match=words):
            remote_store(LAYOUT, StoreOptions(location="h:1", secret=SECRET, **{**whole, name: path}))
    with pytest.raises(ConfigError, match="needs a secret"):
        remote_store(LAYOUT, StoreOptions(location="127.0.0.1:1"))
    with pytest.raises(ConfigError, match="no use for max_bytes"):
        remote_store(LAYOUT, StoreOptions(location="127.0.0.1:1", secret=SECRET, max_bytes=1))


def test_loopback() -> None:
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.1.2.3", "::1", "[::1]"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", ""]))


# The command, but a read of a page hangs once there is a file HANG, and says so.
COMMAND = """
import pathlib, runpy, sys, time
from jaxserve.kv.file_store import DirectoryBlobs
from jaxserve.serve import kv_server

hang, read = pathlib.Path(sys.argv.pop(1)), DirectoryBlobs.read
kv_server._GRACE_S = float(sys.argv.pop(1))

def reading(*args):
    while hang.exists():
        hang.with_name("hanging").touch()
        time.sleep(0.01)
    return read(*args)

DirectoryBlobs.read = reading
runpy.run_module("jaxserve", run_name="__main__")
"""


@pytest.mark.parametrize(("grace_s", "signals"), [(0.1, 1), (1e6, 2)])
def test_the_command(tmp_path: Path, grace_s: float, signals: int) -> None:
    """A process of its own, as an operator starts it: it answers health, keeps pages and ends at a signal.

    A read that hangs gets the grace alone, and a second signal ends that.
    """
    arguments = [str(tmp_path / "hang"), str(grace_s), "kv-server", "--directory", str(tmp_path / "s")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        host, _, port = line.split()[3].rstrip(",").rpartition(":")
        with Client(f"{host}:{port}") as client:
            assert client.check_health(timeout_s=WAIT_S)
        store = remote_store(LAYOUT, StoreOptions(location=f"{host}:{port}", secret=SECRET, compression="auto"))
        put(store, [key_of(1)])
        assert get(store, [key_of(1)]) == [Outcome.OK]
        assert len(list((tmp_path / "s" / "pages").rglob("*"))) == 2
        (tmp_path / "hang").touch()
        reading = threading.Thread(target=get, args=(store, [key_of(1)], WAIT_S))
        reading.start()
        until((tmp_path / "hanging").exists)
        process.send_signal(signal.SIGTERM)
        if signals == 2:
            until(lambda: not listens(host, int(port)))
            process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
        reading.join(WAIT_S)
        store.close()
    finally:
        process.kill()
        process.communicate()


def until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.01)


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port)).close()
    except ConnectionRefusedError:
        return False
    return True


def test_paths_of_its_config_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("kv_server: {directory: pages, tls_cert: a.pem}\n")
    config = load_config(tmp_path / "c.yaml").config.kv_server
    assert (config.directory, config.tls_cert) == (str(tmp_path / "pages"), str(tmp_path / "a.pem"))


def test_large_pages_cross(tmp_path: Path) -> None:
    layout = PageLayout(namespace="large", dtype="bfloat16", shape=(1,), element_bytes=2, page_bytes=9 << 20)
    server = serve()
    store = connect(server, layout)
    page, buffer = os.urandom(9 << 20), bytearray(9 << 20)
    assert store.put([key_of(1)], [memoryview(page)], AMPLE_S) == [Outcome.OK]
    assert store.get([key_of(1)], [memoryview(buffer)], AMPLE_S) == [Outcome.OK]
    assert buffer == page
    store.close()
    server.stop()
