"""`jaxserve top` against a served engine and against scrapes written by hand."""

import concurrent.futures
import contextlib
import io
import re
import socket
from pathlib import Path

import pytest
from rich.console import Console
from watched import WAIT_S, ask, until_idle, watched

from jaxserve import cli
from jaxserve.cli.top import fetch, metrics_url, parse_scrape, percentile, render, show
from jaxserve.errors import ConfigError

HEAD = 'jaxserve:ttft_bucket{model_name="m",engine="0",le='


def _scrape(time_s: float, *counts: float, engine: str = "0") -> str:
    ends = ("0.1", "0.2", "0.4", "+Inf")
    lines = [f'{HEAD.replace("0", engine, 1)}"{end}"}} {count}' for end, count in zip(ends, counts, strict=True)]
    return "# TYPE jaxserve:ttft histogram\n" + "\n".join(lines) + "\n"


def _text(group: object) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(group)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_once_prints_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    with watched() as parts:
        for _ in range(3):
            ask(parts, "abcdefghijklmnop", max_tokens=8)
            until_idle(parts)
        assert cli.main(["top", parts.http_url, "--once"]) == 0
    shown = capsys.readouterr().out
    assert "fake" in shown and "since start" in shown
    assert "62.7 %" in shown  # prefix hits: 32 of 51 tokens
    assert "253 free" in shown and "3 cached" in shown
    lines = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert lines["TTFT"][1] == "3" and lines["ITL"][1] == "21" and lines["TPOT"][1] == "3"


def test_two_readings_give_rates(tmp_path: Path) -> None:
    with watched(tmp_path) as parts:
        before = fetch(parts.http_url, "right-key")
        for _ in range(4):
            ask(parts, max_tokens=10)
        until_idle(parts)
        now = fetch(parts.http_url, "right-key")
        later = now._replace(time_s=before.time_s + 2.0)
        shown = _text(render(later, before, "x"))
    assert "20.0/s" in shown and "over 2.0 s" in shown  # 40 tokens


def test_it_follows_until_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    naps = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    with watched() as parts:
        assert show(parts.http_url, None, every_s=0.5, once=False, sleep=sleep) == 0
    assert naps == [0.5] * 3
    assert "jaxserve top" in capsys.readouterr().out


def test_a_server_that_goes_away_is_asked_until_it_is_back() -> None:
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        parts = first.enter_context(watched())
        ask(parts)
        until_idle(parts)
        port = int(parts.http_url.rpartition(":")[2])

        def start_again() -> None:
            ask(second.enter_context(watched(port=port)), max_tokens=3)

        def interrupt() -> None:
            raise KeyboardInterrupt

        acts = [lambda: None, first.close, start_again, lambda: None, interrupt]
        console = Console(file=io.StringIO(), width=100)
        assert show(parts.http_url, None, every_s=0.1, once=False, console=console, sleep=lambda _: acts.pop(0)()) == 0
    views = console.file.getvalue().split("jaxserve top")[1:]  # pyright: ignore[reportAttributeAccessIssue]
    assert ["since start" in view for view in views] == [True, False, False, True, False]
    assert views[1].rstrip().endswith("asking again") and "does not answer" in views[1]
    assert not re.search(r"-\d", views[3]), "a rate below zero"


@pytest.mark.parametrize("width", [60, 80])
def test_it_fits_a_narrow_terminal(width: int) -> None:
    with watched() as parts:
        ask(parts, max_tokens=40)
        until_idle(parts)
        before = fetch(parts.http_url, None)
        now = before._replace(time_s=before.time_s + 1.0)
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(render(now, before, "http://127.0.0.1:8000/metrics", width))
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "…" not in shown
    assert shown.count("0.0/s") == 3, shown  # generated, prompts, steps
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= width


def test_dead_replicas_are_told() -> None:
    text = "# TYPE jaxserve:engine_alive gauge\n" + "".join(
        f'jaxserve:engine_alive{{model_name="m",engine="{k}"}} {float(k != 1)}\n' for k in range(3)
    )
    assert "1 of 3 replicas dead" in _text(render(parse_scrape(text, 0), None, "x"))


