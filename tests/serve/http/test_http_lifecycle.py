"""Who leaves, and how all ends: clients, the engine, the operator. HTTP beside gRPC, in one process."""

import asyncio
import contextlib
import json
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_parts import NO_GRPC, browse, http_served
from serve_parts import LONG as GRPC_LONG
from serve_parts import (
    LONG_TOKENS,
    WAIT_S,
    Served,
    connect,
    lines_told,
    serve_bytes,
    serve_slowly,
    served,
    stall,
    wait_until,
)

from jaxserve.config.schema import GrpcConfig, HttpConfig, ServeConfig
from jaxserve.errors import ConfigError
from jaxserve.serve import shutdown
from jaxserve.serve.counts import DoorCounts
from jaxserve.serve.http.server import HttpServer
from jaxserve.serve.service import HUNG, Shutdown, check_serve_config, serve
from jaxserve.testing import ManualClock

LONG = {"prompt": "a", "max_tokens": LONG_TOKENS}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": LONG_TOKENS}
SHORT = {"prompt": "a", "max_tokens": 5}


@pytest.fixture
def server() -> Iterator[Served]:
    with http_served(serve_slowly(max_rows=4)) as parts:
        yield parts


def assert_all_free(server: Served) -> None:
    wait_until(lambda: not server.scheduler.has_work() and server.scheduler.num_held_pages == 0, "pages are free")
    assert server.runner.inner.num_steps < LONG_TOKENS, "it ran to its end"
    wait_until(lambda: server.engine.num_live == 0, "nobody is left")
    server.scheduler.check()


def last_error(lines: list[str]) -> dict[str, Any]:
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    return json.loads(events[-2])["error"]


# ---- clients that leave ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**LONG, "stream": True}),
        ("/v1/completions", {**LONG, "prompt": ["a", "b"], "n": 2, "stream": True}),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
    ],
)
def test_leaving_a_stream_frees_its_pages(server: Served, path: str, body: dict[str, Any]) -> None:
    with browse(server) as client, client.stream("POST", path, json=body) as response:
        lines = response.iter_lines()
        for _ in range(8):
            next(lines)
        assert server.scheduler.num_held_pages > 0
    assert_all_free(server)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_leaving_before_an_answer_in_one_piece_frees_its_pages(server: Served, path: str) -> None:
    """Nothing is written to such a client until the end, so that only its connection tells that it has gone."""
    with post(server, LONG if path == "/v1/completions" else CHAT, path):
        wait_until(lambda: server.runner.inner.num_steps > 0, "it runs")
    assert_all_free(server)


def post(server: Served, body: dict[str, Any], path: str = "/v1/completions", then: str = "") -> socket.socket:
    """A connection on which a request was sent, whose end of it closes when the block ends."""
    host, port = server.http_url.removeprefix("http://").split(":")
    text = json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\nContent-Length: {len(text)}"
    raw = socket.create_connection((host, int(port)), timeout=WAIT_S)
    raw.sendall(f"{head}\r\n\r\n{text}{then}".encode())
    return raw


@pytest.mark.parametrize("ahead", ["GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n", "GET /live HT"])
@pytest.mark.parametrize("leaves", [True, False])
def test_a_request_before_its_turn_changes_nothing_for_the_first(ahead: str, leaves: bool) -> None:
    """It is not taken; the first is answered, or its end is noticed, and the connection is closed."""
    body = LONG if leaves else {**SHORT, "max_tokens": 100}
    with http_served(serve_slowly()) as server:
        with post(server, body, then=ahead) as raw:
            if leaves:
                wait_until(lambda: server.engine.num_live == 1, "it runs")
            else:
                answer = b"".join(iter(lambda: raw.recv(65536), b""))
                assert answer.startswith(b"HTTP/1.1 200")
                assert answer.count(b"HTTP/1.1") == 1
                assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 100
        assert_all_free(server)


def test_an_end_is_seen_within_a_step(server: Served) -> None:
    """While a step is held the abort waits in the inbox; the turn after it ends must already have freed the pages."""
    with post(server, {**LONG, "stream": True}) as raw:
        assert raw.recv(12) == b"HTTP/1.1 200"
        server.runner.hold()
        wait_until(lambda: server.runner.is_held, "the loop waits in a step")
        steps = server.runner.inner.num_steps
        # With a reset: an end alone may be that of a client that waits, and nothing is sent meanwhile that would tell.
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: not server.engine._inbox.empty(), "the abort is in the inbox")
    server.runner.release()
    assert_all_free(server)
    assert server.runner.inner.num_steps - steps <= 1


def test_leaving_a_full_house(server: Served) -> None:
    """Those that wait for a row leave, too."""
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(post(server, LONG))
        wait_until(lambda: server.engine.num_live == 12, "all have come")
    assert_all_free(server)
    with browse(server) as client:
        assert client.post("/v1/completions", json=SHORT).json()["choices"][0]["text"] == "bcdef"


# ---- the engine that fails -------------------------------------------------------------------------------------------


def test_a_dead_engine_ends_streams_and_turns_health_red(server: Served) -> None:
    with browse(server) as client, ThreadPoolExecutor(1) as pool:
        whole = pool.submit(client.post, "/v1/chat/completions", json=CHAT)
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.runner.broken = True
            assert last_error(list(lines))["type"] == "service_unavailable_error"
        assert whole.result(WAIT_S).status_code == 503
        # The process ends, too; until then it must not look well.
        with contextlib.suppress(httpx.TransportError):
            for path in ("/health", "/live", "/ready"):
                assert client.get(path).status_code == 503
            assert client.post("/v1/completions", json=SHORT).status_code == 503
    assert server.wait_for_exit() == 1


