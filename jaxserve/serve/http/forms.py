"""The reader of forms: files that are uploaded, in memory and off the event loop.

Starlette keeps a file of more than 1 MB in a temporary file, on a disk that may be full, and reads on the event loop.
The body is in memory anyway, within the limits of `guard`, so its parts are taken from there.
"""

import functools
import io
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser, parse_options_header
from starlette.datastructures import FormData, UploadFile

from jaxserve.serve.http.bodies import Unreadable, answer
from jaxserve.serve.http.errors import HttpRefusal
from jaxserve.serve.http.keys import owner_of
from jaxserve.serve.large_reads import LARGE_BYTES, LargeReads

_MOST_PARTS = 100  # of a form: each becomes objects of some kilobytes
_PIECE_BYTES = 2**20  # that the parser copies at a time


class FormRoute(APIRoute):
    """A route whose body is a form."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await answer(handler, _FormRequest(request.scope, request.receive))

        return handle


class _Uploaded(UploadFile):
    """In memory: Starlette would leave its end to a thread, since it is no temporary file of its own."""

    async def close(self) -> None:
        self.file.close()


class _FormRequest(Request):
    async def form(self, **_: object) -> FormData:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The parts of the body. FastAPI's limits of a form are of parts that it would read itself."""
        body = await self.body()
        read = functools.partial(_read, body, self.headers.get("content-type", ""))
        if len(body) > LARGE_BYTES:
            reads: LargeReads = self.app.state.large_reads
            return await reads.run(owner_of(self).id, read)
        return read()


def _read(body: bytes, content_type: str) -> FormData:
    """The parts of a form, files as `UploadFile`. Raises Unreadable. Any thread."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise Unreadable(HttpRefusal(415, "a file is a part of a form; send it as 'multipart/form-data'"))
    if b"boundary" not in options:
        raise Unreadable(HttpRefusal(400, "the content type of the form names no boundary"))
    parts: list[tuple[str, str | UploadFile]] = []

    def add(name: bytes | None, value: str | UploadFile) -> None:
        if len(parts) == _MOST_PARTS:
            raise FormParserError(f"it has more than {_MOST_PARTS} parts")
        parts.append(((name or b"").decode(errors="replace"), value))

    def on_field(field: Field) -> None:
        add(field.field_name, (field.value or b"").decode(errors="replace"))

    def on_file(file: File) -> None:
        content = file.file_object
        assert isinstance(content, io.BytesIO), "nothing is written to a disk here"
        content.seek(0)
        name = (file.file_name or b"").decode(errors="replace")
        add(file.field_name, _Uploaded(content, size=file.size, filename=name))

    try:
        config = {"MAX_MEMORY_FILE_SIZE": float("inf")}
        parser = FormParser("multipart/form-data", on_field, on_file, boundary=options[b"boundary"], config=config)
        for start in range(0, len(body), _PIECE_BYTES):
            parser.write(body[start : start + _PIECE_BYTES])
        parser.finalize()
    except FormParserError as error:
        raise Unreadable(HttpRefusal(400, f"the body is no form that can be read: {error!s:.200}")) from error
    return FormData(parts)
