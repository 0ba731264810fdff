"""Pictures through HTTP and gRPC on a fake device: usage, hits, and every kind of bad input, with its message.

The processor is Qwen2-VL's, the device compares what each placeholder reads with the picture that belongs there.
"""

import base64
import concurrent.futures
import http.client
import json
import logging
import re
import resource
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from http_parts import browse, http_served, openai_client
from picture_files import jpeg_of_scans, use_program
from picture_parts import PLACEHOLDER, picture_parts, png, url_of
from serve_parts import Served, connect, served, wait_until

from jaxserve.api import SamplingParams
from jaxserve.client import CallOptions, RequestFailed
from jaxserve.config.schema import GrpcConfig, HttpConfig
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.route_service import key_of_request
from jaxserve.testing import ByteTokenizer
from jaxserve.vision import PictureLimits


def bomb(side: int = 40_000) -> bytes:
    """A PNG of some bytes whose header says so many rows and columns of pixels."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def ask(client: httpx.Client, *content: Any, **fields: Any) -> httpx.Response:
    texts = [{"type": "text", "text": one} if isinstance(one, str) else one for one in content]
    messages = [{"role": "user", "content": texts}]
    body = {"messages": messages, "max_completion_tokens": 4, "temperature": 0, "seed": 1, **fields}
    return client.post("/v1/chat/completions", json=body)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(picture_parts(), grpc_config=GrpcConfig(port=0), http_config=HttpConfig(port=0)) as found:
        yield found


@pytest.fixture
def client(server: Served) -> Iterator[httpx.Client]:
    with browse(server) as found:
        yield found


def test_usage_counts_the_tokens_of_pictures_and_a_repeated_one_is_found(server: Served, client: httpx.Client) -> None:
    encoder = server.scheduler.encoder
    text = ask(client, "What is this? ").json()["usage"]["prompt_tokens"]
    before = encoder.num_encodes
    first = ask(client, part(url_of(png(colour=1))), "What is this? ").json()
    assert first["usage"]["prompt_tokens"] == text + 6, "2 x 3 tokens"
    again = ask(client, part(url_of(png(colour=1))), "What is this? ").json()
    assert again["choices"] == first["choices"] and encoder.num_encodes == before + 1
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (text + 6) // 8 * 8
    other = ask(client, part(url_of(png(colour=2))), "What is this? ").json()
    assert other["choices"] != first["choices"] and encoder.num_encodes == before + 2
    tokens = client.post(
        "/tokenize", json={"messages": [{"role": "user", "content": [part(url_of(png())), part(url_of(png(28, 28)))]}]}
    )
    assert tokens.json()["tokens"].count(259) == 7
    found = client.get("/metrics").text
    assert f'jaxserve:mm_encodes_total{{engine="0",model_name="fake"}} {encoder.num_encodes}.0' in found


def test_grpc_takes_files_in_messages_and_for_placeholders(server: Served) -> None:
    one, two = png(colour=3, kind="JPEG"), png(28, 28, colour=4, kind="WEBP")
    sampling = SamplingParams(temperature=0, max_tokens=3, seed=1)
    with connect(server) as client:
        chat = [{"role": "user", "content": "and this", "pictures": [one, two]}]
        answer = client.complete(chat, sampling)
        tokens = client.tokenize(chat)
        assert tokens.count(259) == 6 + 1 and answer.num_prompt_tokens == len(tokens)
        text = client.complete(f"a{PLACEHOLDER}b", sampling, CallOptions(pictures=(one,)))
        assert text.num_prompt_tokens == 1 + 2 + 6
        with pytest.raises(RequestFailed, match=r"pictures\[0\].*none of the formats"):
            client.complete(f"a{PLACEHOLDER}b", sampling, CallOptions(pictures=(b"not a picture",)))
        with pytest.raises(RequestFailed, match="2 placeholders .* 1 pictures"):
            client.complete(PLACEHOLDER * 2, sampling, CallOptions(pictures=(one,)))


def test_a_router_knows_pictures() -> None:
    def key(*pictures: bytes) -> object:
        message = pb.ChatMessage(role="user", content="What is this? " * 9, pictures=pictures)
        return key_of_request(pb.GenerateRequest(chat=pb.ChatMessages(messages=[message])))

    assert key(b"a") == key(b"a") and len({key(), key(b"a"), key(b"b"), key(b"a", b"b")}) == 4
    texts = {key_of_request(pb.GenerateRequest(text="a" * 99, pictures=[data])) for data in (b"a", b"b")}
    assert len(texts) == 2


def block(data: bytes, kind: str = "image/png") -> Any:
    """A picture as Anthropic's API has it."""
    encoded = base64.b64encode(data).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": encoded}}


