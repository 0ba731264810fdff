"""What operators may do over gRPC and HTTP, on one engine that runs meanwhile."""

import concurrent.futures
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from serve_parts import WAIT_S, IdleStore, Served, serve_bytes, served, wait_until

from jaxserve import __version__
from jaxserve.api import RequestOptions, SamplingParams
from jaxserve.client import CallOptions, Client
from jaxserve.config.schema import GrpcConfig, HttpConfig
from jaxserve.engine import CacheControl, Update
from jaxserve.errors import EngineStopped, InvalidRequest
from jaxserve.sched.plan import HostSlots
from jaxserve.serve.gen import admin_pb2 as pb
from jaxserve.serve.gen import admin_pb2_grpc as pb_grpc
from jaxserve.serve.orders import ShownSettings

ADMIN, KEY = "the-operators", "a-users"
SLOTS = HostSlots(num_slots=16, max_draining=16, max_loads=16)
PROMPT = "abcdefghijklmnopqrstuvwxyz"  # three full pages of eight tokens


class Operator:
    """Calls of both doors, with a token."""

    def __init__(self, parts: Served, token: str = ADMIN) -> None:
        self.headers = {"authorization": f"Bearer {token}"}
        self.http = httpx.Client(base_url=parts.http_url, headers=self.headers, timeout=WAIT_S, trust_env=False)
        self._channel = grpc.insecure_channel(parts.address)
        self._stub = pb_grpc.AdminStub(self._channel)

    def call(self, method: str, request: Any) -> Any:
        return getattr(self._stub, method)(request, metadata=[*self.headers.items()], timeout=WAIT_S)

    def refused(self, method: str, request: Any, code: grpc.StatusCode) -> str:
        with pytest.raises(grpc.RpcError) as caught:
            self.call(method, request)
        assert caught.value.code() is code, caught.value
        return caught.value.details() or ""

    def close(self) -> None:
        self.http.close()
        self._channel.close()


def _served(parts: Served, folder: Path, admin: bool = True, **http: Any) -> Any:
    for name, secret in (("admins", ADMIN), ("keys", KEY)):
        (folder / name).write_text(secret)
    return served(
        parts,
        grpc_config=GrpcConfig(port=0, tokens_file=str(folder / "keys")),
        http_config=HttpConfig(port=0, api_keys_file=str(folder / "keys"), **http),
        admin_tokens_file=str(folder / "admins") if admin else None,
    )


@pytest.fixture(scope="module")
def store() -> IdleStore:
    return IdleStore()