def test_a_stalled_engine_is_not_ready_and_then_ends() -> None:
    """Through both doors: at the deadline readiness turns red, at twice the deadline streams end, and the process."""
    http, clock = HttpConfig(port=0), ManualClock()
    with (
        served(serve_slowly(clock=clock, deadline_s=3.0), http_config=http) as server,
        connect(server) as client,
        browse(server) as browser,
        browser.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response,
    ):
        replies, lines = client.generate("a", GRPC_LONG, timeout_s=WAIT_S), response.iter_lines()
        next(replies)
        next(lines)
        stall(server, clock, lambda: server.engine.red)
        with browse(server) as other:
            assert [other.get(path).status_code for path in ("/ready", "/health", "/live")] == [503, 503, 200]
            assert "step has not ended" in other.get("/ready").json()["reason"]
        wait_until(lambda: not client.is_serving(timeout_s=WAIT_S), "readiness turns red there, too")
        assert client.is_serving("live", timeout_s=WAIT_S)
        stall(server, clock, lambda: server.engine.failure is not None)
        error = last_error(list(lines))  # ends although the device does not
        assert error["type"] == "service_unavailable_error"
        assert "device may be stuck" in error["message"]
        with pytest.raises(Exception, match="device may be stuck"):
            list(replies)
    assert server.wait_for_exit() == HUNG


# ---- the operator ----------------------------------------------------------------------------------------------------


def test_a_drain_lets_the_running_finish_and_takes_no_more() -> None:
    with http_served(serve_bytes()) as server, browse(server) as client:
        server.runner.hold(after=4)
        with client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 100, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.request_shutdown()
            wait_until(lambda: not server.engine.accepting, "it drains")
            with browse(server) as other:
                assert [other.get(path).status_code for path in ("/ready", "/health", "/live")] == [503, 503, 200]
                refused = other.post("/v1/completions", json=SHORT)
                assert refused.status_code == 503
                assert "retry-after" in refused.headers
            server.runner.release()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert server.wait_for_exit() == 0


def test_the_second_request_to_stop_cuts_off_and_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "_HURRY_S", WAIT_S)
    with http_served(serve_slowly()) as server, browse(server) as client:
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.request_shutdown()
            server.request_shutdown()
            assert "shut down before the end" in last_error(list(lines))["message"]
        assert server.wait_for_exit() == 0
        assert_all_free(server)


_SERVE_BOTH = """
import sys
sys.path[:0] = [{here!r}]
from jaxserve.config.schema import Config, GrpcConfig, HttpConfig, ServeConfig
from jaxserve.serve import shutdown
from jaxserve.serve.service import serve_forever
from serve_parts import WAIT_S, serve_slowly

shutdown._HURRY_S = WAIT_S
config = ServeConfig(drain_s=float(sys.argv[1]), grpc=GrpcConfig(port=0), http=HttpConfig(port=0))
sys.exit(serve_forever(serve_slowly(0.01).engine, config))
"""


@pytest.mark.parametrize("signals", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_sigterm_ends_both_doors(signals: int) -> None:
    """Once: the running requests get their time. Twice: they end at once. Exit code 0 either way."""
    script = _SERVE_BOTH.format(here=str(Path(__file__).parents[1]))
    with subprocess.Popen(
        [sys.executable, "-c", script, str(WAIT_S)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline(), process.stdout.readline()]
            assert [line.split(" on ")[0] for line in lines] == ["serving gRPC", "serving HTTP"]
            url = "http://" + lines[1].split(" on ")[1].strip()
            body = {**LONG, "max_tokens": 100 if signals == 1 else LONG_TOKENS, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_S) as response:
                received = response.iter_lines()
                next(received)
                process.send_signal(signal.SIGTERM)
                if signals == 2:
                    wait_until(lambda: _ready(url) != 200, "it drains")
                    process.send_signal(signal.SIGTERM)
                rest = [line for line in received if line]
            assert rest[-1] == "data: [DONE]"
            assert ("error" in json.loads(rest[-2].removeprefix("data: "))) == (signals == 2)
            out, err = process.communicate(timeout=WAIT_S)
            told = ["1 requests are handed over"] if signals == 2 else []
            assert (process.returncode, out, lines_told(err)) == (0, "", told)
        finally:
            process.kill()


def _ready(url: str) -> int:
    return httpx.get(f"{url}/ready", timeout=WAIT_S).status_code


async def test_an_event_does_not_wait_for_the_acknowledgement_of_the_one_before() -> None:
    """Nagle's algorithm is off: clients that acknowledge late (40 ms on Linux) would get their tokens in clumps."""

    async def nothing(scope: Any, receive: Any, send: Any) -> None: ...

    server = HttpServer(
        nothing, host="127.0.0.1", port=0, header_timeout_s=WAIT_S, max_connections=8, counts=DoorCounts()
    )
    _, writer = await asyncio.open_connection("127.0.0.1", await server.start())
    try:
        async with asyncio.timeout(WAIT_S):
            while not (connections := server._server.server_state.connections):
                await asyncio.sleep(0.001)
        (connection,) = connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
    finally:
        writer.close()
        await server.stop(0)


def test_a_port_in_use_is_a_config_error(server: Served) -> None:
    other = serve_bytes()
    port = int(server.http_url.rsplit(":", 1)[1])
    config = ServeConfig(grpc=GrpcConfig(port=0), http=HttpConfig(port=port))
    with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*serve\.http\.port"):
        asyncio.run(asyncio.wait_for(serve(other.engine, config, Shutdown()), WAIT_S))


def test_no_door_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"serve\.grpc\.port or serve\.http\.port"):
        check_serve_config(ServeConfig(grpc=NO_GRPC))
