"""Batches: files of requests that are answered when there is room, as OpenAI's `/v1/files` and `/v1/batches`.

    bodies     what clients send and get
    store      files and batches in a directory, which outlives the server
    runner     one batch after another, its lines through the application itself
    routes     the routes

Every result is appended to the file of results as soon as it is there, so this file is also the journal: after a
restart a batch goes on with the lines that have no result.
"""

from jaxserve.serve.http.batches.routes import batches_routers
from jaxserve.serve.http.batches.runner import BatchRunner
from jaxserve.serve.http.batches.store import BatchStore

__all__ = ["BatchRunner", "BatchStore", "batches_routers"]
