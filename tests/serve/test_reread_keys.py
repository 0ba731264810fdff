"""SIGHUP where there are files of keys: they are read again, at both doors and for operators, and nothing ends."""

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from route_parts import routed
from serve_parts import ONE_CALL, WAIT_S, serve_bytes, served, wait_until

from jaxserve.api import SamplingParams
from jaxserve.client import Client, RequestFailed
from jaxserve.config.schema import GrpcConfig, HttpConfig, ServeConfig
from jaxserve.errors import ConfigError, Status
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.key_files import KeyFiles, has_key_files
from jaxserve.serve.keys import ListedKey
from jaxserve.serve.owners import OWNER_METADATA, Owners

SHORT = SamplingParams(temperature=0.0, max_tokens=2)

SERVER = """
import logging, signal, sys
signal.signal(signal.SIGHUP, signal.{before})
sys.path.insert(0, {tests!r})
from serve_parts import WAIT_S, serve_slowly
from jaxserve.config.schema import GrpcConfig, HttpConfig, ServeConfig
from jaxserve.serve.service import serve_forever
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
config = ServeConfig(
    drain_s=WAIT_S,
    grpc=GrpcConfig(port=0, tokens_file=sys.argv[1]),
    http=HttpConfig(port=0, api_keys_file=sys.argv[1]),
    admin_tokens_file=sys.argv[2],
)
sys.exit(serve_forever(serve_slowly(0.01).engine, config))
"""


class _Running(NamedTuple):
    process: subprocess.Popen[str]
    grpc: str
    http: str
    log: list[str]  # lines, as they come

    def call(self, key: str) -> Status | None:
        """How a call over gRPC ends; None: well."""
        with Client(self.grpc, token=key, retries=ONE_CALL) as client:
            try:
                list(client.generate([1], SHORT, timeout_s=WAIT_S))
            except RequestFailed as error:
                return error.status
        return None

    def ask(self, path: str, key: str) -> int:
        """The status of a GET."""
        headers = {"authorization": f"Bearer {key}"}
        return httpx.get(f"http://{self.http}{path}", headers=headers, timeout=WAIT_S).status_code

    def reread(self, expected: str) -> None:
        """Sends SIGHUP, and waits for one more line of the log with this text."""
        count = sum(expected in line for line in self.log)
        self.process.send_signal(signal.SIGHUP)
        wait_until(lambda: sum(expected in line for line in self.log) > count, f"the log says {expected!r}")


@contextlib.contextmanager
def _running(keys: Path, tokens: Path, before: str) -> Iterator[_Running]:
    code = SERVER.format(tests=str(Path(__file__).parent), before=before)
    command = [sys.executable, "-c", code, str(keys), str(tokens)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            addresses = [process.stdout.readline().split()[-1] for _ in range(2)]
            log: list[str] = []
            reader = threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True)
            reader.start()
            yield _Running(process, addresses[0], addresses[1], log)
        finally:
            process.kill()


@pytest.mark.parametrize("before", ["SIG_DFL", "SIG_IGN"])  # the second: as under nohup
def test_sighup_reads_the_keys_again_and_ends_nothing(tmp_path: Path, before: str) -> None:
    keys, tokens = tmp_path / "keys", tmp_path / "tokens"
    keys.write_text("sk-stays\nsk-goes\n")
    tokens.write_text("token-goes\n")
    with _running(keys, tokens, before) as server:
        assert server.call("sk-comes") is Status.UNAUTHENTICATED
        assert server.ask("/admin/cache", "token-goes") == 200
        with Client(server.grpc, token="sk-goes") as client:
            running = client.generate([1], SamplingParams(temperature=0.0, max_tokens=300), timeout_s=WAIT_S)
            replies = [next(running)]
            fresh = tmp_path / "fresh"
            fresh.write_text("sk-stays\nsk-comes weight=2\n")
            fresh.rename(keys)  # as whoever rotates a file should
            tokens.write_text("token-comes\n")
            server.reread("the keys were read again")
            assert [server.call(key) for key in ("sk-stays", "sk-comes")] == [None, None]
            assert [server.ask("/v1/models", key) for key in ("sk-stays", "sk-comes")] == [200, 200]
            assert server.call("sk-goes") is Status.UNAUTHENTICATED and server.ask("/v1/models", "sk-goes") == 401
            assert server.ask("/admin/cache", "token-goes") == 401 and server.ask("/admin/cache", "token-comes") == 200
            assert server.ask("/ready", "none") == 200, "nothing drains"
            replies += running  # of a key that has gone
        assert replies[-1].finish_reason == pb.FINISH_REASON_LENGTH
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT_S) == 0
        [line] = [line for line in server.log if "read again" in line]
        assert "serve.http.api_keys_file has 2, 1 of them new; 1 have gone" in line
        assert not any(secret in "".join(server.log) for secret in ("sk-", "token-"))


