"""A router and its servers take certificates that are renewed while they run. HTTP's are in `http/test_http_tls.py`."""

import logging
from pathlib import Path

import pytest
from certificates import Authority, Pair
from route_parts import routed
from serve_parts import LONG, ONE_CALL, WAIT_S, serve_slowly, served, wait_until

from jaxserve.api import SamplingParams
from jaxserve.client import CallOptions, Client, RequestFailed, Tls
from jaxserve.config.schema import GrpcConfig
from jaxserve.serve import route_pool
from jaxserve.serve.gen import inference_pb2 as pb

SHORT = SamplingParams(temperature=0.0, max_tokens=3)


def renew(old: Pair, new: Pair) -> None:
    for before, after in zip(old, new, strict=True):
        Path(before).write_bytes(Path(after).read_bytes())


def test_a_router_and_its_servers_take_renewed_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream that runs meanwhile goes on over its old connection."""
    caplog.set_level(logging.INFO, "jaxserve")
    monkeypatch.setattr(route_pool, "RENEW_S", 0.05)
    first, second = (Authority(tmp_path, name) for name in ("first", "second"))
    server_pair, router_pair = first.issue("server"), first.issue("router")
    old, ca = first.issue("old"), tmp_path / "ca.pem"
    ca.write_bytes(Path(first.path).read_bytes())
    config = GrpcConfig(port=0, tls_cert=server_pair.certificate, tls_key=server_pair.key, tls_client_ca=str(ca))
    access = {"tls_ca": str(ca), "tls_cert": router_pair.certificate, "tls_key": router_pair.key}
    with (
        served(serve_slowly(max_rows=4), grpc_config=config) as server,
        routed(server.address, access=access, wait_s=WAIT_S) as router,
        Client(router.address, retries=ONE_CALL) as client,
    ):
        running = client.generate([97], LONG, CallOptions(request_id="long"), timeout_s=WAIT_S)
        next(running)
        renew(server_pair, second.issue("next-server"))
        ca.write_bytes(Path(second.path).read_bytes())
        renew(router_pair, second.issue("next-router"))
        before = Tls(ca=first.path, certificate=old.certificate, key=old.key)
        with Client(server.address, tls=before, retries=ONE_CALL) as late, pytest.raises(RequestFailed):
            late.complete("a", SHORT, timeout_s=WAIT_S)
        wait_until(lambda: "the router connects anew" in caplog.text, "the router has seen the new files")
        wait_until(router.is_healthy, "the router has connected anew")
        assert client.complete("a", SHORT, timeout_s=WAIT_S).text == "bcd"
        client.abort("long")
        assert list(running)[-1].finish_reason == pb.FINISH_REASON_ABORT
        assert "leaves replica" not in caplog.text
