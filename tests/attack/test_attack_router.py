"""What one caller does to others through a router: bodies, messages and requests cost nobody else, and none remains."""

import logging
import threading
from collections.abc import Iterator

import httpx
import pytest
from attack_parts import ATTACKER, OTHER, Remains, assert_nothing_more, attacked, calling, others_answer
from route_parts import Routed, fake_server, routed
from serve_parts import WAIT_S, wait_until

from jaxserve.config.schema import HttpConfig

KINDS_FOR_ROUTERS = (
    *("aborts", "bodies_held", "connections", "grpc_aborts", "grpc_messages", "grpc_tokenize", "half_closed"),
    *("large_sampling", "metadata", "nested_json", "queue", "slow_uploads", "tool_arguments", "unread_streams"),
)


def test_a_router_counts_what_holds_its_loop_up() -> None:
    told = threading.Event()

    class Tells(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.set()

    def held(router: Routed) -> float:
        text = httpx.get(f"{router.http_url}/metrics", timeout=WAIT_S).text
        lines = [x for x in text.splitlines() if x.startswith("jaxserve:router_event_loop_slow_callbacks_total{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    handler = Tells()
    logging.getLogger("jaxserve.serve.loop_watch").addHandler(handler)
    try:
        with routed("127.0.0.1:1", http=HttpConfig(port=0), wait=False) as router:
            before = held(router)
            told.clear()
            router.loop.call_soon_threadsafe(told.wait, 1.0)  # until it is told, unless that was a minute ago
            wait_until(lambda: held(router) > before, "it is counted")
    finally:
        logging.getLogger("jaxserve.serve.loop_watch").removeHandler(handler)
    assert not any(thread.name == "jaxserve-loop-watch" for thread in threading.enumerate())


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    keys = tmp_path_factory.mktemp("router") / "keys"
    keys.write_text(f"{ATTACKER}\n{OTHER}\n")
    http = HttpConfig(port=0, api_keys_file=str(keys), header_timeout_s=WAIT_S, body_timeout_s=WAIT_S)
    with (
        fake_server(demo=True) as (_, address),
        routed(address, http=http, tokens_file=str(keys), access={"tokenizer": "demo"}, wait=False) as made,
    ):
        wait_until(lambda: httpx.get(f"{made.http_url}/ready", timeout=WAIT_S).status_code == 200, "it knows the model")
        yield made


def running(router: Routed) -> float:
    """Calls that have not ended, those of the other key included."""
    with calling(router) as client:
        text = client.get("/metrics").text
    [line] = [line for line in text.splitlines() if line.startswith("jaxserve:router_requests_running ")]
    return float(line.split()[1])


@pytest.mark.parametrize("name", KINDS_FOR_ROUTERS)
def test_an_attack_through_a_router_stops_nobody(router: Routed, name: str) -> None:
    with attacked(router, name):  # the first one starts what is started when it is needed
        others_answer(router)
    wait_until(lambda: running(router) == 0, "all calls have ended")
    before = Remains.now()
    with attacked(router, name) as by:
        assert len(others_answer(router)) > 0
    wait_until(lambda: running(router) == 0, "all calls have ended")
    assert_nothing_more(before)
    assert not {"500", "INTERNAL", "UNKNOWN"} & set(by.outcomes), by.examples
