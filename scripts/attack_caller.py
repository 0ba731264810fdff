"""The other caller of `attack.py`: short chats with a key of its own, and the probe of health beside them."""

import dataclasses
import http.client
import json
import statistics
import threading
import time
from collections.abc import Mapping
from typing import Any

HOST = "127.0.0.1"  # attacks and their victims are on this machine, and nowhere else
EVERY_S = 0.15
PATIENCE_S = 30.0  # after which a caller gives up
_CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True}


@dataclasses.dataclass(frozen=True)
class Asked:
    """One call: when it began, how long it took, and its status (0: there was none in time)."""

    at_s: float
    seconds: float
    status: int


def ask(port: int, path: str, key: str, body: Mapping[str, Any] | None = None, patience_s: float = PATIENCE_S) -> Asked:
    """A POST of `body`, or without one a GET, on a connection of its own."""
    begun_s, status = time.monotonic(), 0
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json", "connection": "close"}
    connection = http.client.HTTPConnection(HOST, port, timeout=patience_s)
    try:
        text = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, text, headers)
        answer = connection.getresponse()
        answer.read()
        status = answer.status
    except (OSError, http.client.HTTPException):
        pass  # its status is 0
    finally:
        connection.close()
    return Asked(begun_s, time.monotonic() - begun_s, status)


class Caller:
    """Two threads, from `start` until `stop`: one sends chats and one asks for health, each one call at a time."""

    def __init__(self, port: int, key: str) -> None:
        self._port = port
        self._key = key
        self._ended = threading.Event()
        self.chats: list[Asked] = []
        self.probes: list[Asked] = []
        self._threads = [
            threading.Thread(target=self._repeat, args=("/v1/chat/completions", _CHAT, self.chats), daemon=True),
            threading.Thread(target=self._repeat, args=("/health", None, self.probes), daemon=True),
        ]

    def start(self) -> None:
        """Begins to call."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Waits for the last calls, which are given up after `PATIENCE_S`."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, path: str, body: Mapping[str, Any] | None, found: list[Asked]) -> None:
        while not self._ended.is_set():
            found.append(ask(self._port, path, self._key, body))
            self._ended.wait(max(0.0, EVERY_S - found[-1].seconds))


def summary(calls: list[Asked]) -> dict[str, Any]:
    """Seconds of the middle and the worst call, and how many had which end; also of calls in vain."""
    times_s = [one.seconds for one in calls]
    refused = [one.status for one in calls if one.status not in (0, 200)]
    return {
        "calls": len(calls),
        "median_s": round(statistics.median(times_s), 3) if times_s else None,
        "worst_s": round(max(times_s), 3) if times_s else None,
        "unanswered": sum(one.status == 0 for one in calls),
        "refused": {str(status): refused.count(status) for status in sorted(set(refused))},
    }
