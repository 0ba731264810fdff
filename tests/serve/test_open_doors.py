"""Keys at one door and none at the other: told before anything is loaded."""

import logging
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import load_config
from jaxserve.config.schema import GrpcConfig, HttpConfig, ServeConfig
from jaxserve.errors import ConfigError
from jaxserve.serve.open_doors import refuse_half_closed, warn_of_open
from jaxserve.serve.route import route_forever
from jaxserve.serve.service import check_serve_config

EVERYWHERE = "0.0.0.0"


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text("a-key-of-mine")
    return str(path)


def config(host: str = EVERYWHERE, tokens: str | None = None, keys: str | None = None, **more: Any) -> ServeConfig:
    grpc, http = GrpcConfig(port=0, tokens_file=tokens), HttpConfig(port=0, api_keys_file=keys)
    return ServeConfig(**{"host": host, "grpc": grpc, "http": http, **more})


@pytest.mark.parametrize(("closed", "opened"), [("keys", "grpc"), ("tokens", "http")])
def test_one_of_two_doors_is_refused_with_both_ways_out(keys: str, closed: str, opened: str) -> None:
    setting = {"grpc": "serve.grpc.tokens_file", "http": "serve.http.api_keys_file"}[opened]
    half = config(**{closed: keys})
    words = (
        rf"anyone who reaches 0\.0\.0\.0 may call serve\.{opened}\.port; set {setting} too .*open_doors=\[{opened}\]"
    )
    with pytest.raises(ConfigError, match=words):
        check_serve_config(half)
    check_serve_config(config(tokens=keys, keys=keys))
    check_serve_config(config(**{closed: keys}, open_doors=[opened]))
    check_serve_config(config("127.0.0.1", **{closed: keys}))
    check_serve_config(config("::1", **{closed: keys}))


def test_routers_too(keys: str) -> None:
    settings = [
        f"serve.host={EVERYWHERE}",
        "serve.grpc.port=0",
        "serve.http.port=0",
        f"serve.http.api_keys_file={keys}",
    ]
    with pytest.raises(ConfigError, match=r"serve\.grpc\.tokens_file too"):
        route_forever(load_config(None, [*settings, "route.replicas=[a:1]"], environ={}).config)


def test_one_door_alone_and_certificates_of_clients(keys: str) -> None:
    refuse_half_closed(config(keys=keys, grpc=GrpcConfig(port=None)))
    refuse_half_closed(config(keys=keys, grpc=GrpcConfig(port=0, tls_client_ca="ca.pem")))
    refuse_half_closed(config())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"open_doors": ["http"], "http": HttpConfig()}, "serve.open_doors has http, but it has no port"),
        ({"open_doors": ["grpc"], "grpc": GrpcConfig(port=0, tokens_file="x")}, "but serve.grpc.tokens_file or"),
    ],
)
def test_what_is_called_open_is_open(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        refuse_half_closed(config(**more))


def test_warnings(keys: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="jaxserve")

    def said(one: ServeConfig) -> list[str]:
        caplog.clear()
        warn_of_open(one)
        return [record.getMessage() for record in caplog.records]

    [line] = said(config())
    assert line.startswith(
        "anyone who reaches 0.0.0.0 may call: no key is asked for (serve.grpc.tokens_file and serve.h"
    )
    [line] = said(config("127.0.0.1", keys=keys))
    assert line == "callers of grpc need no key, unlike those of http: set serve.grpc.tokens_file"
    for quiet in (
        config("127.0.0.1"),
        config(tokens=keys, keys=keys),
        config(open_doors=["grpc", "http"]),
        config("127.0.0.1", keys=keys, open_doors=["grpc"]),
    ):
        assert said(quiet) == []
