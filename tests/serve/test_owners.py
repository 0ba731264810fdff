"""Whose a request is: one key at both doors in every spelling, ids and pages within it, and who may say so."""

import concurrent.futures
import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from handoff_parts import TOKENS, secret_file
from handoff_parts import server as handoff_server
from route_parts import routed
from serve_parts import (
    LONG,
    LONG_TOKENS,
    ONE_CALL,
    WAIT_S,
    Served,
    note_prepared,
    serve_bytes,
    serve_slowly,
    served,
    wait_until,
)

from jaxserve.api import RequestOptions, SamplingParams, shown_id
from jaxserve.client import CallOptions, Client, RequestFailed
from jaxserve.config.schema import GrpcConfig, HttpConfig, RouteConfig
from jaxserve.errors import ConfigError, InvalidRequest, Status
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.gen import inference_pb2_grpc as pb_grpc
from jaxserve.serve.keys import ListedKey, read_keys, read_listed_keys
from jaxserve.serve.owners import OWNER_METADATA, PROCESS, Owner, Owners
from jaxserve.serve.route_access import BackendAccess
from jaxserve.serve.route_service import key_of_request
from jaxserve.testing import ByteTokenizer

ALICE, BOB, ROUTER = "sk-alice", "sk-bob", "sk-router"
KEYS = f"{ALICE}\n{BOB} weight=4\n{ROUTER} role=router\n"
SHORT = SamplingParams(temperature=0.0, max_tokens=3)
PROMPT = "a page has eight of these bytes, and a prompt of several pages is found again"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("owners") / "keys"
    path.write_text(KEYS)
    return str(path)


@contextlib.contextmanager
def with_keys(parts: Served, keys: str | None, *, salt_by_key: bool = True, **http: Any) -> Iterator[Served]:
    """Both doors, with the same keys."""
    config = HttpConfig(port=0, api_keys_file=keys, **http)
    with served(
        parts, grpc_config=GrpcConfig(port=0, tokens_file=keys), http_config=config, salt_by_key=salt_by_key
    ) as server:
        yield server


@contextlib.contextmanager
def over_grpc(address: str, key: str | None) -> Iterator[Client]:
    with Client(address, retries=ONE_CALL, token=key) as client:
        yield client


