"""An OpenAI server whose answers follow a script of times, and which writes down when it sent what.

The prompt's last token id, or last word of its text, is the number of the script. Times of both sides are those of one
process, so that a test can compare what the client measured with what truly left.
"""

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

WAIT_S = 120.0
NUM_ADDED = 2  # tokens around a prompt of text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One answer.

    Attributes:
      waits_s: before each piece of output; the first begins with the request.
      tokens_each: tokens of a piece.
      status: other than 200: refused so.
      ending: "done"; "cut": neither finish reason nor [DONE]; "half": within an event; "error": an error event;
        "object": an error event of older servers; "abort": with that finish reason; "garbage": no JSON;
        "silent": no output at all; "hang": never ends.
      role_first: an event of a chat that names the role, at once.
      count: say the usage.
      line_end: of every line.
      whole_end: the last event is [DONE] and has its empty line; False: it is the usage, and has none.
    """

    waits_s: Sequence[float] = (0.0,)
    tokens_each: int = 1
    status: int = 200
    ending: str = "done"
    role_first: bool = False
    count: bool = True
    line_end: str = "\n"
    whole_end: bool = True


class ScriptedServer:
    """Mutated by the server's thread; read by tests after the load. `count` is its tokenizer; None: it has none."""

    def __init__(self, scripts: Sequence[Script], count: Callable[[str], int] | None = None) -> None:
        self.scripts = list(scripts)
        self.count = count
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.sent_s: dict[int, list[float]] = {}
        self.open = 0
        self.most_open = 0
        self.app = FastAPI()
        self.app.get("/v1/models")(self._models)
        self.app.get("/version")(self._version)
        if count is not None:
            self.app.post("/tokenize")(self._tokenize)
        self.app.post("/v1/completions")(self._completions)
        self.app.post("/v1/chat/completions")(self._chat)
        self.url = ""

    async def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "scripted", "object": "model"}]}

    async def _version(self) -> dict[str, str]:
        return {"version": "1.2.3"}

    async def _tokenize(self, request: Request) -> dict[str, int]:
        body = await request.json()
        assert self.count is not None
        return {"count": self.count(body["prompt"]) + NUM_ADDED * body["add_special_tokens"]}

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        prompt = body["prompt"]
        if isinstance(prompt, list):
            return self._answer(request, body, prompt[-1], len(prompt))
        prompt_len = len(prompt.split()) if self.count is None else self.count(prompt) + NUM_ADDED
        return self._answer(request, body, _last_number(prompt), prompt_len)

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        return self._answer(request, body, _last_number(body["messages"][-1]["content"]), 7)

    def _answer(self, request: Request, body: dict[str, Any], number: int, prompt_len: int) -> Response:
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        script = self.scripts[number % len(self.scripts)]
        if script.status != 200:
            return JSONResponse({"error": {"message": f"scripted {script.status}"}}, status_code=script.status)
        pieces = self._stream(script, number, prompt_len, "messages" in body)
        return StreamingResponse(_spell(script, pieces), media_type="text/event-stream")

    async def _stream(self, script: Script, number: int, prompt_len: int, chat: bool) -> AsyncGenerator[str]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            if script.role_first:
                yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            if script.ending == "silent":
                yield "data: [DONE]\n\n"
                return
            for place, wait_s in enumerate(script.waits_s):
                await asyncio.sleep(wait_s)
                self.sent_s.setdefault(number, []).append(time.perf_counter())
                last = place == len(script.waits_s) - 1 and script.ending == "done"
                choice = {"delta": {"content": "é"}} if chat else {"text": "é"}
                yield ": a comment\n\n" + _event(
                    {"choices": [{"index": 0, **choice, "finish_reason": "length" if last else None}]}
                )
            async for piece in self._end(script, prompt_len):
                yield piece
        finally:
            self.open -= 1

    async def _end(self, script: Script, prompt_len: int) -> AsyncIterator[str]:
        if script.ending == "hang":
            await asyncio.sleep(WAIT_S)
        elif script.ending == "error":
            yield _event({"error": {"message": "scripted error", "code": 500}})
        elif script.ending == "object":
            yield _event({"object": "error", "message": "scripted error", "code": 500}) + "data: [DONE]\n\n"
        elif script.ending == "abort":
            yield _event({"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]}) + "data: [DONE]\n\n"
        elif script.ending == "half":
            yield 'data: {"choices": [{"ind'
        elif script.ending == "garbage":
            yield "data: {not json\n\n"
        elif script.ending == "done":
            if script.count:
                tokens = len(script.waits_s) * script.tokens_each
                usage = {
                    "prompt_tokens": prompt_len,
                    "completion_tokens": tokens,
                    "prompt_tokens_details": {"cached_tokens": 2},
                }
                if script.tokens_each > 1:  # all but one of each piece were drafts, and three others came to nothing
                    accepted = tokens - len(script.waits_s)
                    usage["completion_tokens_details"] = {
                        "accepted_prediction_tokens": accepted,
                        "rejected_prediction_tokens": 3,
                    }
                event = _event({"choices": [], "usage": usage})
                yield event if script.whole_end else event.rstrip("\n")
            if script.whole_end:
                yield "data: [DONE]\n\n"


async def _spell(script: Script, pieces: AsyncGenerator[str]) -> AsyncIterator[str]:
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            yield piece.replace("\n", script.line_end)


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _last_number(text: str) -> int:
    """Of a text of words without a number, such as that of a warm-up, 0."""
    last = text.split()[-1]
    return int(last) if last.isdigit() else 0


@contextlib.contextmanager
def scripted(
    scripts: Sequence[Script], count: Callable[[str], int] | None = None, *, pair: tuple[str, str] | None = None
) -> Iterator[ScriptedServer]:
    """Serves on a free port on a thread of its own, until the block ends; over TLS with `pair`, certificate and key."""
    parts = ScriptedServer(scripts, count)
    certificate, key = pair or (None, None)
    # Without log_config=None uvicorn closes the handlers of everybody else, and absl's takes stderr with it.
    config = uvicorn.Config(
        parts.app,
        log_config=None,
        ws="none",
        lifespan="off",
        timeout_graceful_shutdown=1,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    parts.url = f"{'http' if pair is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        start_s = time.monotonic()
        while not server.started:
            assert time.monotonic() - start_s < WAIT_S, "the scripted server does not start"
            time.sleep(0.005)
        yield parts
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        listener.close()
        assert not thread.is_alive(), "the scripted server does not end"
