"""Requests that end their servers: each is found, and nothing that happens from outside convicts another."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from route_parts import routed, server_process
from serve_parts import ONE_CALL, WAIT_S, wait_until

from jaxserve.api import SamplingParams
from jaxserve.client import Client, RequestFailed
from jaxserve.config.schema import Config, GrpcConfig, HttpConfig, RouteConfig, ServeConfig
from jaxserve.errors import RequestQuarantined, Status
from jaxserve.serve import quarantine as quarantines
from jaxserve.serve.gen import admin_pb2 as admin_pb
from jaxserve.serve.gen import admin_pb2_grpc as admin_grpc
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.gen import inference_pb2_grpc as pb_grpc
from jaxserve.serve.quarantine import Quarantine
from jaxserve.serve.route import Routing, route
from jaxserve.serve.route_apart import Apart, Missed
from jaxserve.serve.route_pool import Parting
from jaxserve.serve.route_prompts import PoolPrompts
from jaxserve.serve.route_service import _Failure
from jaxserve.serve.shutdown import Shutdown
from jaxserve.serve.suspects import PLACE_TOKENS, Deaths
from jaxserve.testing import ManualClock

ADMIN = "the-operators"
POISON = 200  # a token that no fake device generates
NUM_TOKENS = 40


# ---- one request's deaths, and what is quarantined -------------------------------------------------------------------


def note(deaths: Deaths, num_tokens: int, alone: bool = False, innocent: bool = False, address: str = "a") -> None:
    deaths.note(address, "why", num_tokens, alone=alone, innocent=innocent)


def test_a_server_that_a_request_never_reached_has_not_died_with_it() -> None:
    async def ask(address: str) -> _Failure:
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await anext(aiter(pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest())))
            return _Failure.of(raised.value)

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen
        failure = asyncio.run(ask(f"127.0.0.1:{held.getsockname()[1]}"))
    assert failure.code is grpc.StatusCode.UNAVAILABLE and failure.unreached and not failure.drained


def test_two_deaths_at_one_place_make_a_suspect_and_two_alone_convict() -> None:
    deaths = Deaths(5)
    note(deaths, 5)
    assert not deaths.suspected
    note(deaths, 5 + PLACE_TOKENS)
    assert deaths.suspected and not deaths.convicted
    note(deaths, 5 + PLACE_TOKENS, alone=True)
    note(deaths, 5 + PLACE_TOKENS)
    assert not deaths.convicted
    note(deaths, 5 + PLACE_TOKENS, alone=True)
    assert deaths.convicted
    assert deaths.num_recent == 4, "those since the last token"


def test_a_request_that_gets_further_is_cleared() -> None:
    deaths = Deaths(0)
    for _ in range(2):
        note(deaths, 3)
    note(deaths, 3, alone=True)
    assert not deaths.clear_beyond(3 + PLACE_TOKENS)
    assert deaths.clear_beyond(4 + PLACE_TOKENS)
    assert not deaths.suspected
    note(deaths, 30, alone=True)
    note(deaths, 31 + PLACE_TOKENS, alone=True)
    assert not deaths.convicted and not deaths.suspected, "each death was far from the last one"


def test_a_server_that_drains_makes_no_suspect_unless_it_does_so_again_and_again() -> None:
    deaths = Deaths(0)
    for address in "abcd":
        note(deaths, 0, alone=True, innocent=True, address=address)
    assert not deaths.suspected and deaths.num_recent == 0
    assert deaths.losses == ["a: why", "b: why", "c: why", "d: why"]
    for _ in range(2):
        note(deaths, 0, innocent=True)
    assert deaths.suspected and deaths.num_recent == 2


def test_content_is_refused_whoever_sends_it_until_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    quarantine = Quarantine(60.0, clock)

    def request(ids: list[int], max_tokens: int = 7, **fields) -> pb.GenerateRequest:
        seed = fields.pop("seed", 1)
        sampling = pb.SamplingParams(max_tokens=max_tokens, seed=seed, logit_bias={1: 2.0, 3: 4.0})
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling, **fields)

    name = quarantine.add(request([1, 2], request_id="a"), "x: died; " * 1000)
    again = request([1, 2], request_id="b", seed=9, tenant="t", timeout_s=3, cache_salt="s", resume=pb.Resume())
    again.ttft_target_s = again.tpot_target_s = 0.5
    with pytest.raises(RequestQuarantined, match=r"another 60 s \(route\.quarantine_s\); change its prompt"):
        quarantine.check(again)
    assert again.request_id == "b", "only a copy is changed"
    for other in (request([1, 3]), request([1, 2], max_tokens=8), request([1, 2], echo=True)):
        quarantine.check(other)
    assert Quarantine(60.0, clock).add(request([1, 2]), "") != name, "the name says nothing to who guesses the prompt"
    clock.advance(20.0)
    [entry] = quarantine.listed(9)
    assert (entry.digest, entry.request_id, entry.left_s, entry.num_refused) == (name, "a", 40.0, 1)
    assert entry.why.startswith("x: died; ") and len(entry.why) <= 1000
    clock.advance(40.0)
    assert len(quarantine) == 0 and not quarantine.listed(9), "also when nobody asks for anything meanwhile"
    quarantine.check(again)
    monkeypatch.setattr(quarantines, "MAX_QUARANTINED", 3)
    for number in range(5):
        quarantine.add(request([number]), "")
    assert len(quarantine) == 3
    quarantine.check(request([1]))
    with pytest.raises(RequestQuarantined):
        quarantine.check(request([2]))
    newest = quarantine.listed(2)
    assert len(newest) == 2 and quarantine.remove(newest[0].digest) and not quarantine.remove(newest[0].digest)
    assert not quarantine.remove("no digest")
    quarantine.check(request([4]))
    with pytest.raises(RequestQuarantined):
        quarantine.check(request([3]))
    assert (quarantine.num_convictions, quarantine.num_refused) == (6, 3)


# ---- a router before replicas that die when they are told to ---------------------------------------------------------


class Replica(pb_grpc.InferenceServicer):
    """Generates the numbers from 0 on. `die` breaks off all calls; a moment later it has been started again."""

    def __init__(self, fleet: "Fleet") -> None:
        self.fleet = fleet
        self.live: dict[str, asyncio.Event] = {}
        self.deaths: list[int] = []  # number of requests at each
        self.down = False
        self.health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self.server = grpc.aio.server()
        pb_grpc.add_InferenceServicer_to_server(self, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        if self.down:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it is starting")
        broken = self.live[request.request_id] = asyncio.Event()
        known = len(request.resume.sequences[0].token_ids) if request.HasField("resume") else 0
        try:
            for number in range(known, NUM_TOKENS):
                await self.fleet.may_generate(number, broken)
                if number == 3 and request.token_ids.ids[0] == POISON and not broken.is_set():
                    await self.die()
                if broken.is_set():
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the device is lost")
                reply = pb.GenerateResponse(request_id=request.request_id, token_ids=[number])
                reply.token_offset = number
                if number == NUM_TOKENS - 1:
                    reply.finish_reason = pb.FINISH_REASON_LENGTH
                await context.write(reply)
                self.fleet.num_tokens[request.request_id] = number + 1
        finally:
            if self.live.get(request.request_id) is broken:
                del self.live[request.request_id]

    async def GetLoad(self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadResponse:
        return pb.GetLoadResponse(num_running=len(self.live), accepting=not self.down)

    async def die(self) -> None:
        self.deaths.append(len(self.live))
        self.down = True
        for broken in self.live.values():
            broken.set()
        await self.fleet.changed()
        await self.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        asyncio.get_running_loop().call_later(0.1, lambda: self.fleet.spawn(self.start_again()))

    async def start_again(self) -> None:
        self.down = False
        await self.health.set("", health_pb2.HealthCheckResponse.SERVING)


class Fleet:
    """Replicas, and a client of the router before them.

    `admin`, `http`: for its operators, who have the token ADMIN.
    """

    def __init__(self) -> None:
        self.limit = NUM_TOKENS  # of tokens of each stream
        self.num_tokens: dict[str, int] = {}
        self.condition = asyncio.Condition()
        self.replicas = [Replica(self) for _ in range(3)]
        self.tasks: set[asyncio.Task[None]] = set()
        self.stub: pb_grpc.InferenceStub
        self.admin: admin_grpc.RouterAdminStub
        self.http: httpx.AsyncClient

    def spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def may_generate(self, number: int, broken: asyncio.Event) -> None:
        async with self.condition:
            await self.condition.wait_for(lambda: number < self.limit or broken.is_set())
        await asyncio.sleep(0)

    async def changed(self) -> None:
        async with self.condition:
            self.condition.notify_all()

    async def allow(self, limit: int) -> None:
        self.limit = limit
        await self.changed()

    async def all_are_well(self) -> None:
        """The router knows it."""
        await until(lambda: self.stub.GetLoad(pb.GetLoadRequest()), lambda load: load.num_replicas == 3)

    async def ask(self, name: str, first: int) -> list[int]:
        request = pb.GenerateRequest(request_id=name, token_ids=pb.TokenIds(ids=[first]))
        request.sampling.max_tokens = NUM_TOKENS
        return [i async for reply in self.stub.Generate(request, timeout=WAIT_S) for i in reply.token_ids]

    @property
    def deaths(self) -> list[int]:
        return [count for replica in self.replicas for count in replica.deaths]


@contextlib.asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[Fleet]:
    (folder / "admins").write_text(ADMIN)
    made = Fleet()
    for replica in made.replicas:
        await replica.server.start()
        await replica.start_again()
    config = Config(
        serve=ServeConfig(
            drain_s=0, grpc=GrpcConfig(port=0), http=HttpConfig(port=0), admin_tokens_file=str(folder / "admins")
        ),
        route=RouteConfig(
            replicas=[replica.address for replica in made.replicas], policy="least_load", wait_s=WAIT_S,
            health_interval_s=0.05, health_timeout_s=WAIT_S,
        ),
    )  # fmt: skip
    shutdown, ready = Shutdown(), asyncio.get_running_loop().create_future()
    routing = asyncio.create_task(route(config, shutdown, ready.set_result))
    try:
        addresses: Routing = await ready
        async with (
            grpc.aio.insecure_channel(addresses.grpc) as channel,
            httpx.AsyncClient(base_url=f"http://{addresses.http}", timeout=WAIT_S, trust_env=False) as made.http,
        ):
            made.stub = pb_grpc.InferenceStub(channel)
            made.admin = admin_grpc.RouterAdminStub(channel)
            await made.all_are_well()
            yield made
    finally:
        shutdown.request()
        await routing
        for replica in made.replicas:
            await replica.server.stop(None)


async def until(ask: Callable[[], Awaitable[object]], is_right: Callable[..., bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_right(await ask()):
            await asyncio.sleep(0.005)


async def reached(condition: Callable[[], bool]) -> None:
    await until(lambda: asyncio.sleep(0), lambda _: condition())


async def test_poison_among_fifty_gets_the_only_error(tmp_path: Path) -> None:
    async with fleet(tmp_path) as parts:
        await parts.allow(3)
        asking = [asyncio.create_task(parts.ask(f"r{i}", POISON if i == 20 else i)) for i in range(51)]
        await reached(lambda: sum(parts.num_tokens.values()) >= 50 * 3)
        await parts.allow(NUM_TOKENS)
        answers = await asyncio.gather(*asking, return_exceptions=True)
        error = answers.pop(20)
        assert answers == [list(range(NUM_TOKENS))] * 50
        assert isinstance(error, grpc.aio.AioRpcError)
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "every server that ran this request ended" in (error.details() or "")
        deaths = parts.deaths
        assert len(deaths) == 4 and deaths.count(1) >= 2, "twice among others, twice alone"
        with pytest.raises(grpc.aio.AioRpcError, match="route.quarantine_s") as caught:
            await parts.ask("again", POISON)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert parts.deaths == deaths, "no server has seen it"
        await operators_see_it_and_take_it_again(parts)


async def operators_see_it_and_take_it_again(parts: Fleet) -> None:
    """Over both doors, which are shut to others."""
    token = {"authorization": f"Bearer {ADMIN}"}
    assert (await parts.http.get("/admin/quarantine")).status_code == 401
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await parts.admin.ListQuarantined(admin_pb.ListQuarantinedRequest())
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    listed = (await parts.http.get("/admin/quarantine", headers=token)).json()
    [entry] = listed["entries"]
    assert listed["total"] == 1 and entry["request_id"] == "r20" and entry["num_refused"] == 2
    assert entry["why"].count("the device is lost") >= 2 and 0 < entry["left_s"] <= 600
    metadata = [*token.items()]
    response = await parts.admin.ListQuarantined(admin_pb.ListQuarantinedRequest(limit=1), metadata=metadata)
    assert [one.digest for one in response.entries] == [entry["digest"]] and response.total == 1
    for request in (admin_pb.ListQuarantinedRequest(limit=0), admin_pb.ListQuarantinedRequest(limit=5000)):
        with pytest.raises(grpc.aio.AioRpcError, match="must be from 1 to 4096"):
            await parts.admin.ListQuarantined(request, metadata=metadata)
    figures = (await parts.http.get("/metrics")).text
    assert "jaxserve:router_convictions_total 1.0" in figures and "jaxserve:router_quarantined 1.0" in figures
    path = f"/admin/quarantine/{entry['digest']}"
    assert (await parts.http.delete(path)).status_code == 401
    assert (await parts.http.delete(path, headers=token)).status_code == 204
    gone = await parts.http.delete(path, headers=token)
    assert gone.status_code == 404 and entry["digest"] in gone.json()["error"]["message"]
    with pytest.raises(grpc.aio.AioRpcError, match="is quarantined, or not any more"):
        await parts.admin.RemoveQuarantined(
            admin_pb.RemoveQuarantinedRequest(digest=entry["digest"]), metadata=metadata
        )
    assert (await parts.http.get("/admin/quarantine", headers=token)).json() == {"entries": [], "total": 0}
    deaths = len(parts.deaths)
    with pytest.raises(grpc.aio.AioRpcError, match="every server that ran this request ended"):
        await parts.ask("once more", POISON)
    assert len(parts.deaths) > deaths, "it runs again, and is convicted again"


async def test_kills_from_outside_convict_nobody(tmp_path: Path) -> None:
    """They come at the worst times: two at one place of many streams, and then one when each of these runs alone."""
    kills = 0
    async with fleet(tmp_path) as parts:
        for turn in range(5):
            await parts.all_are_well()
            await parts.allow(3)
            names = [f"{turn}-{i}" for i in range(9)]
            asking = [asyncio.create_task(parts.ask(name, i)) for i, name in enumerate(names)]
            await reached(lambda names=names: all(parts.num_tokens.get(name) == 3 for name in names))
            first = parts.replicas[0]
            met = set(first.live)
            await first.die()
            await reached(lambda: placed(parts) == 9)
            second = max(parts.replicas, key=lambda replica: len(met & set(replica.live)))
            twice = met & set(second.live)
            await second.die()
            kills += 2
            assert len(twice) >= 2
            alone: set[str] = set()
            for _ in range(2):
                victim = await in_solitude(parts, twice - alone)
                alone |= set(victim.live)
                await victim.die()
                kills += 1
            await parts.allow(NUM_TOKENS)
            assert await asyncio.gather(*asking) == [list(range(NUM_TOKENS))] * 9
    assert kills == 20


def placed(parts: Fleet) -> int:
    return sum(len(replica.live) for replica in parts.replicas if not replica.down)


async def in_solitude(parts: Fleet, names: set[str]) -> Replica:
    """The replica that runs one of the named requests and nothing else."""

    def find() -> list[Replica]:
        return [r for r in parts.replicas if not r.down and len(r.live) == 1 and set(r.live) <= names]

    await reached(lambda: bool(find()))
    return find()[0]


async def test_a_prompt_that_ends_those_who_compute_it_for_others_does_not_end_all_of_them() -> None:
    gone: list[str] = []

    class Stub:
        def Prefill(self, request: object, **_: object) -> asyncio.Task[None]:
            return asyncio.create_task(self.die())

        async def die(self) -> None:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())

    def note_death(missed: Missed) -> bool:
        gone.append(missed.name)
        return len(gone) == 2

    def choose_prefill(key: object, tried: list[str]) -> Any:
        return SimpleNamespace(address=f"p{len(tried)}", handoff=Stub(), parting=Parting())

    pool: Any = SimpleNamespace(
        metadata=(), choose_prefill=choose_prefill, suspect=lambda *_: None,
        carrying=lambda *_: contextlib.nullcontext(),
    )  # fmt: skip
    apart, request = Apart(prefill_above=0, timeout_s=1.0, retries=5), pb.GenerateRequest(text="a")
    await apart.prepare(PoolPrompts(pool, ()), request, (), "d", lambda: None, note_death)
    assert gone == ["p1", "p2"] and not request.ticket, "the server that answers computes it, alone"


# ---- processes -------------------------------------------------------------------------------------------------------

_SERVER = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from serve_parts import serve_slowly
from jaxserve.config.schema import GrpcConfig, ServeConfig
from jaxserve.serve.service import serve_forever

parts = serve_slowly(0.005, max_rows=32)
plain = parts.runner.dispatch

def dispatch(plan):
    if any({poison} in chunk.token_ids for chunk in plan.chunks):
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(plan)

parts.runner.dispatch = dispatch
sys.exit(serve_forever(parts.engine, ServeConfig(grpc=GrpcConfig(port={port}))))
"""


