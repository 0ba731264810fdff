"""The bodies of files and batches, as OpenAI's API describes them."""

from typing import Annotated, Any, Literal

import pydantic

from jaxserve.serve.http.requests import Body, Metadata, Only

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})


class FileObject(pydantic.BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class FileList(pydantic.BaseModel):
    object: Literal["list"] = "list"
    data: list[FileObject]
    has_more: bool


class DeletedFile(pydantic.BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchRequest(Body):
    """`POST /v1/batches`. `input_file_id` is a file of requests, one a line, all to `endpoint`."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: Annotated[Any, Only()] = None


class BatchProblem(pydantic.BaseModel):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchProblems(pydantic.BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchProblem]


class RequestCounts(pydantic.BaseModel):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(pydantic.BaseModel):
    """Times are seconds since 1970; null: that has not happened."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    errors: BatchProblems | None = None
    input_file_id: str
    completion_window: Literal["24h"]
    status: BatchStatus
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, Any] | None = None


class DeletedBatch(pydantic.BaseModel):
    id: str
    object: Literal["batch"] = "batch"
    deleted: Literal[True] = True


class BatchList(pydantic.BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