def test_anthropics_client_sends_pictures(server: Served) -> None:
    """In a message and in the result of a tool; the count is that of the same conversation in OpenAI's form."""
    encoder, text = server.scheduler.encoder, {"type": "text", "text": "What is this?"}
    calls: Any = [{"type": "tool_use", "id": "call", "name": "look", "input": {}}]
    seen = block(png(28, 28, colour=6))
    results: Any = [
        {"type": "tool_result", "tool_use_id": "call", "content": [{"type": "text", "text": "Here: "}, seen]},
        text,
    ]
    messages: Any = [
        {"role": "user", "content": [block(png(colour=5)), text]},
        {"role": "assistant", "content": calls},
        {"role": "user", "content": results},
    ]
    chat = [
        {"role": "user", "content": [part(url_of(png(colour=5))), text]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]},
        {"role": "tool", "content": [{"type": "text", "text": "Here: "}, part(url_of(png(28, 28, colour=6)))]},
        {"role": "user", "content": [text]},
    ]
    with anthropic.Anthropic(base_url=server.http_url, api_key="none", max_retries=0) as client, browse(server) as http:
        tokens = http.post("/tokenize", json={"messages": chat}).json()["tokens"]
        assert tokens.count(259) == 6 + 1
        counted = client.messages.count_tokens(model="fake", messages=messages).input_tokens
        assert counted == len(tokens)
        before = encoder.num_encodes
        first = client.messages.create(model="fake", max_tokens=4, messages=messages)
        with client.messages.stream(model="fake", max_tokens=4, messages=messages) as stream:
            again = stream.get_final_message()
        assert encoder.num_encodes == before + 2, "the second time, both are found"
        for answer in (first, again):
            assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == len(tokens)
        assert again.usage.cache_read_input_tokens == (len(tokens) - 1) // 8 * 8


def test_openais_client_sends_pictures_to_responses(server: Served) -> None:
    """In a message, in the output of a function, and from an answer that the server has kept."""
    here = url_of(png(colour=7))
    image: Any = {"type": "input_image", "image_url": here, "detail": "high"}
    items: Any = [
        {"role": "user", "content": [image, {"type": "input_text", "text": "What is this?"}]},
        {"type": "function_call", "call_id": "call", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call", "output": [{**image, "image_url": url_of(png(28, 28))}]},
    ]
    with openai_client(server) as client:
        first = client.responses.create(model="fake", input=items, max_output_tokens=4)
        assert first.usage is not None and first.status == "incomplete"
        text = [
            {"role": "user", "content": "What is this?"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]},
            {"role": "tool", "content": ""},
        ]
        with browse(server) as http:
            without = http.post("/tokenize", json={"messages": text}).json()["count"]
        assert first.usage.input_tokens == without + 6 + 1
        encodes = server.scheduler.encoder.num_encodes
        then = client.responses.create(
            model="fake", input="And then?", max_output_tokens=4, previous_response_id=first.id
        )
        assert then.usage is not None and then.usage.input_tokens > first.usage.total_tokens
        assert server.scheduler.encoder.num_encodes == encodes, "the kept conversation has its pictures"


