"""OpenAI's and Anthropic's clients over HTTP through a router, with real servers on fake devices behind it."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from route_parts import Routed, fake_server, routed
from serve_parts import WAIT_S, serve_bytes, served, wait_until

from jaxserve.api import SamplingParams
from jaxserve.client import Client
from jaxserve.config.schema import Config, GrpcConfig, HttpConfig, RouteConfig, ServeConfig
from jaxserve.errors import ConfigError, EngineStopped
from jaxserve.serve import route_engine
from jaxserve.serve.route import route
from jaxserve.serve.route_engine import RouteEngine
from jaxserve.serve.shutdown import Shutdown
from jaxserve.testing import ByteTokenizer

KEY = "sk-mine"
CHAT: list[Any] = [{"role": "user", "content": "What is 683+784?"}]
SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 7}
LONG_TOKENS = 3000


class Front:
    """A router over HTTP, and the addresses of its servers."""

    def __init__(self, router: Routed, *servers: str) -> None:
        self.router = router
        self.servers = servers
        self.url = router.http_url
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=WAIT_S)

    def direct(self, prompt: Any, max_tokens: int) -> str:
        """The text that the last server gives over gRPC."""
        with Client(self.servers[-1]) as client:
            options = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **SAMPLING)
            return client.complete(prompt, options, timeout_s=WAIT_S).text

    def num_running(self) -> list[int]:
        loads = []
        for address in self.servers:
            with Client(address) as client:
                loads.append(client.load(timeout_s=WAIT_S).num_running)
        return loads


@contextlib.contextmanager
def front(keys: Path, *servers: str) -> Iterator[Front]:
    keys.write_text(KEY)
    http = HttpConfig(port=0, api_keys_file=str(keys))
    with routed(*servers, http=http, access={"tokenizer": "demo"}) as router:
        made = Front(router, *servers)
        wait_until(lambda: httpx.get(f"{made.url}/ready", timeout=WAIT_S).status_code == 200, "it knows the model")
        with made.client:
            yield made


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    keys = tmp_path_factory.mktemp("secrets") / "keys"
    with (
        fake_server(demo=True) as (_, one),
        fake_server(demo=True, delay_s=0.001) as (_, two),
        front(keys, one, two) as made,
    ):
        yield made


def test_a_chat_is_that_of_a_server_whole_and_streamed(both: Front) -> None:
    create = both.client.chat.completions.create
    asked: dict[str, Any] = {"messages": CHAT, "model": "fake", "max_completion_tokens": 40, **SAMPLING}
    whole = create(**asked, n=2, extra_body={"ignore_eos": True})
    expected = both.direct(CHAT, 40)
    assert whole.choices[0].message.content == expected != whole.choices[1].message.content
    assert whole.usage is not None and whole.usage.completion_tokens == 80
    chunks = list(create(**asked, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens > 0
    text = httpx.get(f"{both.url}/metrics", headers={"x-api-key": KEY}, timeout=WAIT_S).text
    assert 'router_http_requests_total{method="POST",route="/v1/chat/completions",status="200"}' in text


def test_completions_with_logprobs_and_echo(both: Front) -> None:
    asked: dict[str, Any] = {"model": "fake", "prompt": ["Once upon", "The end"], "max_tokens": 5, **SAMPLING}
    extra = {"ignore_eos": True, "return_token_ids": True}
    plain = both.client.completions.create(**asked, logprobs=1, extra_body=extra)
    assert [choice.text for choice in plain.choices] == [both.direct(text, 5) for text in asked["prompt"]]
    assert all(len(choice.logprobs.token_logprobs) == 5 for choice in plain.choices if choice.logprobs)  # pyright: ignore
    echoed = both.client.completions.create(**asked, logprobs=1, echo=True, extra_body=extra)
    for one, other, prompt in zip(echoed.choices, plain.choices, asked["prompt"], strict=True):
        assert one.text == prompt + other.text
        assert one.logprobs is not None and one.logprobs.token_logprobs is not None
        assert one.logprobs.token_logprobs[0] is None and None not in one.logprobs.token_logprobs[1:]


def test_a_stream_goes_on_by_resume(both: Front) -> None:
    """A client that has lost its router asks another one, with what it has."""
    create = both.client.completions.create
    asked: dict[str, Any] = {"model": "fake", "prompt": "Once upon", "max_tokens": 12, "stream": True, **SAMPLING}
    extra = {"ignore_eos": True, "return_token_ids": True}
    chunks = [chunk.choices[0] for chunk in create(**asked, extra_body=extra)]
    known = [i for choice in chunks[:4] for i in choice.token_ids]  # pyright: ignore
    rest = [c.choices[0] for c in create(**asked, extra_body={**extra, "resume": [{"token_ids": known}]})]
    assert "".join(choice.text for choice in chunks[:4] + rest) == "".join(choice.text for choice in chunks)


def test_models_responses_messages_and_the_tokenizer(both: Front) -> None:
    assert [model.id for model in both.client.models.list()] == ["fake"]
    first = both.client.responses.create(model="fake", input="Tell me a story.", max_output_tokens=20)
    again = both.client.responses.create(
        model="fake", input="And then?", previous_response_id=first.id, max_output_tokens=20
    )
    assert first.usage is not None and again.usage is not None
    # How long the first answer is, and how its text is cut into tokens, follows from a seed that the server draws.
    assert again.usage.input_tokens > first.usage.input_tokens > 0 and first.usage.output_tokens > 0
    with anthropic.Anthropic(base_url=both.url, api_key=KEY, max_retries=0, timeout=WAIT_S) as client:
        with client.messages.stream(model="fake", max_tokens=20, messages=CHAT) as stream:
            assert stream.get_final_message().usage.output_tokens > 0
        picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
        turn: Any = {"role": "user", "content": [picture]}
        with pytest.raises(anthropic.BadRequestError, match="takes no pictures"):
            client.messages.create(model="fake", max_tokens=20, messages=[turn])
    tokens = httpx.post(f"{both.url}/tokenize", json={"prompt": "a text"}, headers={"x-api-key": KEY}, timeout=WAIT_S)
    with Client(both.servers[0]) as client:
        assert tokens.json()["tokens"] == list(client.tokenize("a text", timeout_s=WAIT_S))


def test_structured_output_is_that_of_a_server(both: Front) -> None:
    answer = both.client.chat.completions.create(
        model="fake", messages=CHAT, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert answer.choices[0].message.content in ("yes", "no")


def test_a_bad_request_costs_itself_only(both: Front) -> None:
    create = both.client.chat.completions.create
    asked: dict[str, Any] = {"messages": CHAT, "model": "fake", "max_completion_tokens": LONG_TOKENS}
    stream = create(**asked, stream=True, extra_body={"ignore_eos": True})
    events = iter(stream)
    next(events)
    with pytest.raises(openai.BadRequestError, match="frequency_penaltee"):
        create(**asked, extra_body={"frequency_penaltee": 1})
    with pytest.raises(openai.BadRequestError) as found:
        create(messages=[{"role": "user", "content": "long " * 5000}], model="fake")
    assert found.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="regex"):  # which a server says: grammars are compiled there
        create(**asked, extra_body={"structured_outputs": {"regex": "("}})
    with pytest.raises(openai.NotFoundError) as missing:  # the same: it knows the adapters
        create(messages=CHAT, model="another")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="another"):
        both.client.models.retrieve("another")
    with pytest.raises(openai.NotFoundError):
        both.client.embeddings.create(model="fake", input="a text")
    with pytest.raises(openai.AuthenticationError):
        both.client.with_options(api_key="sk-other").models.list()
    assert len([next(events) for _ in range(20)]) == 20
    stream.close()
    wait_until(lambda: both.num_running() == [0, 0], "a client that leaves ends its request")


def test_a_server_is_killed_in_the_middle_of_a_stream(both: Front, tmp_path: Path) -> None:
    """The client sees a pause, and every token once."""
    with fake_server(demo=True, delay_s=0.02) as (doomed, address), front(tmp_path / "keys", address) as alone:
        with front(tmp_path / "keys", address, both.servers[0]) as pair:
            num_tokens, texts, begun = 400, [], threading.Semaphore(0)

            def ask() -> None:
                stream = pair.client.chat.completions.create(
                    model="fake",
                    messages=CHAT,
                    max_completion_tokens=num_tokens,
                    stream=True,
                    extra_body={"ignore_eos": True},
                    **SAMPLING,
                )
                parts = []
                for chunk in stream:
                    parts.append(chunk.choices[0].delta.content or "")
                    if len(parts) == 20:
                        begun.release()
                texts.append("".join(parts))

            # Two streams go to both servers, since each goes to the one with fewer.
            asking = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
            for thread in asking:
                thread.start()
            assert all(begun.acquire(timeout=WAIT_S) for _ in asking)
            wait_until(lambda: pair.num_running()[0] == 1, "the one that dies has one of them")
            doomed.kill()
            for thread in asking:
                thread.join(WAIT_S)
            assert texts == [pair.direct(CHAT, num_tokens)] * 2
        with pytest.raises(openai.InternalServerError, match="no replica is well") as found:
            alone.client.chat.completions.create(model="fake", messages=CHAT)
        assert found.value.status_code == 503


def test_servers_with_another_tokenizer() -> None:
    with (
        served(serve_bytes()) as server,
        routed(server.address, http=HttpConfig(port=0), access={"tokenizer": "demo"}) as router,
    ):
        probe = f"{router.http_url}/ready"
        wait_until(lambda: "route.tokenizer" in httpx.get(probe, timeout=WAIT_S).text, "it has compared")
        refusal = httpx.post(f"{router.http_url}/v1/completions", json={"prompt": "a"}, timeout=WAIT_S)
        assert refusal.status_code == 503 and "another tokenizer" in refusal.json()["error"]["message"]
        assert router.is_healthy(), "requests over gRPC need none"


class _NobodyIsWell:
    """The service of a router whose servers do not answer; each question sets `asked`."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def GetModel(self, request: Any, context: Any) -> Any:
        self.asked.set()
        raise EngineStopped("no replica is well: no name has an address yet")


async def test_servers_have_some_seconds_to_answer_before_the_log_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(route_engine, "_LOOK_S", 0.001)
    caplog.set_level(logging.WARNING, logger=route_engine.__name__)
    now_s, service = 100.0, _NobodyIsWell()
    engine = RouteEngine(service, ByteTokenizer(), 8, now_s=lambda: now_s)  # type: ignore[arg-type]

    async def look(times: int) -> None:
        for _ in range(times):
            service.asked.clear()
            await asyncio.wait_for(service.asked.wait(), WAIT_S)

    engine.start()
    try:
        await look(3)
        now_s += route_engine._PATIENCE_S - 0.1
        await look(3)
        assert not caplog.records and engine.fault is not None, "probes say it all the same"
        now_s += 0.2
        await look(4)
    finally:
        await engine.stop()
    (record,) = caplog.records
    assert record.getMessage() == "no requests over HTTP: no replica is well: no name has an address yet"


async def test_a_tokenizer_without_a_port() -> None:
    config = Config(
        serve=ServeConfig(grpc=GrpcConfig(port=0)), route=RouteConfig(replicas=["127.0.0.1:1"], tokenizer="demo")
    )
    with pytest.raises(ConfigError, match="serve.http.port"):
        await route(config, Shutdown())
