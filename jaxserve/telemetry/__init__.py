"""What leaves the process beside answers and metrics: log lines and traces.

    logs      how a record is written: text for people, JSON for collectors
    requests  one line for each request that ends
    traces    one OpenTelemetry span for each request that ends

Why it has this shape. Both the line and the span are made when a request has ended, from the times that the engine
takes of every request anyway (`engine.stats`). So there is one place that watches, whatever door a request came
through, and a request costs nothing more while it runs. Prompts and answers are in neither, unless
`runtime.log_prompts` asks for the ids of the prompt: logs outlive the consent with which a prompt was sent.
"""

from jaxserve.telemetry.logs import JsonFormatter
from jaxserve.telemetry.requests import observe_requests

__all__ = ["JsonFormatter", "observe_requests"]
