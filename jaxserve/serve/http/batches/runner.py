"""The runner of batches: those of a key one after another, some lines at a time, each a call of the application itself.

So a line is checked, refused and answered exactly as the same request on its own. It passes neither keys nor limits of
bodies: the key of the batch was checked when it was made, and the lines when it began. Keys share the places of lines,
and a line that is refused for now has none while it waits.
"""

import asyncio
import contextlib
import functools
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Generator
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope

from jaxserve.engine.fair_places import FairPlaces
from jaxserve.serve.http.batches.bodies import ENDED, BatchObject, BatchProblem, BatchProblems
from jaxserve.serve.http.batches.store import BatchStore, is_for_good, new_file_id, read_results, refusal_of
from jaxserve.serve.http.bodies import read_json
from jaxserve.serve.http.errors import HttpRefusal
from jaxserve.serve.http.keys import OWNER
from jaxserve.serve.owners import Owner, Owners

logger = logging.getLogger(__name__)

MAX_LINES = 50_000  # of a batch, as OpenAI has it
_MAX_PROBLEMS = 50  # that a batch names
_PAUSE_S = 0.5  # before a line is tried again that found no room, or no engine
_NOTE_S = 0.5
_AGAIN_S = 5.0  # before batches that met a full disk are tried again
_LATER = (429, 503)  # no room; or the engine ends, or is being built again


class _Stopping(Exception):
    """The server ends: the batch goes on after the next start."""