@pytest.fixture(scope="module")
def server(store: IdleStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    parts = serve_bytes(slots=SLOTS, store=store, num_pages=64)
    with _served(parts, tmp_path_factory.mktemp("secrets")) as parts:
        yield parts


@pytest.fixture
def operator(server: Served, store: IdleStore) -> Iterator[Operator]:
    """Afterwards all is as it was."""
    operator = Operator(server)
    yield operator
    store.broken = False
    operator.call("ResizePool", pb.ResizePoolRequest(num_pages=64))
    operator.call("SetTiers", pb.SetTiersRequest(host=True, store=True))
    operator.call("Flush", pb.FlushRequest(all=True))
    store.flushed.clear()
    operator.close()


def cached(parts: Served, salt: str) -> int:
    """Tokens of PROMPT that are found."""
    with Client(parts.address, token=KEY) as client:
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        completion = client.complete(PROMPT, sampling, CallOptions(cache_salt=salt))
    assert completion.text == "{|"
    return completion.num_cached_tokens


def test_a_flush_by_salt_over_one_door_and_of_all_over_the_other(
    server: Served, operator: Operator, store: IdleStore
) -> None:
    assert [cached(server, salt) for salt in ("a", "b", "a", "b", "")] == [0, 0, 24, 24, 0]
    reply = operator.http.post("/admin/flush", json={"cache_salts": ["a", "never seen"]})
    assert reply.status_code == 200 and reply.json()["pages"] == 3, reply.text
    assert store.flushed == ["a", "never seen"]
    assert [cached(server, salt) for salt in ("a", "b", "")] == [0, 24, 24]
    reply = operator.call("Flush", pb.FlushRequest(all=True))
    assert reply.pages == 9 and store.flushed[2:] == [None]
    assert [cached(server, salt) for salt in ("a", "b", "")] == [0, 0, 0]
    server.scheduler.check()


def test_a_flush_that_leaves_pages_in_the_store_says_so(operator: Operator, store: IdleStore) -> None:
    store.broken = True
    reply = operator.http.post("/admin/flush", json={"all": True})
    assert reply.status_code == 503 and "flush again" in reply.json()["error"]["message"]
    request = pb.FlushRequest(all=True)
    assert "flush again" in operator.refused("Flush", request, grpc.StatusCode.UNAVAILABLE)


def test_the_pool_shrinks_and_grows(server: Served, operator: Operator) -> None:
    whole = {"pages": 64, "grantable": 64, "held": 0, "host": True, "store": True, "rung": "none"}
    assert operator.http.get("/admin/cache").json() == {"replicas": [whole]}
    assert cached(server, "a") == 0
    [state] = operator.call("ResizePool", pb.ResizePoolRequest(num_pages=4)).replicas
    assert (state.pages, state.grantable, state.held) == (64, 4, 0)
    counts = server.engine.stats[0].counts
    assert counts is not None and (counts.grantable_pages, counts.withheld_pages, counts.pages) == (4, 60, 64)
    assert (counts.free_pages, counts.cached_pages) == (1, 3), "free pages go first"
    keys = {"authorization": f"Bearer {KEY}"}
    assert "jaxserve:kv_grantable_pages" in (metrics := operator.http.get("/metrics", headers=keys).text)
    assert 'state="withheld"' in metrics
    body = {"model": "fake", "prompt": PROMPT, "max_tokens": 20}
    refusal = operator.http.post("/v1/completions", json=body, headers=keys)
    assert refusal.status_code == 400 and "gives out 4 pages" in refusal.json()["error"]["message"], refusal.text
    assert cached(server, "a") == 24, "what is left of the pool serves"
    assert operator.http.post("/admin/pool", json={"num_pages": 64}).json()["replicas"][0]["grantable"] == 64
    assert operator.http.post("/v1/completions", json=body, headers=keys).status_code == 200
    for size in (0, 65):
        refused = operator.refused("ResizePool", pb.ResizePoolRequest(num_pages=size), grpc.StatusCode.INVALID_ARGUMENT)
        assert "from 1 to 64" in refused
    assert operator.http.post("/admin/pool", json={"num_pages": 65}).status_code == 400
    server.scheduler.check()


@pytest.mark.parametrize("preempt", [False, True])
def test_a_shrink_below_what_runs_waits_or_preempts(preempt: bool) -> None:
    """Four sequences that grow to 14 pages each, in a pool of 14 from some step on."""
    with served(serve_bytes(num_pages=64), http_config=HttpConfig(port=None)) as parts:
        sampling = SamplingParams(max_tokens=80, ignore_eos=True, temperature=0.0)
        texts, ended = ["", "", "", ""], []

        def sink_of(number: int) -> Callable[[Update], None]:
            def take(update: Update) -> None:
                texts[number] += update.text
                if update.last:
                    ended.append(update.error)

            return take

        parts.runner.hold()
        for number in range(4):
            parts.engine.submit(
                parts.engine.prepare(PROMPT, sampling, RequestOptions(cache_salt=f"{number}")), sink_of(number)
            )
        parts.runner.hold(after=10)
        wait_until(lambda: parts.runner.is_held and not parts.runner._free, "ten steps have run")
        own = parts.scheduler
        refused = parts.engine.call(lambda _: own.resize_pool(13, preempt=preempt))
        after = parts.engine.call(lambda _: (own.num_running, own.resize_pool(14, preempt=preempt), own.cache_state))
        parts.runner.release()
        with pytest.raises(InvalidRequest, match="can need 14"):
            refused.result(WAIT_S)
        num_running, _, state = after.result(WAIT_S)
        assert num_running == 4 and state.grantable == 14 < state.held, "nobody has lost a page by the call itself"
        wait_until(lambda: len(ended) == 4, "the end of all")
        assert ended == [None] * 4 and len(texts[0]) == 80 and len({*texts}) == 1
        state = parts.scheduler.cache_state
        assert (state.held, parts.scheduler.memory.pool.num_withheld) == (0, 50)
        parts.scheduler.check()


def test_tiers_off_and_on(server: Served, operator: Operator) -> None:
    assert cached(server, "a") == 0
    operator.http.post("/admin/pool", json={"num_pages": 4})
    assert cached(server, "b") == 0, "it drives out the pages of the first"
    assert server.engine.stats[0].counts.used_slots > 0  # pyright: ignore[reportOptionalMemberAccess]
    [state] = operator.call("SetTiers", pb.SetTiersRequest(host=False, store=False)).replicas
    assert (state.host, state.store) == (False, False)
    assert cached(server, "c") == 0
    assert server.engine.stats[0].counts.used_slots == 0  # pyright: ignore[reportOptionalMemberAccess]
    [state] = operator.http.post("/admin/tiers", json={"host": True}).json()["replicas"]
    assert (state["host"], state["store"]) == (True, False)
    assert cached(server, "d") == 0
    assert server.engine.stats[0].counts.used_slots > 0  # pyright: ignore[reportOptionalMemberAccess]
    server.scheduler.check()


def test_what_is_not_there_is_not_switched(tmp_path: Path) -> None:
    with _served(serve_bytes(), tmp_path) as parts:
        operator = Operator(parts)
        reply = operator.http.post("/admin/tiers", json={"host": True})
        assert reply.status_code == 400 and "cache.host_bytes" in reply.json()["error"]["message"]
        request = pb.SetTiersRequest(store=False)
        assert "store.kind" in operator.refused("SetTiers", request, grpc.StatusCode.INVALID_ARGUMENT)
        [state] = operator.call("GetCache", pb.GetCacheRequest()).replicas
        assert not state.HasField("host") and not state.HasField("store") and state.pages == 256
        for body in ({}, {"all": True, "cache_salts": ["a"]}, {"cache_salts": []}, {"all": 1}, {"salt": "a"}):
            assert operator.http.post("/admin/flush", json=body).status_code == 400, body
        request = pb.FlushRequest(all=True, cache_salts=["a"])
        assert "one of the two" in operator.refused("Flush", request, grpc.StatusCode.INVALID_ARGUMENT)
        operator.close()


def test_each_kind_of_token_opens_its_own_calls(server: Served) -> None:
    paths = {"/admin/cache": ADMIN, "/server_info": ADMIN, "/metrics": KEY, "/v1/models": KEY}
    for token in (ADMIN, KEY, "another"):
        caller = Operator(server, token)
        for path, wanted in paths.items():
            assert caller.http.get(path).status_code == (200 if token == wanted else 401), (path, token)
        if token == ADMIN:
            assert len(caller.call("GetCache", pb.GetCacheRequest()).replicas) == 1
        else:
            caller.refused("GetCache", pb.GetCacheRequest(), grpc.StatusCode.UNAUTHENTICATED)
        caller.close()


def test_without_tokens_there_are_no_such_calls(tmp_path: Path) -> None:
    with _served(serve_bytes(), tmp_path, admin=False) as parts:
        caller = Operator(parts, KEY)
        for path in ("/admin/cache", "/server_info"):
            assert caller.http.get(path).status_code == 404
        for path in ("/reset_prefix_cache", "/start_profile", "/stop_profile", "/debug/profile"):
            assert caller.http.post(path).status_code == 404
        caller.refused("GetCache", pb.GetCacheRequest(), grpc.StatusCode.UNIMPLEMENTED)
        caller.close()


def test_server_info_has_every_setting(operator: Operator) -> None:
    info = operator.http.get("/server_info").json()
    assert info["model"] == {"name": "fake", "max_model_len": 512, "vocab_size": 259, "drafter": "none"}
    assert info["replicas"] == 1 and info["version"] == __version__
    assert info["config"]["serve"]["http"]["port"] == 0 and "python" in info["versions"]
    assert info["environment"] == {}
    assert ADMIN not in str(info) and KEY not in str(info), "of keys only the names of their files"


def test_server_info_says_what_the_environment_has_set(tmp_path: Path) -> None:
    (tmp_path / "admins").write_text(ADMIN)
    shown = ShownSettings({"sched": {"max_rows": 4}}, {"sched.max_rows": "JAXSERVE_SCHED__MAX_ROWS"})
    files = {"admin_tokens_file": str(tmp_path / "admins"), "http_config": HttpConfig(port=0)}
    with served(serve_bytes(), settings=shown, **files) as parts:
        operator = Operator(parts)
        info = operator.http.get("/server_info").json()
        operator.close()
    assert (info["config"], info["environment"]) == shown


def test_a_reset_leaves_the_store_unless_it_is_asked_for(server: Served, operator: Operator, store: IdleStore) -> None:
    assert [cached(server, salt) for salt in ("a", "a", "")] == [0, 24, 0]
    assert operator.http.post("/reset_prefix_cache").json() == {"pages": 6, "slots": 6}
    assert store.flushed == [] and [cached(server, salt) for salt in ("a", "")] == [0, 0]
    assert operator.http.post("/reset_prefix_cache", params={"reset_external": True}).json()["pages"] == 6
    assert store.flushed == [None] and cached(server, "a") == 0
    refusal = operator.http.post("/reset_prefix_cache", params={"reset_running_requests": True})
    assert refusal.status_code == 400 and "keep their pages" in refusal.json()["error"]["message"]
    server.scheduler.check()


def test_profiles_that_cannot_be(operator: Operator, tmp_path: Path) -> None:
    for path in ("/start_profile", "/stop_profile", "/debug/profile"):
        off = operator.http.post(path, headers={"content-type": "application/json"})
        assert off.status_code == 404 and "serve.http.profile_dir" in off.json()["error"]["message"]
    (tmp_path / "file").write_text("in the way")
    with _served(serve_bytes(), tmp_path, profile_dir=str(tmp_path / "file")) as parts:
        other = Operator(parts)
        none = other.http.post("/stop_profile")
        assert none.status_code == 409 and "begin one with /start_profile" in none.json()["error"]["message"]
        failed = other.http.post("/start_profile")
        assert failed.status_code == 500 and "cannot be written to" in failed.json()["error"]["message"]
        other.close()


def test_an_engine_that_has_ended_and_a_scheduler_of_another_kind() -> None:
    parts = serve_bytes()
    done = parts.engine.call(lambda scheduler: 7)
    parts.engine.step()
    assert done.result(0) == 7
    waiting = parts.engine.call(lambda scheduler: 8)
    parts.engine.stop()
    with pytest.raises(EngineStopped):
        waiting.result(0)
    with pytest.raises(EngineStopped):
        parts.engine.call(lambda scheduler: 9)
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        parts = serve_bytes()
        states = other.submit(CacheControl(parts.engine).states)
        parts.engine._inbox.get(timeout=WAIT_S).carry_out(Foreign())  # pyright: ignore
        with pytest.raises(InvalidRequest, match="a Foreign, which has no operations"):
            states.result(WAIT_S)


class Foreign:
    """A scheduler of somebody else."""
