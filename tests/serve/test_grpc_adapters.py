"""Adapters over gRPC: requests name them, also through a router; an operator loads, lists and unloads them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from adapter_parts import byte_adapters, write_bytes
from prometheus_client.parser import text_string_to_metric_families
from route_parts import routed
from serve_parts import WAIT_S, Served, connect, note_prepared, serve_bytes, served, wait_until

from jaxserve.api import RequestOptions, SamplingParams
from jaxserve.client import AsyncClient, CallOptions, Client, RequestFailed
from jaxserve.config.schema import GrpcConfig, HttpConfig, ServeConfig
from jaxserve.errors import ConfigError, Status
from jaxserve.serve.convert import request_to_proto
from jaxserve.serve.route_service import key_of_request
from jaxserve.serve.service import check_serve_config

ADMIN = "the-operators"
THREE = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "abc":
        write_bytes(tmp_path / "adapters" / name, f"weights of {name}")
    return tmp_path / "adapters"


@pytest.fixture
def server(folder: Path) -> Iterator[Served]:
    """With memory for two adapters, of which a step has one."""
    tokens = folder.parent / "operators"
    tokens.write_text(ADMIN)
    with served(
        serve_bytes(adapters=byte_adapters(2)),
        grpc_config=GrpcConfig(port=0),
        http_config=HttpConfig(port=0, vllm_metrics=True),
        admin_tokens_file=str(tokens),
        adapters_dir=str(folder),
    ) as parts:
        yield parts


@pytest.fixture
def operator(server: Served) -> Iterator[Client]:
    with Client(server.address, token=ADMIN) as client:
        yield client


def until_idle(server: Served) -> None:
    wait_until(lambda: server.engine.num_live == 0, "the end of all requests")


def refused(call: object, status: Status, text: str, *args: object, **more: object) -> None:
    assert callable(call)
    with pytest.raises(RequestFailed, match=text) as caught:
        call(*args, **more)
    assert caught.value.status is status, caught.value


def test_an_operator_loads_lists_and_unloads(
    server: Served, operator: Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = operator.load_adapter("pirate", "a")
    assert (first.name, first.path, first.in_memory) == ("pirate", str(folder / "a"), True)
    prepared = note_prepared(server, monkeypatch)
    with connect(server) as user:
        for name in ("pirate", "fake", ""):
            assert user.complete("a", THREE, CallOptions(model=name)).text == "bcd"
        assert [request.adapter and request.adapter.digest for request in prepared] == [first.digest, None, None]
        prepared.clear()  # which kept the weights in memory
        refused(user.complete, Status.NOT_FOUND, "did you mean 'pirate'", "a", THREE, CallOptions(model="pirat"))
        for call in (user.adapters, lambda: user.load_adapter("x", "a"), lambda: user.unload_adapter("pirate")):
            refused(call, Status.UNAUTHENTICATED, "token")
        operator.load_adapter("second", "b")
        operator.load_adapter("third", "c")
        assert [(one.name, one.in_memory) for one in operator.adapters()] == [
            ("pirate", False), ("second", True), ("third", True),
        ]  # fmt: skip
        user.complete("a", THREE, CallOptions(model="pirate"))
        assert [one.in_memory for one in operator.adapters()] == [True, False, True], "read again, for a request"
        operator.unload_adapter("pirate")
        refused(user.complete, Status.NOT_FOUND, "'pirate' is not served", "a", THREE, CallOptions(model="pirate"))
    for status, text, name, path in (
        (Status.INVALID, "'second' already", "second", "a"),
        (Status.INVALID, "not under adapters.directory", "new", "../"),
        (Status.INVALID, "no directory under adapters.directory", "new", "absent"),
        (Status.INVALID, "1 to 64 letters", "a/b", "a"),
        (Status.INVALID, "1 to 64 letters", "", "a"),
        (Status.INVALID, "the name of the model itself", "fake", "a"),
    ):
        refused(operator.load_adapter, status, text, name, path)
    refused(operator.unload_adapter, Status.NOT_FOUND, "'pirate' is not served", "pirate")
    assert operator.load_adapter("second", "a", replace=True).digest == first.digest
    server.scheduler.check()


def test_coroutines_do_the_same(server: Served) -> None:
    async def main() -> None:
        async with AsyncClient(server.address, token=ADMIN) as operator, AsyncClient(server.address) as user:
            loaded = await operator.load_adapter("pirate", "a")
            assert await operator.adapters() == (loaded,)
            assert (await user.complete("a", THREE, CallOptions(model="pirate"))).text == "bcd"
            await operator.unload_adapter("pirate")
            assert await operator.adapters() == ()

    asyncio.run(main())


def test_requests_that_run_end_with_an_adapter_that_is_unloaded_or_replaced(
    server: Served, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = server.engine.model.adapters
    assert loaded is not None
    prepared = note_prepared(server, monkeypatch)
    with connect(server) as user:
        for change in (
            lambda: operator.load_adapter("pirate", "b", replace=True),
            lambda: operator.unload_adapter("pirate"),
        ):
            operator.load_adapter("pirate", "a", replace=True)
            stream = user.generate("a", SamplingParams(max_tokens=200, ignore_eos=True), CallOptions(model="pirate"))
            next(stream)
            change()
            assert sum(len(reply.token_ids) for reply in stream) == 199
            assert prepared[-1].adapter is not None and prepared[-1].adapter.weights == b"weights of a"
    prepared.clear()
    until_idle(server)
    server.scheduler.check()
    wait_until(lambda: loaded._num_held() == 0, "nothing has weights that were unloaded")


def test_a_router_passes_the_name_on(server: Served, operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    operator.load_adapter("pirate", "a")
    prepared = note_prepared(server, monkeypatch)
    with routed(server.address, policy="prefix") as router, Client(router.address) as user:
        assert user.complete("a", THREE, CallOptions(model="pirate")).text == "bcd"
        refused(user.complete, Status.NOT_FOUND, "did you mean 'pirate'", "a", THREE, CallOptions(model="pirat"))
        assert user.complete("a", THREE).text == "bcd", "the replica is well"
    assert [request.adapter and request.adapter.name for request in prepared] == ["pirate", None]
    for prompt in ("a" * 64, [1] * 16, [{"role": "user", "content": "a" * 64}]):
        keys = [key_of_request(request_to_proto(prompt, THREE, CallOptions(model=name))) for name in ("", "x", "y")]
        assert len({key[0] for key in keys}) == 3, "adapters share no pages"


def test_metrics_in_the_shape_that_gateways_read(server: Served, operator: Client) -> None:
    """One runs, one waits for its slot, a third has given way in the host's memory."""

    def read() -> dict[str, list[tuple[dict[str, str], float]]]:
        families = text_string_to_metric_families(
            httpx.get(f"{server.http_url}/metrics", timeout=WAIT_S, trust_env=False).text
        )
        return {
            family.name: [(sample.labels, sample.value) for sample in family.samples]
            for family in families
            if "lora" in family.name or "adapter" in family.name
        }

    found = read()
    labels = {"model_name": "fake", "max_lora": "1", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    [(idle, _)] = found["vllm:lora_requests_info"]
    assert idle == labels and found["jaxserve:adapter_sequences"] == []
    for name, path in (("third", "c"), ("first", "a"), ("second", "b")):
        operator.load_adapter(name, path)
    server.runner.hold()
    for name in ("first", "first", "second"):
        prepared = server.engine.prepare("abc", THREE, RequestOptions(adapter=name))
        server.engine.submit(prepared, lambda update: None)
        del prepared
    wait_until(lambda: server.runner.is_held and server.scheduler.num_waiting == 1, "one waits")
    found = read()
    for prefix in ("vllm:", "jaxserve:"):
        [(busy, time_s)] = found[prefix + "lora_requests_info"]
        assert busy == labels | {"running_lora_adapters": "first", "waiting_lora_adapters": "second"}
        assert time_s > 1.7e9, "the time in seconds, by which a picker takes the latest"
    by_name = {(one["adapter"], one["state"]): value for one, value in found["jaxserve:adapter_sequences"]}
    assert by_name == {("first", "running"): 2, ("second", "waiting"): 1}
    assert {one["weights"]: value for one, value in found["jaxserve:adapters"]} == {"memory": 2, "directory": 1}
    events = {one["event"]: value for one, value in found["jaxserve:adapter_events"]}
    assert events == {"loaded": 3, "unloaded": 0, "evicted": 1, "reloaded": 0, "failed": 0}
    server.release()
    until_idle(server)
    found = read()
    assert [value for _, value in found["jaxserve:adapter_slot_loads"]] == [2]
    assert found["vllm:lora_requests_info"][0][0] == labels and found["jaxserve:adapter_sequences"] == []


def test_without_slots_there_are_no_such_calls(tmp_path: Path) -> None:
    tokens = tmp_path / "operators"
    tokens.write_text(ADMIN)
    with served(serve_bytes(), admin_tokens_file=str(tokens)) as parts, Client(parts.address, token=ADMIN) as operator:
        for call in (operator.adapters, lambda: operator.load_adapter("a", "a"), lambda: operator.unload_adapter("a")):
            refused(call, Status.INVALID, "takes no LoRA adapters; start it with adapters.slots")
        with connect(parts) as user:
            options = CallOptions(model="pirate")
            refused(user.complete, Status.NOT_FOUND, "LoRA adapters are off", "a", THREE, options, timeout_s=WAIT_S)
    with pytest.raises(ConfigError, match=r"nobody may load an adapter from it; set serve\.admin_tokens_file"):
        check_serve_config(ServeConfig(grpc=GrpcConfig(port=0)), str(tmp_path))
