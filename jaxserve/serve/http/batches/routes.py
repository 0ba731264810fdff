"""`/v1/files` and `/v1/batches`. There are such routes only with `serve.http.batch_dir`."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Concatenate, Literal, ParamSpec, TypeVar

from fastapi import APIRouter, File, Form, Query, Request, UploadFile
from starlette.responses import FileResponse, Response

from jaxserve.engine.daemon_threads import DaemonThreads
from jaxserve.serve.http.batches.bodies import (
    ENDED,
    BatchList,
    BatchObject,
    BatchRequest,
    DeletedBatch,
    DeletedFile,
    FileList,
    FileObject,
    RequestCounts,
)
from jaxserve.serve.http.batches.runner import BatchRunner
from jaxserve.serve.http.batches.store import BatchStore, new_batch_id, refusal_of
from jaxserve.serve.http.bodies import REFUSALS, JsonRoute
from jaxserve.serve.http.errors import HttpRefusal
from jaxserve.serve.http.forms import FormRoute
from jaxserve.serve.http.guard import FILES
from jaxserve.serve.http.keys import owner_of
from jaxserve.serve.http.pieces import PartsResponse, in_parts

_WINDOW_S = 24 * 3600
_MOST_FILES = 10_000  # of one list, as OpenAI has it
_THREADS, _SPARE_THREADS = 2, 1  # the spare one is for a caller who has none

_Object = TypeVar("_Object", FileObject, BatchObject)
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class _Disk:
    """The threads that work on the store. Callers have them in turn: a list of thousands of files takes seconds."""

    def __init__(self) -> None:
        self._threads = DaemonThreads("jaxserve-files", _THREADS, spare=_SPARE_THREADS)

    async def run(
        self,
        call: Request,
        work: Callable[Concatenate[bytes, _Given], _Result],
        *given: _Given.args,
        **named: _Given.kwargs,
    ) -> _Result:
        """What `work` returns for the owner of a call, whose digest it is given first.

        Raises as it does, and HttpRefusal where the disk fails. Work that waits when its call ends is never begun.
        """
        owner = owner_of(call)
        try:
            return await asyncio.wrap_future(
                self._threads.submit(owner.id, lambda: work(owner.digest, *given, **named))
            )
        except OSError as error:
            raise refusal_of(error) from error


def batches_routers(store: BatchStore, runner: BatchRunner) -> tuple[APIRouter, APIRouter]:
    """Two, since a file is a form, and the body of every other route JSON."""
    disk = _Disk()
    return _files_router(store, disk), _batches_router(store, runner, disk)


def _files_router(store: BatchStore, disk: _Disk) -> APIRouter:
    router = APIRouter(route_class=FormRoute, responses=REFUSALS, tags=["Batches"])

    @router.post(FILES)
    async def upload_file(
        call: Request, file: Annotated[UploadFile, File()], purpose: Annotated[Literal["batch"], Form()]
    ) -> FileObject:
        """Keeps a file of requests, one JSON object a line."""
        # A page of any origin may send a form to any server, but no header of these names with it.
        if not {"authorization", "x-api-key"}.intersection(call.headers):
            text = "a file needs the header 'Authorization: Bearer KEY', with any key where the server has none"
            raise HttpRefusal(400, text)
        return await disk.run(call, store.add_file, file.filename or "", file.file)

    @router.get(FILES, response_model=FileList)
    async def list_files(
        call: Request,
        purpose: str | None = None,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=_MOST_FILES)] = _MOST_FILES,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """The files of this key, the newest first unless `order` is `asc`; `after`: those behind this one."""

        def written(owner: bytes) -> Response:  # one file is read for each
            found = [each for each in store.files(owner) if purpose in (None, each.purpose)]
            found = _behind(found if order == "desc" else found[::-1], after)
            return _written(found[:limit], has_more=len(found) > limit)

        return await disk.run(call, written)

    @router.get(f"{FILES}/{{file_id}}")
    async def retrieve_file(file_id: str, call: Request) -> FileObject:
        """The description of a file."""
        return await disk.run(call, store.file, file_id)

    @router.get(f"{FILES}/{{file_id}}/content", response_class=FileResponse)
    async def file_content(file_id: str, call: Request) -> FileResponse:
        """What is in a file."""
        await disk.run(call, store.file, file_id)
        return FileResponse(store.content_path(file_id), media_type="application/jsonl")

    @router.delete(f"{FILES}/{{file_id}}")
    async def delete_file(file_id: str, call: Request) -> DeletedFile:
        """Forgets a file."""
        await disk.run(call, store.remove_file, file_id)
        return DeletedFile(id=file_id)

    return router


def _batches_router(store: BatchStore, runner: BatchRunner, disk: _Disk) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, responses=REFUSALS, tags=["Batches"])

    @router.post("/v1/batches")
    async def create_batch(body: BatchRequest, call: Request) -> BatchObject:
        """Begins to answer the requests of a file."""
        now_s = int(time.time())
        batch = BatchObject(
            id=new_batch_id(),
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            status="validating",
            created_at=now_s,
            expires_at=now_s + _WINDOW_S,
            request_counts=RequestCounts(),
            metadata=body.metadata,
        )
        await disk.run(call, store.add_batch, batch)
        runner.wake()
        return batch

    @router.get("/v1/batches")
    async def list_batches(
        call: Request, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> BatchList:
        """The batches of this key, the newest first; `after`: those behind this one."""
        found = _behind(await disk.run(call, store.batches), after)
        shown = [_shown(batch) for batch in found[:limit]]
        ids = [batch.id for batch in shown] or [None]
        return BatchList(data=shown, first_id=ids[0], last_id=ids[-1], has_more=len(found) > limit)

    @router.get("/v1/batches/{batch_id}")
    async def retrieve_batch(batch_id: str, call: Request) -> BatchObject:
        """How far a batch is."""
        return _shown(await disk.run(call, store.batch, batch_id))

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(batch_id: str, call: Request) -> BatchObject:
        """Begins no further line; what is answered stays."""
        return _shown(await disk.run(call, store.change_batch, batch_id, _cancel))

    @router.delete("/v1/batches/{batch_id}")
    async def delete_batch(batch_id: str, call: Request) -> DeletedBatch:
        """Forgets a batch that has ended; its files stay."""
        await disk.run(call, store.remove_batch, batch_id)
        return DeletedBatch(id=batch_id)

    return router


def _written(files: Sequence[FileObject], *, has_more: bool) -> Response:
    """A `FileList`. Takes as long as writing takes."""
    more = FileList(data=[], has_more=has_more).model_dump(exclude={"data"})
    items = (b"," * bool(number) + each.model_dump_json().encode() for number, each in enumerate(files))
    pieces = itertools.chain([json.dumps(more)[:-1].encode(), b', "data": ['], items, [b"]}"])
    return PartsResponse(list(in_parts(pieces)), {"content-type": "application/json"})


def _behind(found: list[_Object], after: str | None) -> list[_Object]:
    """Those behind the one with the id `after`; None: all. Raises HttpRefusal with 404."""
    if after is None:
        return found
    for number, each in enumerate(found, start=1):
        if each.id == after:
            return found[number:]
    raise HttpRefusal(404, f"after is {after!r:.80}, which is not in this list", param="after", kind="not_found")


def _cancel(batch: BatchObject) -> None:
    if batch.status in ENDED:
        raise HttpRefusal(409, f"the batch {batch.id} is {batch.status} already")
    batch.status, batch.cancelling_at = "cancelling", int(time.time())


def _shown(batch: BatchObject) -> BatchObject:
    """Files of results are shown when they are complete."""
    if batch.status in ENDED:
        return batch
    return batch.model_copy(update={"output_file_id": None, "error_file_id": None})
