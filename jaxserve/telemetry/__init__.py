"""Telemetry beside metrics: log lines and traces.

    logs      how a record is written: text for people, JSON for collectors
    requests  one line for each request that ends
    traces    one OpenTelemetry span for each request that ends

Both the line and the span are made when a request has ended, from the times that the engine takes of every request
anyway (`engine.stats`). So one place covers all front doors, and a request costs nothing more while it runs. Prompts
and answers are in neither, unless `runtime.log_prompts` asks for the ids of the prompt: logs outlive the consent with
which a prompt was sent.
"""

from jaxserve.telemetry.logs import JsonFormatter
from jaxserve.telemetry.requests import check_tracing, observe_requests

__all__ = ["JsonFormatter", "check_tracing", "observe_requests"]