def test_a_smaller_sum_means_a_new_start() -> None:
    first, second = parse_scrape(_scrape(0, 4, 4, 8, 10), 0), parse_scrape(_scrape(1, 4, 8, 12, 14), 1)
    total = parse_scrape("# TYPE jaxserve:steps counter\njaxserve:steps_total 5\n", 0)
    fewer = parse_scrape("# TYPE jaxserve:steps counter\njaxserve:steps_total 4\n", 1)
    assert second.continues(first) and total.continues(total)
    assert not fewer.continues(total) and not first.continues(total)


def test_percentiles_are_prometheus_own() -> None:
    first, second = parse_scrape(_scrape(0, 4, 4, 8, 10), 0), parse_scrape(_scrape(1, 4, 8, 12, 14), 1)
    # Between the two: 4 values in (0.1, 0.2], nothing else.
    assert percentile(second, first, "ttft", 0.5) == pytest.approx(0.15)
    assert percentile(second, first, "ttft", 0.9) == pytest.approx(0.19)
    # From the start: 4 in (0, 0.1], 4 in (0.2, 0.4], 2 above: those are told as the last bound.
    assert percentile(first, None, "ttft", 0.2) == pytest.approx(0.05)
    assert percentile(first, None, "ttft", 0.6) == pytest.approx(0.3)
    assert percentile(first, None, "ttft", 0.99) == 0.4
    assert percentile(first, first, "ttft", 0.5) is None
    assert percentile(first, None, "nothing", 0.5) is None


def test_replicas_are_added_up() -> None:
    text = _scrape(0, 1, 1, 1, 1) + _scrape(0, 3, 3, 3, 3, engine="7").split("\n", 1)[1]
    assert parse_scrape(text, 0).values("ttft_bucket", "le")["+Inf"] == 4


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("localhost:8000", "http://localhost:8000/metrics"),
        ("https://h/x/", "https://h/x/metrics"),
        ("http://h:1/metrics", "http://h:1/metrics"),
    ],
)
def test_addresses(given: str, url: str) -> None:
    assert metrics_url(given) == url


@pytest.mark.parametrize(
    "given", ["ftp://h", "http://", "http://:80", "file:///etc/passwd", "", "h:80x", "h:99999", "h h:1", "[::1"]
)
def test_no_address(given: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        metrics_url(given)


def test_what_goes_wrong_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with watched(tmp_path) as parts:
        assert cli.main(["top", parts.http_url, "--once"]) == 2
        assert "--api-key-file" in capsys.readouterr().err
        assert cli.main(["top", f"{parts.http_url}/nowhere", "--once"]) == 2
        capsys.readouterr()
        keys = str(tmp_path / "keys")
        assert cli.main(["top", parts.http_url, "--once", "--api-key-file", keys]) == 0
    assert cli.main(["top", parts.http_url, "--once"]) == 2
    assert "does not answer" in capsys.readouterr().err
    assert cli.main(["top", "https://127.0.0.1:1", "--once", "--tls-ca", str(tmp_path / "none")]) == 2
    assert "--tls-ca" in capsys.readouterr().err


def test_a_port_that_speaks_something_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, concurrent.futures.ThreadPoolExecutor(1) as pool:

        def answer_as_grpc() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(bytes.fromhex("000012040000000000") + bytes(18) + b"\n")  # a frame of HTTP/2

        answered = pool.submit(answer_as_grpc)
        with pytest.raises(ConfigError, match="no HTTP"):
            fetch(f"127.0.0.1:{listener.getsockname()[1]}", None)
        answered.result(WAIT_S)


def test_other_metrics_are_refused() -> None:
    with pytest.raises(ConfigError, match="begins with jaxserve:"):
        parse_scrape("# TYPE a counter\na_total 1\n", 0)
    with pytest.raises(ConfigError, match="no text of Prometheus"):
        parse_scrape("<html>{</html>", 0)


def test_a_key_may_have_any_letters(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# of the watchers\nключ-é\n", encoding="utf-8")
    with watched(api_keys_file=str(tmp_path / "keys")) as parts:
        assert cli.main(["top", parts.http_url, "--once", "--api-key-file", str(tmp_path / "keys")]) == 0
        assert cli.main(["top", parts.http_url, "--once", "--api-key-file", str(tmp_path / "none")]) == 2
