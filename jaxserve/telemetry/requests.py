"""The log line and the span of each request that ends.

The content of a line is chosen here, its form in `logs`. All times are the engine's.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator

from jaxserve.config.schema import RuntimeConfig
from jaxserve.engine import AnyEngine, RequestStats, RequestTimes

logger = logging.getLogger(__name__)

# Called on the loop's thread when a request has ended; must return at once.
Watcher = Callable[[RequestTimes, RequestStats], None]


def check_tracing(config: RuntimeConfig) -> None:
    """Raises ConfigError, before a model is loaded, when traces are asked for and cannot be made."""
    if config.trace_endpoint is not None:
        import jaxserve.telemetry.traces  # noqa: F401  # says what it lacks


@contextlib.contextmanager
def observe_requests(engine: AnyEngine, config: RuntimeConfig) -> Iterator[None]:
    """Logs and traces as `config` says, until the block ends. Begin before the loops run. Raises as `check_tracing`."""
    watchers: list[Watcher] = []
    with contextlib.ExitStack() as stack:
        if config.log_requests:
            watchers.append(RequestLog(with_prompts=config.log_prompts))
        if config.trace_endpoint is not None:
            from jaxserve.telemetry.traces import export_spans  # the extra `otel`: not needed otherwise

            watchers.append(stack.enter_context(export_spans(config, engine.model.name)))
        for watcher in watchers:
            for stats in engine.stats:
                stats.watch_ends(watcher)
        yield


class RequestLog:
    """A `Watcher` that logs one line."""

    def __init__(self, *, with_prompts: bool) -> None:
        self._with_prompts = with_prompts

    def __call__(self, times: RequestTimes, stats: RequestStats) -> None:
        fields: dict[str, object] = {
            "request_id": stats.request_id,
            "finish_reason": stats.finish_reason.value,
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "new_tokens": stats.new_tokens,
            "queue_ms": _ms(stats.queue_s),
            "ttft_ms": _ms(stats.ttft_s),
            "tpot_ms": _ms(stats.tpot_s),
            "e2e_ms": _ms(stats.e2e_s),
        }
        if stats.drafted_tokens:
            fields |= {"drafted_tokens": stats.drafted_tokens, "accepted_tokens": stats.accepted_tokens}
        if times.request.tenant:
            fields["tenant"] = times.request.tenant
        if self._with_prompts:
            fields["prompt_token_ids"] = list(times.request.prompt_token_ids)
        text = " ".join(f"{name}={value}" for name, value in fields.items() if name != "request_id")
        # A client chooses the id: with `%r` a line break in it cannot begin a line of the log.
        logger.info("request %r has ended: %s", stats.request_id, text, extra=fields)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