def post(server: Served, key: str, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    body = {"model": "fake", "temperature": 0, **body}
    return httpx.post(f"{server.http_url}/v1/completions", json=body, headers=headers, timeout=WAIT_S)


def resumes(server: Served, key: str) -> bool:
    """Whether a request of the id "v" goes on here, which began elsewhere, and ends well."""
    answer = post(server, key, prompt="a", max_tokens=3, request_id="v", resume=[{"token_ids": []}], stream=True)
    return answer.status_code == 200 and '"d"' in answer.text and "error" not in answer.text


class ChatTokenizer(ByteTokenizer):
    chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


class Running:
    """A long answer over gRPC that another thread reads: `reason` once it has ended."""

    def __init__(self, pool: concurrent.futures.Executor, client: Client, request_id: str) -> None:
        stream = client.generate("a", LONG, CallOptions(request_id=request_id), timeout_s=WAIT_S)
        first = next(stream)
        assert first.request_id == request_id, "the answer has the caller's id"
        self._last = pool.submit(lambda: list(stream)[-1])

    def ended_by_abort(self) -> bool:
        return self._last.result(WAIT_S).finish_reason == pb.FINISH_REASON_ABORT

    @property
    def runs(self) -> bool:
        return not self._last.done()


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        yield pool


# ---- ids -------------------------------------------------------------------------------------------------------------


def test_the_same_id_is_live_for_two_keys_and_ends_for_one(keys: str, pool: concurrent.futures.Executor) -> None:
    with (
        with_keys(serve_slowly(), keys) as server,
        over_grpc(server.address, ALICE) as alice,
        over_grpc(server.address, BOB) as bob,
    ):
        hers = Running(pool, alice, "v")
        his = Running(pool, bob, "v")
        assert server.engine.num_live == 2
        with pytest.raises(RequestFailed, match="'v' is live already") as caught:
            alice.complete("a", SHORT, CallOptions(request_id="v"), timeout_s=WAIT_S)
        assert caught.value.status is Status.INVALID
        over_http = post(server, ALICE, prompt="a", max_tokens=3, request_id="v")
        assert over_http.status_code == 400 and "'v' is live already" in over_http.text, "one key is one owner"
        bob.abort("v", "unknown")
        assert his.ended_by_abort() and hers.runs
        bob.abort("v")
        assert resumes(server, BOB)
        assert hers.runs, "another's request goes on, whatever is resumed"
        alice.abort("v")
        assert hers.ended_by_abort()
    server.scheduler.check()


def test_the_same_id_over_http(keys: str) -> None:
    """A stream of one key goes on beside the same id of another, and is replaced by its own key alone."""
    with with_keys(serve_slowly(), keys) as server, over_grpc(server.address, BOB) as bob:
        body = {"model": "fake", "prompt": "a", "max_tokens": LONG_TOKENS, "request_id": "v", "stream": True}
        headers = {"x-api-key": ALICE}
        with httpx.stream("POST", f"{server.http_url}/v1/completions", json=body, headers=headers, timeout=WAIT_S) as s:
            lines = s.iter_lines()
            assert s.headers["x-request-id"] == "v"
            first = next(line for line in lines if line.startswith("data: "))
            assert json.loads(first.removeprefix("data: "))["id"] == "cmpl-v"
            bob.abort("v")
            assert resumes(server, BOB)
            assert post(server, ALICE, prompt="a", max_tokens=3, request_id="v").status_code == 400, "it is live"
            assert resumes(server, ALICE)
            assert any("aborted from elsewhere" in line for line in lines)


def test_without_keys_ids_are_those_of_all(pool: concurrent.futures.Executor) -> None:
    """There is nothing by which callers could prove that a request is theirs."""
    with with_keys(serve_slowly(), None) as server, over_grpc(server.address, None) as one:
        running = Running(pool, one, "v")
        assert post(server, "any", prompt="a", max_tokens=3, request_id="v").status_code == 400
        with over_grpc(server.address, None) as other:
            other.abort("v")
        assert running.ended_by_abort()


def test_no_id_can_name_the_request_of_another(keys: str) -> None:
    found = Owners(read_listed_keys(keys, "x"), salt_by_key=True).of_http(f"Bearer {ALICE}", "")
    forged = found.own("v")
    assert shown_id(forged) == "v" != forged
    with with_keys(serve_bytes(), keys) as server, over_grpc(server.address, BOB) as bob:
        for call in (
            lambda: bob.abort(forged),
            lambda: bob.complete("a", SHORT, CallOptions(request_id=forged), timeout_s=WAIT_S),
        ):
            with pytest.raises(RequestFailed, match="must not hold the character") as caught:
                call()
            assert caught.value.status is Status.INVALID
        assert post(server, BOB, prompt="a", request_id=forged).status_code == 400


# ---- what the engine is told -----------------------------------------------------------------------------------------


def test_one_key_is_one_owner_at_both_doors_however_it_is_spelled(keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with with_keys(serve_bytes(), keys) as server, over_grpc(server.address, BOB) as bob:
        prepared = note_prepared(server, monkeypatch)
        bob.complete("a", SHORT, timeout_s=WAIT_S)
        spellings: list[dict[str, str]] = [
            {"authorization": f"Bearer {BOB}"},
            {"authorization": f"bearer  {BOB}"},
            {"authorization": f"BEARER   {BOB}"},
            {"x-api-key": BOB},
        ]
        body = {"model": "fake", "prompt": "a", "max_tokens": 1}
        for headers in spellings:
            reply = httpx.post(f"{server.http_url}/v1/completions", json=body, headers=headers, timeout=WAIT_S)
            assert reply.status_code == 200
        assert len({request.owner for request in prepared}) == 1 and len(prepared) == 5
        assert {request.owner_weight for request in prepared} == {4.0}
        assert len(prepared[0].owner) == 16 and BOB not in prepared[0].owner
        post(server, ALICE, prompt="a", max_tokens=1)
        assert prepared[-1].owner != prepared[0].owner and prepared[-1].owner_weight == 1.0


def test_every_route_says_whose_request_it_is(keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Served(tokenizer=ChatTokenizer(), vocab_size=259)
    encoded: list[str] = []
    with with_keys(parts, keys) as server:
        prepared = note_prepared(server, monkeypatch)
        chat = [{"role": "user", "content": "hi"}]
        bodies: dict[str, dict[str, Any]] = {
            "/v1/completions": {"prompt": "a"},
            "/v1/chat/completions": {"messages": chat},
            "/v1/messages": {"messages": chat},
            "/v1/responses": {"input": "hi"},
        }
        for path, body in bodies.items():
            limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
            reply = httpx.post(
                f"{server.http_url}{path}",
                json={"model": "fake", limit: 1, **body},
                headers={"x-api-key": BOB},
                timeout=WAIT_S,
            )
            assert reply.status_code == 200, (path, reply.text)
        encoded += [request.owner for request in prepared]
    assert len(encoded) == 4 and len(set(encoded)) == 1 and "" not in encoded


def test_lines_of_a_batch_are_those_of_its_key(keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with with_keys(serve_bytes(), keys, batch_dir=str(tmp_path)) as server:
        prepared = note_prepared(server, monkeypatch)
        post(server, BOB, prompt="a", max_tokens=1)
        body = {"model": "fake", "prompt": "a", "max_tokens": 1}
        line = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body})
        with httpx.Client(base_url=server.http_url, headers={"authorization": f"bearer  {BOB}"}, timeout=WAIT_S) as bob:
            file = bob.post("/v1/files", files={"file": ("in.jsonl", line)}, data={"purpose": "batch"}).json()
            asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
            made = bob.post("/v1/batches", json=asked).json()
            plain = {"authorization": f"Bearer {BOB}"}
            status = lambda: bob.get(f"/v1/batches/{made['id']}", headers=plain).json()["status"]  # noqa: E731
            wait_until(lambda: status() == "completed", "the batch ends")
    direct, of_batch = prepared
    assert (direct.owner, direct.owner_weight, direct.cache_salt) == (
        of_batch.owner,
        of_batch.owner_weight,
        of_batch.cache_salt,
    )


def test_owners_of_stored_data_stay_who_they_are() -> None:
    """Files and batches on disks have this digest of a key."""
    owners = Owners([ListedKey("sk-ü"), ListedKey(BOB, 4.0)], salt_by_key=True)
    found = owners.of_http(f"bearer  {BOB}", "")
    assert found.digest == hashlib.sha256(f"Bearer {BOB}".encode()).digest()
    assert owners.of_digest(found.digest) == found
    after_restart = Owners([ListedKey(BOB)], salt_by_key=True)
    assert found.salt and after_restart.of_http(f"Bearer {BOB}", "").salt == found.salt, "stored pages are found again"
    header = "Bearer sk-ü".encode().decode("latin-1")  # as servers read headers
    assert owners.of_http(header, "").scope, "a key that is no ASCII is known, too"
    open_to_all = Owners(None, salt_by_key=True)
    assert open_to_all.of_http(f"Bearer {BOB}", "10.0.0.1").digest == found.digest
    assert open_to_all.of_http("", "10.0.0.1").id != open_to_all.of_http("", "10.0.0.2").id
    assert open_to_all.of_http("", "10.0.0.1").salt == open_to_all.of_http("", "10.0.0.1").scope == ""


# ---- pages -----------------------------------------------------------------------------------------------------------


def num_cached(server: Served, key: str, **fields: Any) -> int:
    usage = post(server, key, prompt=PROMPT, max_tokens=1, **fields).json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_a_prompt_is_found_again_by_its_own_key_alone(keys: str) -> None:
    with with_keys(serve_bytes(), keys) as server, over_grpc(server.address, ALICE) as alice:
        assert num_cached(server, ALICE) == 0
        assert num_cached(server, ALICE) > 0
        assert alice.complete(PROMPT, SHORT, timeout_s=WAIT_S).num_cached_tokens > 0, "at the other door, too"
        assert num_cached(server, BOB) == 0
        assert num_cached(server, ALICE, cache_salt="own") == 0, "a caller's own salt is within that of its key"
        assert num_cached(server, BOB, cache_salt="own") == 0
        assert num_cached(server, BOB, cache_salt="own") > 0


def test_keys_share_pages_where_they_are_told_to(keys: str) -> None:
    with with_keys(serve_bytes(), keys, salt_by_key=False) as server:
        assert num_cached(server, ALICE) == 0
        assert num_cached(server, BOB) > 0
    with with_keys(serve_bytes(), None) as server:
        assert num_cached(server, "any") == 0
        assert num_cached(server, "other") > 0, "without keys there is nothing that keeps callers apart"


# ---- routers ---------------------------------------------------------------------------------------------------------


def told(address: str, key: str | None, *metadata: str, prompt: str = "a") -> pb.GenerateResponse:
    """The answer to a caller that says whose request it is."""
    with grpc.insecure_channel(address) as channel:
        message = pb.GenerateRequest(text=prompt, sampling=pb.SamplingParams(max_tokens=1))
        pairs = [(OWNER_METADATA, each) for each in metadata]
        pairs += [] if key is None else [("authorization", f"Bearer {key}")]
        return list(pb_grpc.InferenceStub(channel).Generate(message, metadata=pairs, timeout=WAIT_S))[-1]


FORGED = f"{'ab' * 8} 100.0 key"


def test_only_a_router_says_whose_request_it_is(keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with with_keys(serve_bytes(), keys) as server:
        prepared = note_prepared(server, monkeypatch)
        told(server.address, BOB)
        told(server.address, BOB, FORGED)
        assert prepared[0].owner == prepared[1].owner != "ab" * 8
        assert prepared[1].owner_weight == 4.0 and prepared[1].cache_salt == prepared[0].cache_salt
        with pytest.raises(grpc.RpcError) as caught:
            told(server.address, None, FORGED)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        told(server.address, ROUTER, FORGED)
        assert (prepared[-1].owner, prepared[-1].owner_weight) == ("ab" * 8, 100.0)
        assert "ab" * 8 in prepared[-1].cache_salt
        headers = {OWNER_METADATA: FORGED, "x-api-key": ROUTER}
        body = {"model": "fake", "prompt": "a", "max_tokens": 1}
        assert httpx.post(f"{server.http_url}/v1/completions", json=body, headers=headers, timeout=WAIT_S).is_success
        assert prepared[-1].owner != "ab" * 8, "nobody says so over HTTP"
        for wrong in ("x", "ab 1.0 key", f"{'ab' * 8} 0 key", f"{'ab' * 8} nan key", f"{'ab' * 8} inf key", "a b c d"):
            with pytest.raises(grpc.RpcError) as caught:
                told(server.address, ROUTER, wrong)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with with_keys(serve_bytes(), None) as server:
        prepared = note_prepared(server, monkeypatch)
        told(server.address, None, FORGED)
        assert prepared[0].owner == "ab" * 8, "a server without tokens trusts whoever reaches its port"


@pytest.mark.parametrize("servers_have_keys", [True, False])
def test_owners_behind_a_router(
    keys: str,
    tmp_path: Path,
    pool: concurrent.futures.Executor,
    servers_have_keys: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ids, weights and pages are those of the router's callers, as if they had called the server."""
    (tmp_path / "token").write_text(ROUTER)
    access = {"token_file": str(tmp_path / "token")} if servers_have_keys else {}
    with (
        with_keys(serve_slowly(), keys if servers_have_keys else None) as server,
        routed(server.address, access=access, tokens_file=keys) as router,
        over_grpc(router.address, ALICE) as alice,
        over_grpc(router.address, BOB) as bob,
    ):
        prepared = note_prepared(server, monkeypatch)
        hers, his = Running(pool, alice, "v"), Running(pool, bob, "v")
        assert [request.owner_weight for request in prepared] == [1.0, 4.0]
        bob.abort("v")
        assert his.ended_by_abort() and hers.runs
        alice.abort("v")
        assert hers.ended_by_abort()
        assert alice.complete(PROMPT, SHORT, timeout_s=WAIT_S).num_cached_tokens == 0
        assert bob.complete(PROMPT, SHORT, timeout_s=WAIT_S).num_cached_tokens == 0
        assert alice.complete(PROMPT, SHORT, timeout_s=WAIT_S).num_cached_tokens > 0
        told(router.address, BOB, FORGED)
        assert prepared[-1].owner == prepared[1].owner, "a router believes no more than a server does"
        if servers_have_keys:
            with over_grpc(server.address, ALICE) as direct:
                assert direct.complete(PROMPT, SHORT, timeout_s=WAIT_S).num_cached_tokens > 0


def test_a_prompt_that_is_computed_apart_is_that_of_its_owner(keys: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(ROUTER)
    secret, prompt = secret_file(tmp_path), list(TOKENS)
    access = {"prefill_above": 15, "token_file": str(tmp_path / "token")}
    with (
        handoff_server("prefill", secret, tokens_file=keys) as (first, _),
        handoff_server("decode", secret, tokens_file=keys) as (second, _),
        routed(first.address, second.address, access=access, tokens_file=keys) as router,
        over_grpc(router.address, ALICE) as alice,
        over_grpc(router.address, BOB) as bob,
    ):

        def is_found(client: Client) -> bool:
            """Whether the pages came from the other server, or were here."""
            return client.complete(prompt, SHORT, timeout_s=WAIT_S).num_cached_tokens > 0

        def computed() -> int:
            return first.engine.stats[0].totals().prompt_tokens

        wait_until(lambda: alice.load(timeout_s=WAIT_S).num_replicas == 2, "both servers have said their roles")
        assert is_found(alice), "its pages come from the server that has computed them"
        before = computed()
        assert is_found(alice) and computed() == before, "its pages are here"
        assert is_found(bob) and computed() > before, "another's are not, and its own come"


def test_a_router_tells_prompts_of_owners_apart() -> None:
    message = pb.GenerateRequest(text=PROMPT * 9)
    one, other, none = (key_of_request(message, salt) for salt in ("a", "b", ""))
    assert one == key_of_request(message, "a") and len({one, other, none}) == 3


# ---- the files of keys -----------------------------------------------------------------------------------------------


def test_lines_of_keys_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# people\nplain\n\n two words \na b weight=0.5\nx  weight=4  role=router\ny role=router\nz=1\n")
    assert read_listed_keys(str(path), "s") == (
        ListedKey("plain"),
        ListedKey("two words"),
        ListedKey("a b", 0.5),
        ListedKey("x", 4.0, True),
        ListedKey("y", 1.0, True),
        ListedKey("z=1"),
    )


@pytest.mark.parametrize("option", ["weight=0", "weight=-1", "weight=nan", "weight=inf", "weight=", "weight=a"])
def test_a_wrong_weight_is_told(tmp_path: Path, option: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"one\nsecret {option}\n")
    with pytest.raises(ConfigError, match=r"serve.x: line 2 of .*: weight is .* positive number"):
        read_listed_keys(str(path), "serve.x")


def test_options_are_for_keys_of_callers_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("secret wieght=4\n")
    with pytest.raises(ConfigError, match="only weight=NUMBER and role=router") as caught:
        read_listed_keys(str(path), "s")
    assert "secret w" not in str(caught.value)
    path.write_text("one\nsecret weight=4\n")
    with pytest.raises(ConfigError, match="secret 2 of .* has options"):
        read_keys(str(path), "serve.admin_tokens_file")
    with pytest.raises(ConfigError, match=r"route\.token_file"):
        BackendAccess.of(RouteConfig(replicas=["x:1"], token_file=str(path)))


def test_signed_options_say_who_signed_them() -> None:
    owner = Owners([ListedKey(BOB, 4.0)], salt_by_key=True).of_http(f"Bearer {BOB}", "")
    options = owner.sign(RequestOptions(request_id="v"))
    signed = Owner.of(options)
    assert (signed.id, signed.weight, signed.salt, signed.scope) == (owner.id, 4.0, owner.salt, owner.scope)
    assert PROCESS.sign(RequestOptions(request_id="v")) == RequestOptions(request_id="v")
    with pytest.raises(InvalidRequest):
        owner.own(owner.own("v"))
    assert isinstance(options.request_id, str) and shown_id(options.request_id) == "v"