class Supervised:
    """A server in a process of its own, which is started again on its port whenever it has died."""

    def __init__(self) -> None:
        self.address = ""
        self.num_deaths = 0
        self.process: subprocess.Popen[str]
        self._ended = threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="test-supervisor", daemon=True)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            assert self._started.wait(WAIT_S)
            yield
        finally:
            self._ended.set()
            self.process.kill()
            self._thread.join(WAIT_S)

    def _run(self) -> None:
        port = 0
        while not self._ended.is_set():
            code = _SERVER.format(tests=str(Path(__file__).parent), poison=POISON, port=port)
            with server_process([sys.executable, "-c", code]) as (self.process, self.address):
                port = int(self.address.rsplit(":", 1)[1])
                self._started.set()
                self.process.wait()
            self.num_deaths += not self._ended.is_set()


@pytest.mark.slow
def test_processes_that_poison_kills_and_processes_that_are_killed() -> None:
    length = 400  # two seconds at least
    sampling = SamplingParams(temperature=0.0, max_tokens=length)
    expected = [(97 + i) % 128 for i in range(1, length + 1)]
    servers = [Supervised() for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.enter_context(server.running())
        router = stack.enter_context(routed(*(server.address for server in servers), retries=3, wait_s=WAIT_S))
        client = stack.enter_context(Client(router.address, retries=ONE_CALL))
        wait_until(lambda: client.load().num_replicas == 3, "all are well")
        answers: dict[int, list[int]] = {}
        failures: list[RequestFailed] = []

        def ask(number: int) -> None:
            try:
                for reply in client.generate([number, 97], sampling, timeout_s=WAIT_S):
                    answers.setdefault(number, []).extend(reply.token_ids)
            except RequestFailed as error:
                failures.append(error)

        @contextlib.contextmanager
        def fifty_streams() -> Iterator[None]:
            """All have begun when the block runs, and have ended after it."""
            answers.clear()
            threads = [threading.Thread(target=ask, args=(number,)) for number in range(50)]
            for thread in threads:
                thread.start()
            wait_until(lambda: len(answers) == 50, "all have begun")
            yield
            for thread in threads:
                thread.join(WAIT_S)
            assert list(answers.values()) == [expected] * 50

        with fifty_streams(), pytest.raises(RequestFailed) as caught:
            client.complete([POISON, 97], sampling, timeout_s=WAIT_S)
        assert caught.value.status is Status.QUARANTINED and not failures
        assert sum(server.num_deaths for server in servers) == 4, "twice among others, twice alone"
        for _ in range(2):
            wait_until(lambda: client.load().num_replicas == 3, "all are well")
            with fifty_streams():
                for server in servers[:2]:
                    server.process.kill()
        assert not failures, "kills from outside convict nobody"
