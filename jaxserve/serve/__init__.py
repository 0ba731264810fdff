"""Front doors: what turns calls from a network into requests of the engine.

Each door is thin. It turns a message into `SamplingParams` and a prompt, hands them to `AsyncEngine`, and writes every
`Update` to the client; limits, queues, text and memory are the engine's. What all doors share lives here once: the
table from `errors.Status` to the codes of a protocol (`status`), start and shutdown (`service`).

A lost client is the rule, not the exception, so a cancel, a deadline, a closed connection and a crashed client all
take one path: the handler is cancelled, it leaves the engine's stream, and leaving a stream aborts the request.

`client` is the other end; it needs nothing of the engine.
"""
