"""Front doors, which turn calls from a network into requests of the engine.

Each door is thin. It turns a message into `SamplingParams` and a prompt, hands them to `AsyncEngine`, and writes every
`Update` to the client; limits, queues, text and memory are the engine's. The common part of all doors is here once: the
table from `errors.Status` to the codes of a protocol (`status`), certificates and keys (`tls`, `keys`), start and
shutdown (`service`). gRPC is in the files `grpc_*`, HTTP in the package `http`.

A lost client is the rule, not the exception, so a cancel, a deadline, a closed connection and a crashed client all
take one path: the handler is cancelled, it leaves the engine's stream, and leaving a stream aborts the request.

`route` is a door of the same kind with servers behind it instead of an engine: it spreads requests over them, and moves
those of a server that dies (`route_pool` knows the servers, `route_service` forwards a call).

The other end is a package of its own, `jaxserve.client`, which needs nothing of the engine.
"""