def test_files_that_cannot_be_used_change_nothing_and_the_log_says_why(tmp_path: Path) -> None:
    keys, tokens = tmp_path / "keys", tmp_path / "tokens"
    keys.write_text("sk-stays\n")
    tokens.write_text("token-stays\n")
    with _running(keys, tokens, "SIG_DFL") as server:
        for spoil, reason in (
            (lambda: keys.write_text("sk-comes weight=-1\n"), "weight is"),
            (lambda: keys.write_text("# nothing yet\n"), "holds nothing"),
            (keys.unlink, "cannot read"),
            (lambda: (keys.write_text("sk-comes\n"), tokens.write_text("")), "serve.admin_tokens_file"),
        ):
            spoil()
            server.reread(reason)
            assert server.call("sk-stays") is None and server.ask("/v1/models", "sk-stays") == 200
            assert server.call("sk-comes") is Status.UNAUTHENTICATED and server.ask("/v1/models", "sk-comes") == 401
            assert server.ask("/admin/cache", "token-stays") == 200
        tokens.write_text("token-stays\n")
        server.reread("the keys were read again")
        assert server.call("sk-comes") is None, "and the next signal takes what was mended"


def test_a_router_reads_its_keys_again(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-goes\n")
    with served(serve_bytes()) as server, routed(server.address, tokens_file=str(keys)) as router:
        with Client(router.address, token="sk-goes") as client:
            list(client.generate([1], SHORT, timeout_s=WAIT_S))
        keys.write_text("sk-comes\n")
        assert router.loop is not None and router.shutdown is not None
        router.loop.call_soon_threadsafe(router.shutdown.reread.set)

        def comes() -> bool:
            with (
                Client(router.address, token="sk-comes", retries=ONE_CALL) as client,
                contextlib.suppress(RequestFailed),
            ):
                return bool(list(client.generate([1], SHORT, timeout_s=WAIT_S)))
            return False

        wait_until(comes, "the new key is known")
        with (
            Client(router.address, token="sk-goes", retries=ONE_CALL) as client,
            pytest.raises(RequestFailed) as caught,
        ):
            list(client.generate([1], SHORT, timeout_s=WAIT_S))
        assert caught.value.status is Status.UNAUTHENTICATED


def test_an_owner_whose_key_stays_is_the_same_one() -> None:
    owners = Owners([ListedKey("sk-stays"), ListedKey("sk-goes", 4.0)], salt_by_key=True)
    stays, goes = (owners.of_http(f"Bearer {key}", "1.2.3.4") for key in ("sk-stays", "sk-goes"))
    owners.replace([ListedKey("sk-stays"), ListedKey("sk-comes")])
    assert owners.of_http("Bearer sk-stays", "1.2.3.4") == stays
    # A call that was let in before is still that of its key, and not that of all callers without one.
    gone = owners.of_http("Bearer sk-goes", "1.2.3.4")
    assert (gone.id, gone.scope, gone.salt, gone.weight) == (goes.id, goes.scope, goes.salt, 1.0)
    # What was never a key is no owner, so that nobody makes owners by inventing them.
    assert owners.of_http("Bearer sk-invented", "1.2.3.4").scope == ""


def test_a_router_whose_key_has_gone_is_believed_no_more() -> None:
    class Call:
        def invocation_metadata(self) -> list[tuple[str, str]]:
            return [("authorization", "Bearer sk-router"), (OWNER_METADATA, f"{'a' * 16} 2.0 key")]

        def peer(self) -> str:
            return "ipv4:1.2.3.4:5"

    owners = Owners([ListedKey("sk-router", is_router=True)], salt_by_key=True)
    assert owners.of_call(Call()).id == "a" * 16
    owners.replace([ListedKey("sk-other")])
    assert owners.of_call(Call()).id != "a" * 16


def test_what_has_files_of_keys_and_what_is_read() -> None:
    assert not has_key_files(ServeConfig())
    for config in (
        ServeConfig(grpc=GrpcConfig(tokens_file="keys")),
        ServeConfig(http=HttpConfig(api_keys_file="keys")),
        ServeConfig(admin_tokens_file="keys"),
    ):
        assert has_key_files(config)
    closed = KeyFiles(ServeConfig(http=HttpConfig(port=None, api_keys_file="nothing is here")))
    assert closed.http.known is None, "the files of a door without a port are not read"
    with pytest.raises(ConfigError, match="cannot read"):
        KeyFiles(ServeConfig(http=HttpConfig(port=0, api_keys_file="nothing is here")))
