"""As many connections as there may be, and no descriptor left: probes are answered, idle connections give way, the log
stays short."""

import asyncio
import contextlib
import errno
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from http_parts import browse, http_served
from serve_parts import WAIT_S, serve_bytes, wait_until

from jaxserve.client import Client
from jaxserve.config.schema import HttpConfig, ServeConfig
from jaxserve.errors import ConfigError
from jaxserve.serve.descriptors import room_for_connections, room_for_grpc
from jaxserve.serve.http.connections import Acceptor, Connections
from jaxserve.serve.http.connections import Client as HttpClient
from jaxserve.serve.service import check_serve_config

ROOT = Path(__file__).parents[3]
SERVE = """
import sys
from serve_parts import serve_bytes
from jaxserve.config.schema import HttpConfig, ServeConfig
from jaxserve.config.schema import GrpcConfig, HttpConfig, ServeConfig
from jaxserve.serve.service import serve_forever
config = ServeConfig(http=HttpConfig(port=0), grpc=GrpcConfig(port=0))
sys.exit(serve_forever(serve_bytes().engine, config))
"""


@contextlib.contextmanager
def _process(folder: Path, soft: int, hard: int) -> Iterator[tuple[str, int, int, Path]]:
    """Host, ports of HTTP and of gRPC, and log of a server that was started under these limits."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "serve")])
    limits = f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "$0" -c "$1"'
    log = folder / "log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            ["bash", "-c", limits, sys.executable, SERVE],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=written,
            text=True,
        )
    try:
        assert process.stdout is not None
        addresses = {}
        for _ in range(2):
            line = process.stdout.readline()
            assert line.startswith("serving "), log.read_text()
            _, protocol, _, address = line.split()
            addresses[protocol] = address.rpartition(":")
        yield addresses["HTTP"][0], int(addresses["HTTP"][2]), int(addresses["gRPC"][2]), log
        process.terminate()
        process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.communicate()


def _ask(raw: socket.socket) -> bytes:
    """The answer to a probe; empty when the server has closed."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        raw.sendall(b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n")
        while not answer.endswith(b"}") and (part := raw.recv(4096)):
            answer += part
    return answer


def _ask_health(host: str, port: int) -> None:
    assert httpx.get(f"http://{host}:{port}/health", timeout=WAIT_S).status_code == 200


def test_more_idle_connections_than_descriptors(tmp_path: Path) -> None:
    """Whoever connects and stays keeps nobody out, and costs no line of the log."""
    with _process(tmp_path, 256, 256) as (host, port, grpc_port, log), contextlib.ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(socket.create_connection((host, grpc_port), timeout=WAIT_S))
        _ask_health(host, port)
        for number in range(300):
            raw = stack.enter_context(socket.create_connection((host, port), timeout=WAIT_S))
            if number % 3:
                assert _ask(raw).startswith(b"HTTP/1.1 200"), number
        _ask_health(host, port)
        body = {"prompt": "a", "max_tokens": 3}
        answer = httpx.post(f"http://{host}:{port}/v1/completions", json=body, timeout=WAIT_S)
        assert answer.json()["choices"][0]["text"] == "bcd"
        size = log.stat().st_size
        assert size < 4000, log.read_bytes()[:1000]


@pytest.mark.slow  # gRPC waits 10 s for the first byte of a connection
def test_idle_connections_of_grpc_give_way_in_time(tmp_path: Path) -> None:
    with _process(tmp_path, 256, 256) as (host, _, grpc_port, _), contextlib.ExitStack() as stack:
        for _ in range(60):  # more than there may be
            stack.enter_context(socket.create_connection((host, grpc_port), timeout=WAIT_S))
        with Client(f"{host}:{grpc_port}") as client:
            assert client.is_serving(timeout_s=WAIT_S, wait_for_ready=True)


def test_the_soft_limit_is_raised(tmp_path: Path) -> None:
    hard = 700
    with _process(tmp_path, 128, hard) as (host, port, _, _), contextlib.ExitStack() as stack:
        held = []
        for _ in range(400):
            held.append(stack.enter_context(socket.create_connection((host, port), timeout=WAIT_S)))
            assert _ask(held[-1]).startswith(b"HTTP/1.1 200")
        answers = [_ask(raw)[:12] for raw in held]
        assert answers == [b"HTTP/1.1 200"] * 400, "none had to go"


