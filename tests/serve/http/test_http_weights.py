"""Other weights for a server, and its sleep, by the calls of an operator: a real model behind real HTTP."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file
from serve_parts import WAIT_S, Served, served
from test_live_weights import CLOSE, FIXTURES, NAME, PROMPTS, SETTINGS, Params, other, trainable, wanted

from jaxserve.assemble import Assembly, assemble
from jaxserve.config import load_config
from jaxserve.config.schema import GrpcConfig, HttpConfig, ServeConfig
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.serve.service import check_serve_config
from jaxserve.serve.weights import WeightOrders

pytestmark = pytest.mark.usefixtures("compiled_quickly")

ADMIN, KEY = "the-operators", "a-users"
BODY = {"model": NAME, "prompt": PROMPTS[0], "max_tokens": 12, "seed": 5, "temperature": 1.0, "ignore_eos": True}
BODY |= {"logprobs": 0, "return_token_ids": True}


class _Real(Served):
    """An engine with a model in the place of the fake one."""

    def __init__(self, assembly: Assembly) -> None:
        self.engine = assembly.engine  # pyright: ignore[reportAttributeAccessIssue]

    def release(self) -> None:
        """Nothing is ever held."""


class Server:
    """`operator` and `user` are clients with their tokens; checkpoints lie in `folder`."""

    def __init__(self, url: str, assembly: Assembly, folder: Path) -> None:
        self.operator, self.user = (
            httpx.Client(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=WAIT_S, trust_env=False)
            for token in (ADMIN, KEY)
        )
        self.assembly = assembly
        self.folder = folder

    def write(self, name: str, params: Params) -> None:
        """A checkpoint with these weights."""
        (self.folder / name).mkdir()
        (self.folder / name / "config.json").write_bytes((FIXTURES / NAME / "config.json").read_bytes())
        save_file(trainable()[0].to_hf(params), str(self.folder / name / "model.safetensors"))

    def update(self, name: str, version: str, **more: Any) -> httpx.Response:
        return self.operator.post("/admin/weights", json={"directory": name, "version": version, **more})

    def refused(self, reply: httpx.Response, code: int, text: str) -> None:
        assert reply.status_code == code and text in reply.json()["error"]["message"], reply.text

    def choice(self) -> dict[str, Any]:
        reply = self.user.post("/v1/completions", json=BODY)
        assert reply.status_code == 200, reply.text
        [choice] = reply.json()["choices"]
        return choice


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    secrets, folder = tmp_path_factory.mktemp("secrets"), tmp_path_factory.mktemp("weights")
    for name, secret in (("admins", ADMIN), ("keys", KEY)):
        (secrets / name).write_text(secret)
    assembly = assemble(load_config(None, SETTINGS))
    for later in assembly.later:
        later.wait()
    http = HttpConfig(port=0, api_keys_file=str(secrets / "keys"), weights_dir=str(folder))
    with served(
        _Real(assembly),
        grpc_config=GrpcConfig(),
        http_config=http,
        admin_tokens_file=str(secrets / "admins"),
        weights=assembly.weights,
    ) as parts:
        made = Server(parts.http_url, assembly, folder)
        yield made
        made.operator.close()
        made.user.close()


def check(choice: dict[str, Any], params: Params) -> None:
    """Each token has the log-probability that these weights give it."""
    right = wanted(params, PROMPTS[0], choice["token_ids"])
    assert np.abs(right - choice["logprobs"]["token_logprobs"]).max() < CLOSE


def test_answers_are_those_of_the_checkpoint_that_the_operator_names(server: Server) -> None:
    before = server.choice()
    check(before, trainable()[1])
    assert "weights" not in before
    params = {"one": other(1), "two": other(2)}
    for name, policy in (("one", "finish"), ("two", "keep")):
        server.write(name, params[name])
        reply = server.update(name, name, policy=policy)
        assert reply.status_code == 200, reply.text
        assert reply.json()["version"] == name and reply.json()["pause_s"] >= 0
        assert server.operator.get("/admin/weights").json() == {"version": name, "asleep": False}
        choice = server.choice()
        check(choice, params[name])
        assert choice["weights"] == [{"first_token": 0, "version": name}]
    with server.user.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as stream:
        events = [line for line in stream.iter_lines() if '"weights"' in line]
    assert len(events) == 1 and '"finish_reason":"length"' in events[0] and '"version":"two"' in events[0]
    ended = server.update("two", "two")
    server.refused(ended, 400, "version is 'two'")


def test_what_is_not_in_the_directory_is_not_read(server: Server, tmp_path: Path) -> None:
    root = server.folder
    outside = tmp_path / "outside"
    server.write("inside", other(3))
    (root / "inside").rename(outside)
    (root / "link").symlink_to(outside)
    (root / "linked").mkdir()
    (root / "linked" / "config.json").write_bytes((outside / "config.json").read_bytes())
    (root / "linked" / "model.safetensors").symlink_to(outside / "model.safetensors")
    (root / "file").write_text("")
    version = server.assembly.weights.version
    cases = [
        (f"../{outside.name}", "is not under"),
        (str(outside), "is not under"),
        ("link", "is not under"),
        ("linked", "has a link that leads out"),
        ("file", "is no directory"),
        ("absent", "is no directory"),
        ("a\0b", "cannot be read"),
    ]
    for name, text in cases:
        server.refused(server.update(name, "bad"), 400, text)
    wrong = FIXTURES / "qwen3"
    (root / "wrong").mkdir()
    for file in wrong.iterdir():
        (root / "wrong" / file.name).write_bytes(file.read_bytes())
    server.refused(server.update("wrong", "bad"), 400, "other shapes or types")
    for body in (
        {"directory": "link"},
        {"directory": "link", "version": ""},
        {"directory": "link", "version": "x", "to": 1},
    ):
        assert server.operator.post("/admin/weights", json=body).status_code == 400
    server.refused(server.update("link", "bad", policy="replay"), 400, "policy")
    assert server.assembly.weights.version == version
    orders = WeightOrders(server.assembly.weights, None)
    with pytest.raises(InvalidRequest, match="set serve.http.weights_dir"):
        orders.update("one", "x", "finish")


def test_a_key_of_a_user_changes_nothing(server: Server) -> None:
    for method, path in (("GET", "/admin/weights"), ("POST", "/admin/weights"), ("GET", "/is_sleeping")):
        assert server.user.request(method, path).status_code == 401
    for path in ("/sleep", "/wake_up"):
        assert server.user.post(path).status_code == 401
    assert server.operator.post("/v1/completions", json=BODY).status_code == 401
    assert server.operator.get("/is_sleeping").json() == {"is_sleeping": False}


def test_a_server_that_sleeps(server: Server) -> None:
    before = server.choice()["token_ids"]
    reply = server.operator.post("/sleep?level=1")
    assert reply.status_code == 200 and reply.json()["asleep"], reply.text
    assert server.operator.get("/is_sleeping").json() == {"is_sleeping": True}
    health = server.user.get("/health")
    assert health.status_code == 503 and "/wake_up" in health.json()["reason"]
    assert server.user.get("/live").status_code == 200
    server.refused(server.user.post("/v1/completions", json=BODY), 503, "sleeps")
    server.refused(server.operator.post("/sleep"), 400, "sleeps already")
    assert server.operator.post("/sleep?level=3").status_code == 400
    assert server.operator.post("/wake_up?tags=weights").status_code == 400
    assert server.operator.post("/wake_up").status_code == 200
    assert server.user.get("/health").status_code == 200
    assert server.choice()["token_ids"] == before
    assert server.operator.post("/sleep?level=2").status_code == 200
    server.refused(server.operator.post("/wake_up"), 400, "were dropped")
    server.refused(server.operator.post("/wake_up", json={"directory": "new"}), 400, "directory and version")
    server.write("new", other(4))
    reply = server.operator.post("/wake_up", json={"directory": "new", "version": "four"})
    assert reply.json() == {"version": "four", "asleep": False}
    check(server.choice(), other(4))
    server.refused(server.operator.post("/wake_up"), 400, "does not sleep")


def test_one_change_at_a_time(server: Server) -> None:
    server.write("next", other(5))
    with server.assembly.weights._alone():
        for reply in (server.update("next", "next"), server.operator.post("/sleep"), server.operator.post("/wake_up")):
            server.refused(reply, 429, "call again")
    assert server.update("next", "next").status_code == 200


def test_a_directory_that_nobody_may_name_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"weights_dir is set, but nobody.*serve\.admin_tokens_file"):
        check_serve_config(ServeConfig(http=HttpConfig(port=0, weights_dir=str(tmp_path))))
    (tmp_path / "admins").write_text(ADMIN)
    with pytest.raises(ConfigError, match="is no directory"):
        check_serve_config(
            ServeConfig(
                admin_tokens_file=str(tmp_path / "admins"),
                http=HttpConfig(port=0, weights_dir=str(tmp_path / "absent")),
            )
        )
