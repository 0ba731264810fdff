"""Each refused call has a line in the log, by which an operator finds it; a flood of them has a few and a count."""

import asyncio
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from route_parts import routed
from serve_parts import WAIT_S, Served, serve_bytes, served, wait_until

from jaxserve.config.schema import GrpcConfig, HttpConfig
from jaxserve.serve.counts import HTTP, DoorCounts, Refusal
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.gen import inference_pb2_grpc as pb_grpc
from jaxserve.serve.refusals import MOST, RefusalLog
from jaxserve.telemetry import JsonFormatter

KEY = "sk-one"
ASK = {"prompt": "a", "max_tokens": 2}
ONE = Refusal(HTTP, "not_found", "404", "other", "an-id")
OTHER = Refusal(HTTP, "unauthenticated", "401", "/v1/completions", None)


@pytest.fixture
def keyed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Served]:
    caplog.set_level(logging.INFO, "jaxserve")
    (tmp_path / "keys").write_text(f"{KEY}\n")
    grpc_config = GrpcConfig(port=0, tokens_file=str(tmp_path / "keys"))
    http_config = HttpConfig(port=0, api_keys_file=str(tmp_path / "keys"))
    with served(serve_bytes(), grpc_config=grpc_config, http_config=http_config, log_refusals=True) as parts:
        yield parts


def _lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "jaxserve.serve.refusals"]


def _fields(record: logging.LogRecord) -> tuple[str, str, str, str]:
    parsed = json.loads(JsonFormatter().format(record))
    return parsed["door"], parsed["route"], parsed["status"], parsed["reason"]


def test_each_refusal_over_http_has_a_line_with_the_id_that_its_caller_got(
    keyed: Served, caplog: pytest.LogCaptureFixture
) -> None:
    named = {"authorization": f"Bearer {KEY}", "x-request-id": "find-me"}
    with httpx.Client(base_url=keyed.http_url, timeout=WAIT_S) as client:
        answers = [
            client.post("/v1/completions", json=ASK | {"max_tokens": -1}, headers=named),
            client.post("/v1/completions", json=ASK, headers={"x-request-id": "keyless"}),
            client.get("/nothing", headers={"authorization": f"Bearer {KEY}"}),
        ]
        assert client.post("/v1/completions", json=ASK, headers=named).status_code == 200
    wait_until(lambda: len(_lines(caplog)) == 3, "a line for each")
    assert [_fields(record) for record in _lines(caplog)] == [
        ("http", "/v1/completions", "400", "invalid_request"),
        ("http", "/v1/completions", "401", "unauthenticated"),
        ("http", "other", "404", "not_found"),
    ]
    ids = [record.__dict__["request_id"] for record in _lines(caplog)]
    assert ids == [answer.headers["x-request-id"] for answer in answers]
    assert ids[:2] == ["find-me", "keyless"]
    assert len(ids[2]) == 32, "made by the server"
    assert _lines(caplog)[0].getMessage() == (
        "call 'find-me' was refused: door=http route=/v1/completions status=400 reason=invalid_request"
    )


def test_bytes_that_are_no_call_have_a_line_too(keyed: Served, caplog: pytest.LogCaptureFixture) -> None:
    host, port = keyed.http_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), WAIT_S) as connection:
        connection.sendall(b"this is no request\r\n\r\n")
        assert connection.recv(100)
    wait_until(lambda: bool(_lines(caplog)), "its line")
    assert _fields(_lines(caplog)[0]) == ("http", "other", "400", "invalid_request")


def test_each_refusal_over_grpc_has_a_line(keyed: Served, caplog: pytest.LogCaptureFixture) -> None:
    with grpc.insecure_channel(keyed.address) as channel:
        stub = pb_grpc.InferenceStub(channel)
        for request_id, key in (("mine", KEY), ("mine\nINFO all is well", KEY), ("mine", "wrong")):
            with pytest.raises(grpc.RpcError):
                list(
                    stub.Generate(
                        pb.GenerateRequest(text="a" * 9999, request_id=request_id),
                        metadata=(("authorization", f"Bearer {key}"),),
                    )
                )
    wait_until(lambda: len(_lines(caplog)) == 3, "a line for each")
    assert [_fields(record) for record in _lines(caplog)] == [
        ("grpc", "Generate", "INVALID_ARGUMENT", "prompt_too_long"),
        ("grpc", "Generate", "INVALID_ARGUMENT", "prompt_too_long"),
        ("grpc", "other", "UNAUTHENTICATED", "unauthenticated"),
    ]
    assert [record.__dict__["request_id"] for record in _lines(caplog)] == ["mine", None, None]


def test_a_router_logs_what_it_refuses(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve")
    with (
        routed("127.0.0.1:1", wait=False, log_requests=True) as router,
        grpc.insecure_channel(router.address) as channel,
    ):
        with pytest.raises(grpc.RpcError):
            list(pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="a")))
        wait_until(lambda: bool(_lines(caplog)), "its line")
    assert _fields(_lines(caplog)[0]) == ("grpc", "Generate", "UNAVAILABLE", "engine_stopped")


def test_nothing_is_logged_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "jaxserve")
    with served(serve_bytes(), http_config=HttpConfig(port=0)) as parts:
        assert httpx.get(f"{parts.http_url}/nothing").status_code == 404
    assert _lines(caplog) == []


def test_a_flood_has_some_lines_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve")

    async def flood() -> None:
        counts = DoorCounts()
        log = RefusalLog.begin(counts)
        for refusal in [ONE] * MOST + [OTHER, ONE, ONE]:
            counts.note_refusal(refusal)
        assert len(_lines(caplog)) == MOST
        log.end()
        counts.note_refusal(ONE)
        log.end()

    asyncio.run(flood())
    texts = [record.getMessage() for record in _lines(caplog)]
    assert len(texts) == MOST + 2
    assert texts[MOST] == "3 more calls were refused: http not_found: 2, http unauthenticated: 1"
    assert "'an-id'" in texts[-1], "there is room again"


def test_the_count_comes_when_the_flood_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve")

    async def flood() -> None:
        log = RefusalLog(window_s=0.01)
        for _ in range(MOST + 5):
            log.note(ONE)
        async with asyncio.timeout(WAIT_S):
            while len(_lines(caplog)) <= MOST:
                await asyncio.sleep(0.01)

    asyncio.run(flood())
    assert _lines(caplog)[-1].getMessage() == "5 more calls were refused: http not_found: 5"