def test_the_one_that_was_idle_for_longest_gives_way() -> None:
    with http_served(serve_bytes(), max_connections=3) as parts, contextlib.ExitStack() as stack:
        host, port = parts.http_url.removeprefix("http://").split(":")
        held = []
        for _ in range(3):
            held.append(stack.enter_context(socket.create_connection((host, int(port)), timeout=WAIT_S)))
            assert _ask(held[-1])
        assert _ask(held[0]), "now the second has been idle for longest"
        fourth = stack.enter_context(socket.create_connection((host, int(port)), timeout=WAIT_S))
        assert _ask(fourth).startswith(b"HTTP/1.1 200")
        assert _ask(held[1]) == b""
        assert all(_ask(raw) for raw in (held[0], held[2], fourth))


def test_probes_are_answered_when_all_connections_are_busy() -> None:
    with http_served(serve_bytes(), max_connections=2) as parts, ThreadPoolExecutor(2) as pool:
        url, ask = parts.http_url, {"prompt": "a", "max_tokens": 3}
        parts.runner.hold()
        running = [pool.submit(httpx.post, f"{url}/v1/completions", json=ask, timeout=WAIT_S) for _ in range(2)]
        wait_until(lambda: parts.engine.num_unstarted == 2, "both connections are busy")
        for _ in range(40):
            probe = httpx.get(f"{url}/health", timeout=WAIT_S)
            assert (probe.status_code, probe.headers["connection"]) == (200, "close")
        refused = httpx.post(f"{url}/v1/completions", json=ask, timeout=WAIT_S)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert "serve.http.max_connections" in json.loads(refused.text)["error"]["message"]
        parts.runner.release()
        assert [post.result(WAIT_S).status_code for post in running] == [200, 200]
        with browse(parts) as client:
            assert client.post("/v1/completions", json=ask).status_code == 200
            text = client.get("/metrics").text
        (counted,) = [line for line in text.splitlines() if 'reason="too_many_connections"' in line]
        assert counted.endswith(" 1.0")


class _Full(socket.socket):
    """A listening socket of a process without descriptors."""

    num_tries = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.num_tries += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class _Idle(HttpClient):
    is_closed = False

    def abandon(self) -> None:
        self.is_closed = True


async def test_without_descriptors_one_line_is_logged_and_idle_connections_go(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system goes on saying that somebody waits: who believes it tries, and logs, thousands of times a second."""
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr("jaxserve.serve.http.connections._PAUSE_S", 3600.0)
    connections, idle = Connections(100), _Idle()
    connections.add(idle, asyncio.ensure_future(asyncio.sleep(0)))
    with _Full(socket.AF_INET, socket.SOCK_STREAM) as full:
        full.bind(("127.0.0.1", 0))
        full.listen()
        full.setblocking(False)
        acceptor = Acceptor(full, _Idle, connections, None, 1.0)
        try:
            with socket.create_connection(full.getsockname()):
                while not full.num_tries:
                    await asyncio.sleep(0.01)
                for _ in range(20):
                    await asyncio.sleep(0.001)
        finally:
            acceptor.close()
    assert full.num_tries == len(caplog.records) == 1
    assert "Too many open files" in caplog.text
    assert idle.is_closed and len(connections) == 0


def test_how_many_fit() -> None:
    assert room_for_connections(None, 256) == 144
    assert room_for_connections(None, 1024) == 720
    assert room_for_connections(None, 2**20) == 2**14
    assert room_for_connections(40_000, 2**20) == 40_000
    assert room_for_connections(None, 70) == 4
    assert room_for_grpc(144, 256) == 48
    assert room_for_grpc(0, 1024) == 960
    assert room_for_grpc(960, 1024) == 8
    assert room_for_grpc(0, 2**20) == 2**14
    with pytest.raises(ConfigError, match="at most 960 connections"):
        room_for_connections(1000, 1024)
    with pytest.raises(ConfigError, match=r"serve\.http\.max_connections is 16777216"):
        check_serve_config(ServeConfig(http=HttpConfig(port=0, max_connections=2**24)))
