"""Limits of tenants at both doors: a refusal is told with its time, costs nothing, and touches nobody else."""

from typing import Any

import httpx
import pytest
from serve_parts import LONG, WAIT_S, Served, connect, serve_bytes, serve_slowly, served, wait_until

from jaxserve.api import SamplingParams
from jaxserve.client import CallOptions, RequestFailed
from jaxserve.config.schema import HttpConfig, TenantConfig, TenantsConfig
from jaxserve.errors import Status

SHORT = SamplingParams(temperature=0.0, max_tokens=5)
HTTP = HttpConfig(port=0)


def _as(tenant: str) -> CallOptions:
    return CallOptions(tenant=tenant)


def _refused(server: Served, reason: str, door: str) -> int:
    lines = httpx.get(f"{server.http_url}/metrics").text.splitlines()
    [line] = [one for one in lines if "refused_total" in one and f'"{reason}"' in one and f'"{door}"' in one]
    return int(float(line.split()[-1]))


def test_a_rate_is_kept_by_both_doors_together() -> None:
    limits = TenantsConfig(named={"busy": TenantConfig(requests_per_s=0.01, burst_s=200.0)})
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 5, "temperature": 0.0, "user": "busy"}
    with served(serve_bytes(), http_config=HTTP, tenants=limits) as server, connect(server) as client:
        url = f"{server.http_url}/v1/completions"
        assert client.complete("a", SHORT, options=_as("busy"), timeout_s=WAIT_S).num_generated_tokens == 5
        assert httpx.post(url, json=body, timeout=WAIT_S).status_code == 200
        with pytest.raises(RequestFailed, match=r"'busy' has sent more than 0\.01 requests a second") as caught:
            client.complete("a", SHORT, options=_as("busy"), timeout_s=WAIT_S)
        assert caught.value.status is Status.OVERLOADED
        assert caught.value.retry_after_s is not None
        assert 0 < caught.value.retry_after_s <= 100
        refused = httpx.post(url, json=body, timeout=WAIT_S)
        assert refused.status_code == 429
        assert 0 < int(refused.headers["retry-after"]) <= 100
        chat = {"messages": [{"role": "user", "content": "a"}], "user": "busy"}
        assert httpx.post(f"{server.http_url}/v1/chat/completions", json=chat, timeout=WAIT_S).status_code == 429
        items = {"input": "a", "user": "busy"}
        for route in ("responses", "embeddings"):
            assert httpx.post(f"{server.http_url}/v1/{route}", json=items, timeout=WAIT_S).status_code == 429
        message = {"model": "fake", "max_tokens": 5, "metadata": {"user_id": "busy"}, "messages": chat["messages"]}
        assert httpx.post(f"{server.http_url}/v1/messages", json=message, timeout=WAIT_S).status_code == 429
        assert client.complete("a", SHORT, options=_as("calm"), timeout_s=WAIT_S).num_generated_tokens == 5
        assert _refused(server, "tenant_requests", "grpc") == 1
        assert _refused(server, "tenant_requests", "http") == 5


def test_tokens_at_once_are_free_again_when_a_client_leaves() -> None:
    limits = TenantsConfig(default=TenantConfig(concurrent_tokens=LONG.max_tokens and LONG.max_tokens + 10))
    with served(serve_slowly(), http_config=HTTP, tenants=limits) as server, connect(server) as client:
        replies = client.generate("a", LONG, options=_as("one"), timeout_s=WAIT_S)
        next(replies)
        with pytest.raises(RequestFailed, match="tokens in live requests") as caught:
            client.complete("a" * 9, SHORT, options=_as("one"), timeout_s=WAIT_S)
        assert caught.value.status is Status.OVERLOADED
        assert server.engine.num_live == 1, "what was refused was never submitted"
        assert client.complete("a", SHORT, options=_as("other"), timeout_s=WAIT_S).num_generated_tokens == 5
        replies.close()
        wait_until(lambda: server.engine.num_live == 0, "it was aborted")
        assert client.complete("a", SHORT, options=_as("one"), timeout_s=WAIT_S).num_generated_tokens == 5
        assert _refused(server, "tenant_concurrent_tokens", "grpc") == 1


def test_answers_are_paid_for() -> None:
    limits = TenantsConfig(named={"one": TenantConfig(tokens_per_s=0.05, burst_s=100.0)})
    with served(serve_bytes(), http_config=HTTP, tenants=limits) as server, connect(server) as client:
        assert client.complete("a", SHORT, options=_as("one"), timeout_s=WAIT_S).num_generated_tokens == 5
        with pytest.raises(RequestFailed, match=r"has used more than 0\.05 tokens a second"):
            client.complete("a", SHORT, options=_as("one"), timeout_s=WAIT_S)
        assert _refused(server, "tenant_tokens", "grpc") == 1