BAD_ELSEWHERE: dict[str, tuple[str, Any, str]] = {
    "messages, url": (
        "messages",
        [{"type": "image", "source": {"type": "url", "url": "https://pictures.example/cat.png"}}],
        r"messages\[1\]\.content\[0\] .* type 'url', but this server fetches nothing",
    ),
    "messages, file": ("messages", [{"type": "image", "source": {"type": "file", "file_id": "a"}}], "type 'file'"),
    "messages, type": ("messages", [block(b"BM", "image/bmp")], "media_type"),
    "messages, no base64": (
        "messages",
        [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "####"}}],
        r"messages\[1\]\.content\[0\].*not valid base64",
    ),
    "messages, a result": (
        "messages",
        [{"type": "tool_result", "tool_use_id": "a", "content": [block(png()), block(b"hello")]}],
        r"messages\[1\]\.content\[0\]\.content\[1\]: .*none of the formats",
    ),
    "messages, too many": ("messages", [block(png())] * 4, "has 4 pictures, but a request may have 3"),
    "messages, transformed": ("messages", [{**block(png()), "transformations": {"a": 1}}], "transformations"),
    "responses, http": (
        "responses",
        [{"type": "input_image", "image_url": "https://pictures.example/cat.png"}],
        r"input\[1\]\.content\[0\]: .* only data: is taken",
    ),
    "responses, file": ("responses", [{"type": "input_image", "file_id": "a"}], "file_id"),
    "responses, nothing": ("responses", [{"type": "input_image"}], r"input\[1\]\.content\[0\] is a picture without"),
    "responses, no picture": (
        "responses",
        [{"type": "input_image", "image_url": url_of(b"hello")}],
        "none of the formats",
    ),
}


