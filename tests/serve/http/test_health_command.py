"""`jaxserve health` asks a port of HTTP, and says so where it was asked as one of gRPC."""

import socket

import pytest
from http_parts import http_served
from serve_parts import Served

from jaxserve.cli import main


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    return main(["health", *arguments]), capsys.readouterr().out


def test_over_http(capsys: pytest.CaptureFixture[str]) -> None:
    with http_served(Served()) as parts:
        assert told(capsys, parts.http_url, "--timeout", "60") == (0, "SERVING\n")
        assert told(capsys, parts.http_url, "--timeout", "60", "--service", "live", "--wait") == (0, "SERVING\n")
        code, out = told(capsys, parts.http_url.removeprefix("http://"), "--timeout", "60")
        assert code == 1 and f"if it is a port of HTTP, ask {parts.http_url}" in out
        assert main(["health", parts.http_url, "--service", "x"]) == 2


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held:  # bound and not listening: a client is refused
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        for more in ([], ["--wait", "--timeout", "0.5"]):
            code, out = told(capsys, url, *more)
            assert code == 1 and out.startswith(f"NO_ANSWER from {url}: ") and "does not answer" in out