class BatchRunner:
    """Runs what is in a store. Used on one event loop, by `start`, `wake`, `hold` and `stop`.

    Args:
      at_once: lines that run at a time, of all batches together.
      line_bytes, line_parts: most of a line, as of any body: bytes, and parts of its JSON (see `read_json`).

    Attributes:
      num_running: lines that run.
    """

    def __init__(self, store: BatchStore, at_once: int, line_bytes: int, line_parts: int) -> None:
        self._store = store
        self._at_once = at_once
        self._line_bytes, self._line_parts = line_bytes, line_parts
        self._places: FairPlaces[bytes] = FairPlaces(at_once)
        self._app: ASGIApp | None = None
        self._owners: Owners | None = None
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._held = False

        self.num_running = 0

    def start(self, app: ASGIApp, owners: Owners) -> None:
        """Begins, with what the last server has left. `owners`: those of `app`."""
        self._app, self._owners = app, owners
        self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """There is a new batch."""
        self._news.set()

    def hold(self) -> None:
        """Begins no further line; those that run may end."""
        self._held = True

    async def stop(self) -> None:
        """Ends at once. What has no result yet runs after the next start."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        """Has a task for each key that has batches, until the server ends."""
        of_owners: dict[bytes, asyncio.Task[None]] = {}
        try:
            while not self._held:
                self._news.clear()
                try:
                    for owner in {owner for owner, _ in await asyncio.to_thread(self._store.unfinished)}:
                        if owner not in of_owners or of_owners[owner].done():
                            of_owners[owner] = asyncio.create_task(self._run_owner(owner))
                except OSError as error:
                    logger.error("the batches cannot be read: %s; they are tried again", error)
                    self._wake_later()
                await self._news.wait()
        finally:
            for task in of_owners.values():
                task.cancel()
            await asyncio.gather(*of_owners.values(), return_exceptions=True)

    async def _run_owner(self, owner: bytes) -> None:
        """All batches of a key, until none is left that can go on."""
        try:
            while batches := [b for whose, b in await asyncio.to_thread(self._store.unfinished) if whose == owner]:
                if not await self._answer_or_fail(owner, batches[0]):
                    break
            else:
                self.wake()  # one may have come between the last look and the end of this task
                return
        except _Stopping:
            logger.info("batches go on after the next start")
            return
        except OSError as error:
            logger.error("the batches cannot be read: %s; they are tried again", error)
        self._wake_later()

    def _wake_later(self) -> None:
        asyncio.get_running_loop().call_later(_AGAIN_S, self.wake)

    async def _answer_or_fail(self, owner: bytes, batch: BatchObject) -> bool:
        """A full disk and a defect cost their own batch. Returns whether it has ended. Raises _Stopping."""
        try:
            await self._answer(owner, batch.id)
        except _Stopping:
            raise
        except OSError as error:
            logger.error("batch %s cannot go on: %s; it is tried again in %.0f s", batch.id, error, _AGAIN_S)
            return False
        except Exception:
            logger.exception("batch %s failed", batch.id)
            problem = BatchProblem(code="server_error", message="internal error; the server's log has the details")
            with contextlib.suppress(HttpRefusal):  # its description is not there any more
                await self._change(owner, batch.id, lambda now: _fail(now, [problem]))
        return True

    async def _answer(self, owner: bytes, batch_id: str) -> None:
        batch = await asyncio.to_thread(self._store.batch, owner, batch_id)
        source = self._store.content_path(batch.input_file_id)
        if batch.output_file_id is None:  # not begun
            check = functools.partial(check_lines, source, batch.endpoint, self._line_bytes, self._line_parts)
            total, problems = await asyncio.to_thread(check)
            if problems:
                await self._change(owner, batch_id, lambda now: _fail(now, problems))
                return
            batch = await self._change(owner, batch_id, lambda now: _begin(now, total))
        work, problems = _Work(self._store, batch, self._line_parts), []
        try:
            await asyncio.to_thread(work.read_results)
            ended = await self._answer_lines(owner, batch, work)
        except OSError as error:
            if not is_for_good(error):
                raise
            ended = "failed"  # its lines would be answered again and again; what has a result keeps it
            logger.error("batch %s fails: %s", batch.id, error)
            problems.append(BatchProblem(code="file_too_large", message=f"a result was not kept: {refusal_of(error)}"))
        finally:
            work.close()
        for file_id, kind, count in (
            (work.output_id, "output", work.num_completed),
            (work.error_id, "error", work.num_failed),
        ):
            if count:
                await asyncio.to_thread(self._store.add_output, owner, file_id, f"{batch_id}_{kind}.jsonl")
        await self._change(owner, batch_id, lambda now: _finish(now, work, ended, problems))

    async def _change(self, owner: bytes, batch_id: str, change: Callable[[BatchObject], None]) -> BatchObject:
        """See `BatchStore.change_batch`."""
        batch = await asyncio.to_thread(self._store.change_batch, owner, batch_id, change)
        if batch.status in ENDED:
            counts = batch.request_counts
            logger.info("batch %s %s: %d of %d lines answered", batch.id, batch.status, counts.completed, counts.total)
        return batch

    async def _answer_lines(self, owner: bytes, batch: BatchObject, work: "_Work") -> str:
        """Returns how it ended; raises _Stopping when the server ends."""
        running: set[asyncio.Task[None]] = set()
        lines = work.lines()
        try:
            while (line := await asyncio.to_thread(next, lines, None)) is not None:
                while len(running) >= self._at_once:
                    running = await self._wait_for_one(running)
                    await self._note(owner, batch, work)
                if await self._is_over(owner, batch) or self._held:
                    break
                running.add(asyncio.create_task(self._answer_line(owner, batch, line, work)))
            while running:
                running = await self._wait_for_one(running)
                await self._note(owner, batch, work)
            if self._held:
                raise _Stopping
            total = batch.request_counts.total
            return "completed" if work.num_completed + work.num_failed == total else "expired"
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _is_over(self, owner: bytes, batch: BatchObject) -> bool:
        """Whether no further line is answered, since it was cancelled or its time is over."""
        if _now() >= batch.expires_at:
            return True
        return (await asyncio.to_thread(self._store.batch, owner, batch.id)).status == "cancelling"

    async def _wait_for_one(self, running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return running

    async def _note(self, owner: bytes, batch: BatchObject, work: "_Work") -> None:
        """Writes the counts down, for a client that looks, but not so often that the disk is kept busy."""
        if time.monotonic() < work.noted_s + _NOTE_S:
            return
        work.noted_s = time.monotonic()
        await self._change(owner, batch.id, lambda now: _count(now, work))

    async def _answer_line(self, owner: bytes, batch: BatchObject, line: "_Line", work: "_Work") -> None:
        assert self._app is not None and self._owners is not None, "the runner was not started"
        while True:
            async with self._places.place(owner):
                if await self._is_over(owner, batch) or self._held:
                    return
                self.num_running += 1
                try:
                    answer = await _call(self._app, batch.endpoint, line.body, self._owners.of_digest(owner))
                finally:
                    self.num_running -= 1
            if answer.code not in _LATER:
                break
            await asyncio.sleep(_PAUSE_S)
        await asyncio.to_thread(work.put, line.custom_id, answer)


def _begin(batch: BatchObject, total: int) -> None:
    batch.request_counts.total = total
    batch.output_file_id, batch.error_file_id = new_file_id(), new_file_id()
    if batch.status == "validating":  # it may have been cancelled meanwhile
        batch.status, batch.in_progress_at = "in_progress", _now()


def _count(batch: BatchObject, work: "_Work") -> None:
    batch.request_counts.completed, batch.request_counts.failed = work.num_completed, work.num_failed


def _finish(batch: BatchObject, work: "_Work", ended: str, problems: list[BatchProblem]) -> None:
    _count(batch, work)
    batch.errors = BatchProblems(data=problems) if problems else None
    if batch.status == "in_progress":
        batch.status, batch.finalizing_at = "finalizing", _now()
    batch.output_file_id = work.output_id if work.num_completed else None
    batch.error_file_id = work.error_id if work.num_failed else None
    _end(batch, "cancelled" if batch.status == "cancelling" else ended)


def _fail(batch: BatchObject, problems: list[BatchProblem]) -> None:
    batch.errors = BatchProblems(data=problems)
    _end(batch, "failed")


def _end(batch: BatchObject, status: Any) -> None:
    assert status in ENDED, status
    batch.status = status
    setattr(batch, f"{status}_at", _now())


class _Line(NamedTuple):
    custom_id: str
    body: bytes


class _Work:
    """The lines of one batch, and the files of their results. Mutated by the runner alone."""

    def __init__(self, store: BatchStore, batch: BatchObject, line_parts: int) -> None:
        assert batch.output_file_id is not None and batch.error_file_id is not None, batch
        self.output_id, self.error_id = batch.output_file_id, batch.error_file_id
        self.num_completed = 0
        self.num_failed = 0
        self._source = store.content_path(batch.input_file_id)
        self._line_parts = line_parts
        self._paths = [store.content_path(file_id) for file_id in (self.output_id, self.error_id)]
        self._done: set[str] = set()
        self._writing = threading.Lock()
        self._closed = False
        self._files: list[FileIO] = []
        self._opened = contextlib.ExitStack()
        self.noted_s = 0.0  # when the counts of the batch were last written

    def read_results(self) -> None:
        """What an earlier server has answered."""
        counts = []
        for path in self._paths:
            before = len(self._done)
            read_results(path, self._done.add)
            counts.append(len(self._done) - before)
        self.num_completed, self.num_failed = counts
        self._files = [self._opened.enter_context(FileIO(path, "ab")) for path in self._paths]

    def lines(self) -> "Generator[_Line]":
        """Those that have no result. Each takes as long as reading and writing a large body takes."""
        with self._source.open("rb") as source:
            for raw in source:
                if raw.strip():
                    line = read_json(raw, self._line_parts)
                    if line["custom_id"] not in self._done:
                        yield _Line(custom_id=line["custom_id"], body=json.dumps(line["body"]).encode())

    def put(self, custom_id: str, answer: "_Answer") -> None:
        """One line is answered. The result is with the system when this returns, and outlives the process. Any thread:
        a result may have megabytes, and a disk may take its time. Raises OSError, and then nothing of it is kept."""
        head = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "error": None}
        response = {"status_code": answer.code, "request_id": answer.request_id}
        # The body is JSON already: to read and write it again would take long where it is large.
        body = answer.body.replace(b"\n", b" ")  # between values alone
        opened = (json.dumps(part).encode()[:-1] for part in (head, response))
        with self._writing:
            if self._closed:  # the server ends: the line runs after the next start
                return
            _append(self._files[0 if answer.code < 400 else 1], b'%b, "response": %b, "body": %b}}\n' % (*opened, body))
            if answer.code < 400:
                self.num_completed += 1
            else:
                self.num_failed += 1

    def close(self) -> None:
        """Raises OSError where the disk does not take the rest; all files are closed nevertheless."""
        with self._writing:
            self._closed = True
            self._opened.close()


def _append(file: FileIO, data: bytes) -> None:
    """Raises OSError, and then the file is as before where that can be done: half a line hides those behind it."""
    before = os.fstat(file.fileno()).st_size
    left = memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(before)
        raise


def check_lines(path: Path, endpoint: str, line_bytes: int, line_parts: int) -> tuple[int, list[BatchProblem]]:
    """The number of lines, and what is wrong with them; `line_bytes` and `line_parts` as for `BatchRunner`. Takes as
    long as reading takes."""
    problems: list[BatchProblem] = []
    seen: set[str] = set()
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            if len(raw) > line_bytes:
                message = f"it has {len(raw)} bytes, and a line at most {line_bytes} (serve.http.max_body_bytes)"
                problems.append(BatchProblem(code="line_too_large", message=message, line=number))
                continue
            try:
                line = read_json(raw, line_parts)
            except ValueError as error:
                problems.append(BatchProblem(code="invalid_json_line", message=f"no JSON: {error}", line=number))
                line = None
            if line is not None and (problem := _problem(line, endpoint, seen)) is not None:
                problem.line = number
                problems.append(problem)
            if len(problems) >= _MAX_PROBLEMS:
                break
    if len(seen) > MAX_LINES:
        message = f"the file has {len(seen)} requests; a batch has at most {MAX_LINES}; send several"
        problems.append(BatchProblem(code="too_many_lines", message=message))
    if not seen and not problems:
        problems.append(BatchProblem(code="empty_file", message="the file has no request"))
    return len(seen), problems


def _problem(line: Any, endpoint: str, seen: set[str]) -> BatchProblem | None:
    if not isinstance(line, dict) or not isinstance(line.get("custom_id"), str):
        message = "a line is an object with custom_id, a text; method; url; and body"
        return BatchProblem(code="invalid_request", message=message, param="custom_id")
    if line["custom_id"] in seen:
        message = f"custom_id {line['custom_id']!r:.80} is there twice; give each line one of its own"
        return BatchProblem(code="duplicate_custom_id", message=message, param="custom_id")
    seen.add(line["custom_id"])
    if line.get("method") != "POST" or line.get("url") != endpoint:
        message = f"method and url must be POST and {endpoint}, the endpoint of the batch"
        return BatchProblem(code="invalid_url", message=message, param="url")
    body = line.get("body")
    if not isinstance(body, dict):
        return BatchProblem(code="invalid_request", message="body must be an object", param="body")
    if body.get("stream"):
        return BatchProblem(code="invalid_request", message="a batch cannot stream; leave it out", param="body.stream")
    return None


class _Answer(NamedTuple):
    """`request_id` is "" for a refusal, which has none."""

    code: int
    request_id: str
    body: bytes


async def _call(app: ASGIApp, path: str, body: bytes, owner: Owner) -> _Answer:
    """An answer of the application, to this owner."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": None,
        "server": None,
        OWNER: owner,
    }
    code, request_id = 0, ""
    parts: list[bytes] = []
    given = False

    async def receive() -> Message:
        nonlocal given
        if given:
            await asyncio.get_running_loop().create_future()  # this client stays
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal code, request_id
        if message["type"] == "http.response.start":
            code = message["status"]
            request_id = Headers(raw=message["headers"]).get("x-request-id", "")
        else:
            parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:  # the application raises a defect again, behind its answer
        if not code:
            raise
    return _Answer(code, request_id, b"".join(parts))


def _now() -> int:
    return int(time.time())
