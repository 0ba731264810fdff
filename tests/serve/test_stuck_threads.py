"""A server ends within its time although a thread of it works on, for as long as it may take."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serve_parts import ONE_CALL, WAIT_S

from jaxserve.client import Client, RequestFailed

SERVER = """
import sys, threading
sys.path.insert(0, {tests!r})
from serve_parts import Served
from jaxserve.config.schema import GrpcConfig, HttpConfig, ServeConfig
from jaxserve.serve.service import serve_forever
from jaxserve.testing import ByteTokenizer

class Stuck(ByteTokenizer):
    def encode(self, text, **options):
        if text != "stuck":
            return super().encode(text, **options)
        print("begun", flush=True)
        threading.Event().wait()

parts = Served(tokenizer=Stuck())
doors = {{"grpc": GrpcConfig(port=0), "http": HttpConfig(port=0)}}
sys.exit(serve_forever(parts.engine, ServeConfig(drain_s=0.5, encode_threads=2, **doors)))
"""


@contextlib.contextmanager
def server_process() -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The process, and its addresses of gRPC and HTTP."""
    command = [sys.executable, "-c", SERVER.format(tests=str(Path(__file__).parent))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            grpc, http = (process.stdout.readline().split()[-1] for _ in range(2))
            yield process, grpc, http
        finally:
            process.kill()


def test_a_prompt_that_is_encoded_without_end_does_not_hold_the_process() -> None:
    with server_process() as (process, grpc, http), Client(grpc, retries=ONE_CALL) as client:
        assert process.stdout is not None
        with pytest.raises(RequestFailed):
            client.tokenize("stuck", timeout_s=0.5)  # whose client leaves: the thread works on
        assert process.stdout.readline() == "begun\n"
        host, port = http.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "stuck"}).encode()
        head = f"POST /tokenize HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as stays:
            stays.sendall(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, errors


LOOP = """
import asyncio, threading
from jaxserve.serve.shutdown import run_with_signals

async def work(shutdown):
    begun = threading.Event()
    asyncio.ensure_future(asyncio.to_thread(lambda: (begun.set(), threading.Event().wait())))
    assert await asyncio.to_thread(begun.wait, 100.0)
    return 7

raise SystemExit(run_with_signals(work))
"""


def test_no_thread_of_the_event_loop_holds_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", LOOP], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "", "")


def test_what_a_thread_of_the_event_loop_has_begun_may_end() -> None:
    code = (
        "import asyncio, time\n"
        "from jaxserve.serve import shutdown\n"
        f"shutdown._THREADS_S = {WAIT_S}\n"
        "async def work(flags):\n"
        "    begun = asyncio.Event()\n"
        "    loop = asyncio.get_running_loop()\n"
        "    def write():\n"
        "        loop.call_soon_threadsafe(begun.set)\n"
        "        time.sleep(0.2)\n"
        "        print('written', flush=True)\n"
        "    asyncio.ensure_future(asyncio.to_thread(write))\n"
        "    await begun.wait()\n"
        "    return 0\n"
        "raise SystemExit(shutdown.run_with_signals(work))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "written\n", "")
