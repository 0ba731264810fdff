"""The functions of ours that a request crosses, found by following one, are those that docs/architecture.md lists.

What counts is decided at stations, where the request goes from one part to the next: it is prepared, submitted, added
to the scheduler, planned, given to the device, read from it, committed, handed to its reader, told to its client. A
function is on the way if it is on the stack at a station, on whatever thread. What such a function calls and gets a
value back from (a tokenizer, `pack`, the detokenizer) is not on the way, unless it is a station.
"""

import asyncio
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from whole import DEMO, SMALL

import jaxserve
from jaxserve import LLM, SamplingParams
from jaxserve.config.schema import HttpConfig, ServeConfig
from jaxserve.engine import AsyncEngine, Engine, Update
from jaxserve.offline.results import Gatherer
from jaxserve.runtime.runner import DeviceInFlight, DeviceRunner
from jaxserve.sched import ContinuousScheduler
from jaxserve.serve.counts import DoorCounts
from jaxserve.serve.http import chat, make_app
from jaxserve.serve.key_files import KeyFiles

PACKAGE = Path(jaxserve.__file__).parent
PAGE = (PACKAGE.parent / "docs/architecture.md").read_text()

# The compiled step, the sink and the send of the web server are stations beside these.
STATIONS = (
    AsyncEngine.run,
    Engine.prepare,
    Engine.submit,
    ContinuousScheduler.add,
    ContinuousScheduler.schedule,
    DeviceRunner.dispatch,
    DeviceInFlight.result,
    ContinuousScheduler.commit,
    AsyncEngine.stream,
    chat._Answer.events,
    Gatherer.take,
)
# Middleware, threads and their turns, and the check of names of arguments: the same for every call.
AROUND = (
    *("serve/http/counted.py", "serve/http/guard.py", "serve/http/bodies.py"),
    *("engine/daemon_threads.py", "offline/arguments.py", "offline/turns.py"),
)


class Follower:
    """Notes the functions of ours that are on the stack at a station.

    Attributes:
      found: in the order in which they were met.
      until_last: note nothing once the last update is with its reader, as what follows is no request's: a step was
        launched ahead of the last token.
    """

    def __init__(self) -> None:
        self.found: dict[str, None] = {}
        self.until_last = False
        self._codes: set[CodeType] = {station.__code__ for station in STATIONS}
        self._ended = False

    def profile(self, frame: FrameType, event: str, arg: object) -> None:
        """For `sys.setprofile`; a coroutine or generator that goes on is called, too."""
        if event == "call" and frame.f_code in self._codes:
            self.note(frame)

    def note(self, frame: FrameType | None) -> None:
        """`frame` is a station, or is about to call one."""
        chain = []
        while frame is not None and not self._ended:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE):
                file = path.relative_to(PACKAGE).as_posix()
                name = frame.f_code.co_qualname.rpartition("<locals>.")[2]
                if file not in AROUND and not name.endswith("<listcomp>"):  # from Python 3.12 on they have no frame
                    chain.append(f"{file}:{name}")
            frame = frame.f_back
        self.found.update(dict.fromkeys(reversed(chain)))

    def wrap(self, sink: Callable[[Update], None]) -> Callable[[Update], None]:
        def take(update: Update) -> None:
            self.note(sys._getframe(1))
            sink(update)
            self._ended = update.last and self.until_last

        return take


@pytest.fixture(scope="module")
def llm() -> LLM:
    sizes = {name.replace("__", "."): value for name, value in DEMO.items()}
    return LLM.from_config(None, overrides={"model.path": "demo", **SMALL, **sizes}, progress=False)


@pytest.fixture
def follower(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Follower]:
    """Follows on this thread, and on those that are started from now on."""
    found = Follower()
    submit = Engine.submit

    def submitted(engine: Engine, request: Any, sink: Callable[[Update], None]) -> None:
        submit(engine, request, found.wrap(sink))

    monkeypatch.setattr(Engine, "submit", submitted)
    runner: Any = llm._engine
    (stage,) = runner._runner._stages
    steps = stage.executables.steps
    for bucket, step in tuple(steps.items()):

        def launched(*arguments: Any, step: Any = step) -> Any:
            found.note(sys._getframe(1))
            return step(*arguments)

        monkeypatch.setitem(steps, bucket, launched)
    threading.setprofile(found.profile)
    sys.setprofile(found.profile)
    yield found
    sys.setprofile(None)
    threading.setprofile(None)


def listed(heading: str) -> list[str]:
    """The functions of one list of the page, in its order."""
    section = PAGE.split(f"### {heading}\n")[1].split("\n#")[0]
    return re.findall(r"^\d+\. `(\S+)`", section, re.MULTILINE)


def test_a_generated_text(llm: LLM, follower: Follower) -> None:
    follower.until_last = True
    [answer] = llm.generate("Once upon a time", SamplingParams(max_tokens=3), use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 3
    names = listed("`LLM.generate`")
    assert sorted(follower.found) == sorted(names)
    assert len(names) <= 12


def test_a_streamed_chat(llm: LLM, follower: Follower) -> None:
    engine = llm._engine
    told: list[bytes] = []
    body = {"messages": [{"role": "user", "content": "What is 683+784?"}], "max_tokens": 3, "stream": True}
    asked = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        return asked.pop() if asked else await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        follower.note(sys._getframe(1))
        told.append(message.get("body", b""))

    async def call() -> None:
        streams = AsyncEngine(engine)
        config = ServeConfig(http=HttpConfig(port=0))
        app = make_app(streams, config, DoorCounts(), KeyFiles(config)).asgi
        headers = {"host": "localhost", "content-type": "application/json"}
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        engine.start()
        await app(scope, receive, send)
        await asyncio.to_thread(engine.stop)
        streams.close()

    asyncio.run(call())
    assert b"".join(told).endswith(b"data: [DONE]\n\n") and b"content" in told[1]
    names = listed("A chat that is streamed over HTTP")
    assert sorted(follower.found) == sorted(names)
    assert len(names) <= 20
