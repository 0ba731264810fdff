"""The end of a server by an order of its operator."""

from pathlib import Path

import grpc
import pytest
from serve_parts import LONG, ONE_CALL, WAIT_S, serve_slowly, wait_until
from test_admin import KEY, Operator, _served

from jaxserve.client import Client, RequestFailed
from jaxserve.serve.gen import admin_pb2 as pb


@pytest.mark.parametrize("over_http", [True, False])
def test_an_order_to_drain(tmp_path: Path, over_http: bool) -> None:
    """It is SIGTERM with a time of its own; the signal that follows when its pod is deleted cuts nothing short."""
    with _served(serve_slowly(), tmp_path) as parts, Client(parts.address, token=KEY, retries=ONE_CALL) as client:
        operator = Operator(parts)
        reply = operator.http.post("/admin/drain", json={"timeout_s": 2 * WAIT_S})
        assert reply.status_code == 400 and "serve.drain_s" in reply.json()["error"]["message"]
        refused = operator.refused("Drain", pb.DrainRequest(timeout_s=float("nan")), grpc.StatusCode.INVALID_ARGUMENT)
        assert "serve.drain_s" in refused
        running = client.generate("a", LONG)
        next(running)
        if over_http:
            assert operator.http.post("/admin/drain", json={}).json() == {"num_live": 1}
        else:
            assert operator.call("Drain", pb.DrainRequest()).num_live == 1
        wait_until(lambda: not parts.engine.accepting, "it drains")
        parts.request_shutdown()
        for _ in range(10):
            next(running)
        operator.call("Drain", pb.DrainRequest(timeout_s=0.0))
        with pytest.raises(RequestFailed) as caught:
            list(running)
        assert caught.value.draining
        assert parts.wait_for_exit() == 0
        operator.close()
