"""Spans of requests, read back from OpenTelemetry's own in-memory exporter and from a real collector's port."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry (extra `otel`) is not installed")

from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from jaxserve.api import RequestOptions, SamplingParams
from jaxserve.config.schema import RuntimeConfig
from jaxserve.engine import Engine, ModelInfo
from jaxserve.sched import create_scheduler
from jaxserve.telemetry import observe_requests
from jaxserve.telemetry.traces import RequestTracer, make_provider
from jaxserve.testing import FakeRunner, ManualClock, make_limits

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = PARENT[:-1] + "0"


class Traced:
    """An engine whose steps take a second each, and the spans of its requests."""

    def __init__(self, *, ratio: float = 1.0) -> None:
        self.clock = ManualClock(100.0)
        limits = make_limits(max_rows=1)
        self.engine = Engine(
            runner=FakeRunner(limits, clock=self.clock, step_s=1.0),
            scheduler=create_scheduler("fcfs", limits),
            tokenizer=None,
            model=ModelInfo(name="fake", vocab_size=256, max_model_len=64, eos_token_ids=(255,)),
            clock=self.clock,
        )
        self.exporter = InMemorySpanExporter()
        provider = make_provider(RuntimeConfig(trace_ratio=ratio, trace_service="here"))
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.engine.stats[0].watch_ends(RequestTracer(provider, "fake"))

    def run(self, **options: object) -> tuple[ReadableSpan, ...]:
        _run(self.engine, **options)
        return self.exporter.get_finished_spans()


def _run(engine: Engine, *, count: int = 1, traceparent: str = "", **options: object) -> None:
    for number in range(count):
        sampling = SamplingParams(temperature=0.0, max_tokens=4)
        request = engine.prepare(
            [1, 2, 3],
            sampling,
            RequestOptions(
                request_id=f"r{number}",
                traceparent=traceparent,
                **options,  # type: ignore[arg-type]
            ),
        )
        engine.submit(request, lambda update: None)
    engine.run_until_idle()


def test_a_span_says_when_what_happened() -> None:
    first, second = Traced().run(count=2)
    assert first.name == second.name == "generate"
    assert first.kind is trace.SpanKind.SERVER
    assert first.resource.attributes["service.name"] == "here"
    assert [event.name for event in second.events] == ["queue", "prefill", "decode"]
    assert second.attributes is not None
    assert second.attributes["gen_ai.response.id"] == "r1"
    assert second.attributes["gen_ai.request.model"] == "fake"
    assert second.attributes["gen_ai.usage.input_tokens"] == 3
    assert second.attributes["gen_ai.usage.output_tokens"] == 4
    assert second.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert not any("prompt" in name for name in second.attributes)
    seconds = [_seconds(second, event.timestamp) for event in second.events]
    assert seconds[0] == pytest.approx(0.0, abs=1e-3)
    assert seconds[1] >= 3.0, "it waited for the only row while the first ran"
    assert seconds[1] < seconds[2] < _seconds(second, second.end_time)


def test_a_callers_span_is_the_parent() -> None:
    (span,) = Traced(ratio=0.0).run(traceparent=PARENT)
    assert span.parent is not None
    assert trace.format_trace_id(span.context.trace_id) == "0af7651916cd43dd8448eb211c80319c"
    assert trace.format_span_id(span.parent.span_id) == "b7ad6b7169203331"


def test_sampling_is_the_callers_or_the_configs() -> None:
    assert Traced(ratio=1.0).run(traceparent=NOT_SAMPLED) == ()
    assert Traced(ratio=0.0).run(count=5) == ()
    assert len(Traced(ratio=1.0).run(count=5)) == 5
    assert len(Traced().run(traceparent="nonsense")) == 1


def test_a_request_that_fails_is_an_error_span_without_what_it_never_reached() -> None:
    traced = Traced()
    traced.run(timeout_s=2.5)
    (span,) = traced.exporter.get_finished_spans()
    assert span.status.status_code is trace.StatusCode.ERROR
    traced.exporter.clear()
    request = traced.engine.prepare([1], SamplingParams(max_tokens=2), RequestOptions(timeout_s=0.5))
    traced.engine.submit(request, lambda update: None)
    traced.clock.advance(1.0)
    traced.engine.run_until_idle()
    (span,) = traced.exporter.get_finished_spans()
    assert [event.name for event in span.events] == ["queue"]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """What receives OTLP."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext):
        self.names += [s.name for r in request.resource_spans for scope in r.scope_spans for s in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    servicer = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"http://127.0.0.1:{port}"
    server.stop(None).wait(10)


def test_spans_reach_a_collector_by_the_end_of_the_block(collector: tuple[Collector, str]) -> None:
    servicer, endpoint = collector
    traced = Traced()
    with observe_requests(traced.engine, RuntimeConfig(trace_endpoint=endpoint)):
        _run(traced.engine, count=3)
    assert servicer.names == ["generate"] * 3


def _seconds(span: ReadableSpan, at_ns: int | None) -> float:
    assert span.start_time is not None
    assert at_ns is not None
    return (at_ns - span.start_time) / 1e9
