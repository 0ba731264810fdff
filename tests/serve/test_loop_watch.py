"""Work that holds the event loop up is seen while it does, with its name."""

import asyncio
import logging
import threading

import httpx
import pytest
from serve_parts import WAIT_S, Served, serve_bytes, served, wait_until

from jaxserve.config.schema import GrpcConfig, HttpConfig
from jaxserve.serve.http import pieces
from jaxserve.serve.loop_watch import LoopWatch


class Seen:
    """What the watch has told."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.told = threading.Event()

    def note(self, where: str) -> None:
        self.names.append(where)
        self.told.set()

    def block(self) -> None:
        """Holds up whoever calls until the watch sees it, or for a second if it has seen that already."""
        self.told.clear()
        self.told.wait(1.0)

    async def block_until(self, name: str, count: int) -> None:
        """Holds the loop up until the watch has told `name` so many times in all."""
        while self.names.count(name) < count:
            self.block()
            await asyncio.sleep(0)


def test_what_blocks_the_loop_is_named(caplog: pytest.LogCaptureFixture) -> None:
    seen, now_s, name = Seen(), [0.0], f"{__name__}.Seen.block"

    async def main() -> None:
        watch = LoopWatch(seen.note, package=__name__, clock=lambda: now_s[0])
        watch.start()
        await seen.block_until(name, 3)
        now_s[0] = 61.0
        await seen.block_until(name, seen.names.count(name) + 1)
        watch.stop()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    lines = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    assert len(lines) == 2 and "held up once" in lines[0] and "times by" in lines[1]


def test_what_is_not_of_the_package_has_no_name() -> None:
    seen = Seen()

    async def main() -> None:
        watch = LoopWatch(seen.note, package="another")
        watch.start()
        await seen.block_until("other", 1)
        watch.stop()

    asyncio.run(main())
    assert set(seen.names) == {"other"}


def test_names_are_bounded() -> None:
    seen = Seen()
    watch = LoopWatch(seen.note)
    for number in range(300):
        watch._tell(f"name{number}")
    assert len(set(seen.names)) == 101 and seen.names[-1] == "other"


def test_the_thread_ends_while_the_loop_is_held_up() -> None:
    seen = Seen()
    watch = LoopWatch(seen.note)

    async def main() -> None:
        watch.start()
        while not seen.names:
            seen.block()
        watch.stop()
        assert not watch._thread.is_alive()

    asyncio.run(main())


def metric(parts: Served) -> dict[str, float]:
    text = httpx.get(f"{parts.http_url}/metrics", timeout=WAIT_S).text
    lines = [line for line in text.splitlines() if line.startswith("jaxserve:event_loop_slow_callbacks_total{")]
    return {line.split('where="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_a_server_counts_what_blocks_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An answer is written in a call that ends when it has been seen."""
    told = threading.Event()

    class Waits(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "json_pieces" in record.getMessage():
                told.set()

    handler = Waits()
    logging.getLogger("jaxserve.serve.loop_watch").addHandler(handler)
    write = pieces._object
    monkeypatch.setattr(pieces, "_object", lambda fields: (told.wait(1.0), write(fields))[1])
    parts = serve_bytes()
    http = HttpConfig(port=0, header_timeout_s=WAIT_S, body_timeout_s=WAIT_S)
    try:
        with served(parts, grpc_config=GrpcConfig(port=None), http_config=http):
            ask = {"prompt": "a", "max_tokens": 2}
            while not told.is_set():
                assert httpx.post(f"{parts.http_url}/v1/completions", json=ask, timeout=WAIT_S).status_code == 200
            name = "jaxserve.serve.http.pieces.json_pieces"
            wait_until(lambda: metric(parts).get(name, 0) >= 1, "it is counted")
    finally:
        logging.getLogger("jaxserve.serve.loop_watch").removeHandler(handler)
