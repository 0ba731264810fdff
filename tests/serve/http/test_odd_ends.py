"""Ends that clients seldom meet: an id with a slash, and numbers of a model that are none."""

import pytest
from http_parts import browse
from serve_parts import WAIT_S, Served, connect, served

from jaxserve.api import NOT_FINITE, SamplingParams
from jaxserve.client import CallOptions, RequestFailed
from jaxserve.config.schema import GrpcConfig, HttpConfig
from jaxserve.errors import Status
from jaxserve.testing import ByteTokenizer


def test_an_id_that_ends_with_a_slash_is_not_found() -> None:
    parts = Served(tokenizer=ByteTokenizer())
    with served(parts, grpc_config=GrpcConfig(), http_config=HttpConfig(port=0)), browse(parts) as client:
        for path in ("/v1/responses/..%2f", "/v1/responses/x%2F", "/v1/responses/x/", "/health/"):
            response = client.get(path)
            assert response.status_code == 404, (path, response.status_code)
            assert response.json()["error"]["message"]


def test_numbers_that_are_not_finite_are_told_to_their_client() -> None:
    parts = Served(tokenizer=ByteTokenizer(), forced={("broken", 0): {1: NOT_FINITE}, ("other", 0): {1: NOT_FINITE}})
    with served(parts, grpc_config=GrpcConfig(port=0), http_config=HttpConfig(port=0)), browse(parts) as client:
        response = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, "request_id": "broken"})
        message = response.json()["error"]["message"]
        assert response.status_code == 500
        assert "the numbers for token 2" in message.replace("the model's", "the") and "under error " in message
        with connect(parts) as grpc_client, pytest.raises(RequestFailed, match="are not finite") as caught:
            list(
                grpc_client.generate(
                    "a", SamplingParams(max_tokens=4), CallOptions(request_id="other"), timeout_s=WAIT_S
                )
            )
        assert caught.value.status is Status.INTERNAL
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
