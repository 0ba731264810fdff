"""One OpenTelemetry span for each request: when it waited, when its prompt ran, when its answer came.

A caller's decision to sample comes with its `traceparent`, and `runtime.trace_ratio` decides for other requests. A span
is made after the fact, with the times that the engine took, so a request that is not traced costs nothing. Needs the
extra `otel`.
"""

import contextlib
import time
from collections.abc import Iterator

from jaxserve.api import FinishReason
from jaxserve.config.schema import RuntimeConfig
from jaxserve.engine import RequestStats, RequestTimes
from jaxserve.errors import ConfigError, how_to_install

try:
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ConfigError(f"runtime.trace_endpoint needs OpenTelemetry: {how_to_install('otel')}") from error

_FLUSH_MS = 5_000


class RequestTracer:
    """A `Watcher` (see `requests`) that makes one span.

    Args:
      provider: of OpenTelemetry; samples and exports.
      model_name: for `gen_ai.request.model`.
    """

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        self._tracer = provider.get_tracer("jaxserve")
        self._model_name = model_name
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, times: RequestTimes, stats: RequestStats) -> None:
        now_ns = time.time_ns()

        def at(moment_s: float) -> int:
            """The wall clock's time. The engine's clock has another zero; both agree on how long ago something was."""
            return now_ns - round((stats.time_s - moment_s) * 1e9)

        parent = self._propagator.extract({"traceparent": times.request.traceparent})
        span = self._tracer.start_span(
            "generate",
            context=parent,
            kind=trace.SpanKind.SERVER,
            start_time=at(times.arrival_s),
            attributes=self._attributes(times, stats),
        )
        span.add_event("queue", timestamp=at(times.submitted_s))
        if times.scheduled_s is not None:
            span.add_event("prefill", timestamp=at(times.scheduled_s))
        if times.first_s is not None:
            span.add_event("decode", timestamp=at(times.first_s))
        if stats.finish_reason is FinishReason.ERROR:
            span.set_status(trace.StatusCode.ERROR)
        span.end(end_time=now_ns)

    def _attributes(self, times: RequestTimes, stats: RequestStats) -> dict[str, str | int | float | list[str]]:
        """Names of OpenTelemetry's conventions for generative models where they have one."""
        sampling = times.request.sampling
        return {
            "gen_ai.operation.name": "embeddings" if times.request.pooling else "text_completion",
            "gen_ai.request.model": self._model_name,
            "gen_ai.request.max_tokens": times.request.max_tokens,
            "gen_ai.request.temperature": float(sampling.temperature),
            "gen_ai.request.top_p": float(sampling.top_p),
            "gen_ai.request.choice.count": sampling.n,
            "gen_ai.usage.input_tokens": stats.prompt_tokens,
            "gen_ai.usage.output_tokens": stats.new_tokens,
            "gen_ai.response.id": stats.request_id,
            "gen_ai.response.finish_reasons": [stats.finish_reason.value],
            "jaxserve.cached_tokens": stats.cached_tokens,
            "jaxserve.drafted_tokens": stats.drafted_tokens,
            "jaxserve.accepted_tokens": stats.accepted_tokens,
        }


@contextlib.contextmanager
def export_spans(config: RuntimeConfig, model_name: str) -> Iterator[RequestTracer]:
    """Sends spans to `runtime.trace_endpoint` until the block ends, which sends the last ones.

    An endpoint of `https://` is reached with TLS, any other without encryption. Raises ConfigError.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(f"runtime.trace_endpoint needs the OTLP exporter: {how_to_install('otel')}") from error
    assert config.trace_endpoint is not None
    exporter = OTLPSpanExporter(
        endpoint=config.trace_endpoint, insecure=not config.trace_endpoint.startswith("https://")
    )
    provider = make_provider(config)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield RequestTracer(provider, model_name)
    finally:
        provider.force_flush(_FLUSH_MS)
        provider.shutdown()


def make_provider(config: RuntimeConfig) -> TracerProvider:
    """A provider that samples as `config` says, without an exporter. It is not made the process's global one."""
    return TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(config.trace_ratio)),
        resource=Resource.create({"service.name": config.trace_service}),
        shutdown_on_exit=False,
    )
