"""LoRA adapters over HTTP: named as models, loaded and unloaded by an operator; a real model behind real HTTP."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapter_files import write_adapter
from serve_parts import WAIT_S, served
from test_http_weights import ADMIN, KEY, _Real
from test_live_weights import FIXTURES, NAME, SETTINGS

from jaxserve.api import SamplingParams
from jaxserve.assemble import assemble
from jaxserve.client import CallOptions, Client
from jaxserve.config import load_config
from jaxserve.config.schema import GrpcConfig, HttpConfig

# On a fake model, quick: tests/serve/test_grpc_adapters.py.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_quickly")]

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BODY = {"prompt": [5, 6, 7, 8, 9, 10], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


class Server:
    """`operator` and `user` are clients with their tokens; adapters lie in `folder`."""

    def __init__(self, url: str, address: str, folder: Path) -> None:
        self.folder, self.address = folder, address
        self.operator, self.user = (
            httpx.Client(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=WAIT_S, trust_env=False)
            for token in (ADMIN, KEY)
        )

    def load(self, name: str, path: str, **more: Any) -> httpx.Response:
        return self.operator.post(LOAD, json={"lora_name": name, "lora_path": path, **more})

    def ask(self, model: str | None) -> httpx.Response:
        return self.user.post("/v1/completions", json=BODY if model is None else BODY | {"model": model})

    def tokens(self, model: str | None) -> list[int]:
        reply = self.ask(model)
        assert reply.status_code == 200, reply.text
        assert reply.json()["model"] == (model or NAME)
        return reply.json()["choices"][0]["token_ids"]

    def refused(self, reply: httpx.Response, code: int, text: str) -> None:
        assert reply.status_code == code and text in reply.json()["error"]["message"], reply.text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    secrets, folder = tmp_path_factory.mktemp("secrets"), tmp_path_factory.mktemp("adapters")
    for name, secret in (("admins", ADMIN), ("keys", KEY)):
        (secrets / name).write_text(secret)
    for seed, name in enumerate(("a", "b")):
        write_adapter(folder / name, FIXTURES / NAME, seed=seed, size=1.0)
    more = {"adapters.slots": 1, "adapters.max_rank": 8, "adapters.load": {"first": str(folder / "a")}}
    assembly = assemble(load_config(None, {**SETTINGS, "parallel.data": 1, **more}))
    with served(
        _Real(assembly),
        grpc_config=GrpcConfig(port=0),
        http_config=HttpConfig(port=0, api_keys_file=str(secrets / "keys")),
        admin_tokens_file=str(secrets / "admins"),
        weights=assembly.weights,
        adapters_dir=str(folder),
    ) as parts:
        made = Server(parts.http_url, parts.address, folder)
        yield made
        made.operator.close()
        made.user.close()


def test_an_adapter_is_a_model(server: Server) -> None:
    cards = server.user.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == [NAME, "first"]
    assert cards[1]["parent"] == NAME and cards[1]["root"] == str((server.folder / "a").resolve())
    assert server.user.get("/v1/models/first").json()["parent"] == NAME
    base, first = server.tokens(None), server.tokens("first")
    assert base != first and server.tokens(NAME) == base
    server.refused(server.ask("fist"), 404, "did you mean 'first'?")
    with Client(server.address) as user:
        sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        for name, tokens in (("first", first), ("", base)):
            answer = user.complete(BODY["prompt"], sampling, CallOptions(model=name))
            assert list(answer.outputs[0].token_ids) == tokens, "gRPC and HTTP mean the same"


def test_adapters_come_and_go(server: Server) -> None:
    first = server.tokens("first")
    loaded = server.load("second", "b")
    assert loaded.status_code == 200 and len(loaded.json()["digest"]) == 64, loaded.text
    second = server.tokens("second")
    assert second != first == server.tokens("first"), "one slot, which both have had"
    server.refused(server.load("second", "a"), 400, "load_inplace")
    assert server.load("second", "a", load_inplace=True).status_code == 200
    assert server.tokens("second") == first
    assert server.operator.post(UNLOAD, json={"lora_name": "second"}).status_code == 200
    server.refused(server.ask("second"), 404, "'second' is not served here")
    server.refused(server.operator.post(UNLOAD, json={"lora_name": "second"}), 404, "not served")


def test_what_an_operator_may_name(server: Server, tmp_path: Path) -> None:
    outside = write_adapter(tmp_path / "outside", FIXTURES / NAME)
    (server.folder / "link").symlink_to(outside)
    (server.folder / "linked").mkdir()
    (server.folder / "linked" / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    for path in ("../", str(outside), "link"):
        server.refused(server.load("new", path), 400, "not under adapters.directory")
    server.refused(server.load("new", "linked"), 400, "a link that leads out of adapters.directory")
    server.refused(server.load("new", "absent"), 400, "no directory under adapters.directory")
    server.refused(server.load("a/b", "a"), 400, "1 to 64 letters")
    server.refused(server.load(NAME, "a"), 400, "the name of the model itself")
    for path, body in ((LOAD, {"lora_name": "new", "lora_path": "a"}), (UNLOAD, {"lora_name": "first"})):
        assert server.user.post(path, json=body).status_code == 401
    assert [card["id"] for card in server.user.get("/v1/models").json()["data"]] == [NAME, "first"]