@pytest.mark.parametrize("name", BAD_ELSEWHERE)
def test_bad_pictures_of_the_other_conversations_are_named_where_they_were_sent(
    name: str, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """The messages of the chat that they become have other numbers: there is a system message, or instructions."""
    caplog.set_level(logging.DEBUG)
    api, content, message = BAD_ELSEWHERE[name]
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": content}]
    bodies = {
        "messages": {"model": "fake", "max_tokens": 4, "system": "s", "messages": turns},
        "responses": {"model": "fake", "max_output_tokens": 4, "instructions": "s", "input": turns},
    }
    answer = client.post(f"/v1/{api}", json=bodies[api])
    assert answer.status_code == 400, answer.text
    assert re.search(message, answer.json()["error"]["message"]), answer.text
    assert "base64," not in caplog.text.replace("base64,DATA", "").replace("base64,...", "")
    assert len(answer.text) < 1000


BAD: dict[str, tuple[list[Any], str]] = {
    "http": ([part("https://pictures.example/cat.png")], "only data: is taken: this server fetches nothing"),
    "file": ([part("file:///etc/passwd")], "only data: is taken"),
    "no base64": ([part("data:image/png;base64,####")], "not valid base64"),
    "not encoded": ([part("data:image/png,abc")], "has the form data:image/png;base64,DATA"),
    "type": ([part(url_of(b"BM", "image/bmp"))], "'image/bmp'; image/png, image/jpeg, image/webp, image/gif are taken"),
    "no picture": ([part(url_of(b"hello"))], "none of the formats PNG, JPEG, WEBP"),
    "other format": ([part(url_of(png(kind="BMP")))], "none of the formats PNG, JPEG, WEBP"),
    "truncated": ([part(url_of(png(200, 200)[:60]))], "cannot be decoded"),
    "bomb": ([part(url_of(bomb()))], "40000 x 40000 pixels is more than the 1000000 pixels|too many pixels"),
    "zero size": ([part(url_of(bomb(0)))], "none of the formats|cannot be decoded|too thin"),
    "too long": ([part(url_of(png())), "a" * 4000], r"4\d\d\d tokens"),
    "thin": ([part(url_of(png(1, 400)))], "too thin"),
    "too many": ([part(url_of(png()))] * 4, "has 4 pictures, but a request may have 3"),
    "second of two": ([part(url_of(png())), part(url_of(b"hello"))], r"messages\[0\]\.content\[1\]"),
    "video": ([{"type": "video_url", "video_url": {"url": "data:"}}], "video_url"),
    "sound": ([{"type": "input_audio", "input_audio": {}}], "input_audio"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_pictures_are_refused_and_nothing_of_them_is_repeated(
    name: str, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    content, message = BAD[name]
    answer = ask(client, *content)
    assert answer.status_code == 400, answer.text
    assert re.search(message, answer.json()["error"]["message"]), answer.text
    assert "base64," not in caplog.text.replace("base64,DATA", "").replace("base64,...", "")
    assert len(answer.text) < 1000
    assert ask(client, "still there?").status_code == 200


def test_a_jpeg_of_many_scans_costs_nobody_else_anything(caplog: pytest.LogCaptureFixture) -> None:
    """One with more than any program writes is refused at once. Those that are decoded end with their time, which two
    take from all threads that encode; a chat beside them is answered."""
    with http_served(picture_parts(PictureLimits(decode_s=0.5))) as server, browse(server) as client:
        many = ask(client, part(url_of(jpeg_of_scans(40_000, 4000), "image/jpeg")))
        assert many.status_code == 400 and "vision.max_scans" in many.json()["error"]["message"]
        assert "was ended" not in caplog.text
        slow = part(url_of(jpeg_of_scans(100, 5000), "image/jpeg"))
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(ask, client, part(url_of(png())), slow) for _ in range(4)]
            assert ask(client, part(url_of(png())), "What is this?").status_code == 200
            for answer in answers:
                assert answer.result().status_code == 400
                message = answer.result().json()["error"]["message"]
                assert re.search(r"messages\[0\]\.content\[1\]: .*more than 0\.5 s .*vision\.decode_s", message)
        assert caplog.text.count("a process that decodes pictures was ended: the pictures of the request take") == 4
        assert ask(client, part(url_of(png())), "What is this?").status_code == 200


def test_decoding_ends_when_the_client_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The decoder notes each file that it gets, and answers none."""
    notes = tmp_path / "files"
    use_program(monkeypatch, tmp_path, f"open({str(notes)!r}, 'a').write('one'); signal.pause()")
    with http_served(picture_parts()) as server, browse(server) as client:
        messages = [{"role": "user", "content": [part(url_of(png(colour=1))), part(url_of(png(colour=2)))]}]
        host, port = server.http_url.removeprefix("http://").split(":")
        leaving = http.client.HTTPConnection(host, int(port))
        leaving.request(
            "POST", "/v1/chat/completions", json.dumps({"messages": messages}), {"content-type": "application/json"}
        )
        wait_until(lambda: notes.exists() and notes.read_text() == "one", "the first picture is being decoded")
        leaving.close()
        wait_until(lambda: "a process that decodes pictures was ended: the caller has left" in caplog.text, "the end")
        assert ask(client, "still there?").status_code == 200
        monkeypatch.undo()
        assert ask(client, part(url_of(png())), "What is this?").status_code == 200
    assert notes.read_text() == "one", "the second picture was not begun"


def test_a_literal_placeholder_is_text_in_a_chat_and_refused_in_a_prompt() -> None:
    """There it would stand for a picture that is not there."""
    with http_served(picture_parts()) as server, browse(server) as client:
        assert ask(client, part(url_of(png())), f"and {PLACEHOLDER}").status_code == 200
        assert client.post("/v1/completions", json={"prompt": PLACEHOLDER}).status_code == 400


def test_a_text_model_refuses_pictures() -> None:
    with http_served(Served(tokenizer=ByteTokenizer())) as server, browse(server) as client:
        answer = ask(client, part(url_of(png())), "What is this?")
        assert answer.status_code == 400
        assert (
            "messages[0].content[0] is a picture, but this model takes text only" in answer.json()["error"]["message"]
        )


@pytest.mark.slow
def test_two_hundred_hostile_uploads_at_once_cost_bounded_memory() -> None:
    """Bodies of two megabytes that are no pictures, bombs, and pictures cut short; then the server still answers."""
    noise = url_of(b"\0" * 1_500_000)
    large = url_of(png(1000, 1000)[:-200])
    urls = [noise, url_of(bomb()), large]
    limits = {"max_bodies_bytes": 20 * 2**20}
    with http_served(picture_parts(), **limits) as server, browse(server) as client:
        assert ask(client, "warm").status_code == 200
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            codes = [*pool.map(lambda n: ask(client, part(urls[n % 3])).status_code, range(200))]
        grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1024
        assert set(codes) <= {400, 503} and codes.count(400) > 50, codes
        assert grown_mb < 400, "clients and server are one process: 32 bodies of clients, 20 MB of the server's"
        assert ask(client, part(url_of(png())), "What is this?").status_code == 200
        assert server.engine.num_live == 0
