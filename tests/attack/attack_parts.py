"""What tests of attacks share: a server with two keys, an attack that lasts until a test ends it, and its remains."""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from attack_kinds import KINDS, Attacker
from route_parts import Routed
from serve_parts import WAIT_S, Served, served, wait_until

from jaxserve.config.schema import GrpcConfig, HttpConfig

ATTACKER, OTHER = "sk-attacker", "sk-other"
SCALE = 0.01  # of the sizes of `scripts/attack_kinds.py`


@contextlib.contextmanager
def guarded(parts: Served, folder: Path, **http: Any) -> Iterator[Served]:
    """Serves with both keys and batches. Its limits of time are those of a test that hangs."""
    keys = folder / "keys"
    keys.write_text(f"{ATTACKER}\n{OTHER}\n")
    (folder / "batches").mkdir()
    config = HttpConfig(
        port=0,
        api_keys_file=str(keys),
        batch_dir=str(folder / "batches"),
        header_timeout_s=WAIT_S,
        body_timeout_s=WAIT_S,
        **http,
    )
    with served(parts, grpc_config=GrpcConfig(port=0, tokens_file=str(keys)), http_config=config):
        yield parts
    parts.scheduler.check()


@contextlib.contextmanager
def calling(parts: Served | Routed, key: str = OTHER) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=parts.http_url, timeout=WAIT_S, headers=headers) as client:
        yield client


def others_answer(parts: Served | Routed) -> str:
    """What another key is told now. One that is told to try again later does so."""
    found: list[httpx.Response] = []

    def is_answered() -> bool:
        found.append(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "ignore_eos": True}))
        return found[-1].status_code not in (429, 503)

    with calling(parts) as client:
        assert client.get("/health").status_code == 200
        wait_until(is_answered, "another key is answered")
    assert found[-1].status_code == 200, found[-1].text
    return found[-1].json()["choices"][0]["text"]


@contextlib.contextmanager
def attacked(parts: Served | Routed, name: str) -> Iterator[Attacker]:
    """The attack of a kind goes on within the block, which begins once something of it has reached the server."""
    http_port, grpc_port = (int(address.rpartition(":")[2]) for address in (parts.http_url, parts.address))
    by = Attacker(http_port, grpc_port, ATTACKER, OTHER, WAIT_S, SCALE)
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            KINDS[name].attack(by)
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, name=f"attack {name}", daemon=True)
    thread.start()
    try:
        wait_until(lambda: by.is_under_way or bool(ended), "the attack begins")
        yield by
    finally:
        by.leave()
        thread.join(WAIT_S)
    assert not thread.is_alive(), "the attack does not end"
    assert ended == [None]


# Threads of pools that have a most number, start them as they are needed, and keep them.
POOLS = ("jaxserve-encode", "jaxserve-large", "jaxserve-files", "asyncio_", "AnyIO worker")


@dataclasses.dataclass(frozen=True)
class Remains:
    """What a process holds that attacks could leave behind. Threads: but for those of `POOLS`."""

    files: int
    threads: int

    @classmethod
    def now(cls) -> "Remains":
        return cls(
            len(os.listdir("/proc/self/fd")), sum(not thread.name.startswith(POOLS) for thread in threading.enumerate())
        )


def assert_at_rest(parts: Served, before: Remains) -> None:
    """No request is left, no page is held, and the process has no more files and threads than before."""
    wait_until(lambda: parts.engine.num_live == parts.engine.num_unstarted == 0, "all requests have ended")
    wait_until(lambda: parts.scheduler.num_held_pages == 0 and not parts.scheduler.has_work(), "all pages are free")
    assert parts.engine.failure is None
    assert_nothing_more(before)


def assert_nothing_more(before: Remains) -> None:
    """The process comes to have no more files and threads than before."""

    def more() -> list[str]:
        now = Remains.now()
        if now.files <= before.files and now.threads <= before.threads:
            return []
        return [repr(now), *(thread.name for thread in threading.enumerate())]

    try:
        wait_until(lambda: not more(), f"files and threads are as before: {before}")
    except AssertionError as error:
        raise AssertionError(more()) from error
