"""What the doors say of a request to those who look: its trace is handed on, and its text is in no log line."""

import json
import logging
import re
import sys

import grpc
import httpx
import pytest
from serve_parts import Served, serve_bytes, served, wait_until

from jaxserve.config.schema import HttpConfig, RuntimeConfig
from jaxserve.engine import RequestStats, RequestTimes, Reranker
from jaxserve.errors import ConfigError, how_to_install
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.gen import inference_pb2_grpc as pb_grpc
from jaxserve.telemetry import JsonFormatter, observe_requests

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "hunter2"


def _post(parts: Served, path: str, body: dict[str, object]) -> int:
    return httpx.post(f"{parts.http_url}{path}", json=body, headers={"traceparent": PARENT}).status_code


JUDGES = Reranker(template="{query} {document}", instruction="", yes_id=ord("y"), no_id=ord("n"))


def _generate(parts: Served, message: pb.GenerateRequest) -> grpc.StatusCode:
    with grpc.insecure_channel(parts.address) as channel:
        try:
            list(pb_grpc.InferenceStub(channel).Generate(message, metadata=(("traceparent", PARENT),)))
        except grpc.RpcError as error:
            return error.code()  # pyright: ignore[reportAttributeAccessIssue]
    return grpc.StatusCode.OK


def test_every_door_hands_the_callers_trace_on() -> None:
    parts, seen = serve_bytes(reranker=JUDGES), []
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with served(parts, http_config=HttpConfig(port=0)):

        def watch(times: RequestTimes, stats: RequestStats) -> None:
            seen.append((times.request.pooling is not None, times.request.traceparent))

        parts.engine.stats[0].watch_ends(watch)
        assert _post(parts, "/v1/completions", {"prompt": ["ab", "cd"], "max_tokens": 2}) == 200
        assert _post(parts, "/v1/chat/completions", chat) == 200
        assert _post(parts, "/v1/embeddings", {"model": "fake", "input": "ab"}) == 200
        assert _post(parts, "/v1/rerank", {"query": "q", "documents": ["m", "n"]}) == 200
        assert _generate(parts, pb.GenerateRequest(text="ab")) is grpc.StatusCode.OK
        wait_until(lambda: len(seen) == 7, "the end of all")
    assert seen == [(False, PARENT)] * 3 + [(True, PARENT)] + [(False, PARENT)] * 3


def test_no_line_repeats_what_a_client_said(caplog: pytest.LogCaptureFixture) -> None:
    """Neither of what is answered, nor of what is refused, for whatever reason, at any level of ours."""
    caplog.set_level(logging.DEBUG, "jaxserve")
    parts = serve_bytes(max_model_len=128, reranker=JUDGES)
    message = [{"role": "user", "content": SECRET}]
    bodies: list[tuple[str, dict[str, object]]] = [
        ("/v1/completions", {"prompt": SECRET, "max_tokens": 2}),
        ("/v1/completions", {"prompt": SECRET * 99}),
        ("/v1/completions", {"prompt": SECRET, "stop": [SECRET] * 99}),
        ("/v1/completions", {"prompt": SECRET, SECRET: 1}),
        ("/v1/completions", {"prompt": {SECRET: 1}}),
        ("/v1/completions", {"prompt": SECRET, "model": SECRET}),
        ("/v1/completions", {"prompt": SECRET, "structured_outputs": {"regex": f"({SECRET}"}}),
        ("/v1/chat/completions", {"messages": message, "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": SECRET, "content": SECRET}]}),
        ("/v1/chat/completions", {"messages": message, "tools": [{"type": SECRET}]}),
        ("/v1/embeddings", {"input": [SECRET, SECRET * 99]}),
        ("/rerank", {"query": SECRET, "documents": [SECRET]}),
        ("/tokenize", {"prompt": SECRET}),
        ("/detokenize", {"tokens": [SECRET]}),
    ]
    with (
        served(parts, http_config=HttpConfig(port=0), log_refusals=True),
        observe_requests(parts.engine, RuntimeConfig(log_requests=True)),
    ):
        codes = [_post(parts, path, body) for path, body in bodies]
        json_type = {"content-type": "application/json"}
        broken = httpx.post(f"{parts.http_url}/v1/completions", content=f'{{"prompt": "{SECRET}', headers=json_type)
        codes.append(broken.status_code)
        codes.append(_post(parts, f"/{SECRET}", {}))
        for text in (SECRET, SECRET * 99):
            _generate(parts, pb.GenerateRequest(text=text))
        _generate(parts, pb.GenerateRequest(text="a" * 999, request_id=f"what I say is {SECRET}"))
        parts.runner.broken = True
        _post(parts, "/v1/completions", {"prompt": SECRET})
        parts.wait_for_exit()
    assert set(codes) == {200, 400, 404}, codes
    assert "the device is lost" in caplog.text
    written = [JsonFormatter().format(record) for record in caplog.records if record.name.startswith("jaxserve")]
    assert len([line for line in written if json.loads(line).get("finish_reason")]) >= 3
    assert len([line for line in written if json.loads(line).get("reason")]) >= 3
    assert [line for line in written if SECRET in line] == []


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"])
def test_without_the_extra_the_error_names_it(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "jaxserve.telemetry.traces", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    engine = serve_bytes().engine
    with (
        pytest.raises(ConfigError, match=re.escape(how_to_install("otel"))),
        observe_requests(engine, RuntimeConfig(trace_endpoint="http://127.0.0.1:1")),
    ):
        pass
