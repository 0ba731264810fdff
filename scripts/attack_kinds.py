"""The kinds of attack that `attack.py` measures: each is what one caller with a key may send, and what it shows.

An attack lasts for a given time, has a bounded number of calls and connections, and leaves with all of them. None of
them goes anywhere but to a port of this machine.
"""

import base64
import collections
import contextlib
import dataclasses
import functools
import http.client
import itertools
import json
import socket
import struct
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import grpc
from attack_caller import HOST

from jaxserve.serve.gen import inference_pb2 as pb

MOST_CALLS = 4000  # of one attack
MOST_CONNECTIONS = 1000  # of one attack at once
MOST_READ = 2**28  # bytes of one answer
PACE_S = 0.1  # between the beginnings of two calls of one thread
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Attacker:
    """One caller for `seconds`: what it may do, and what came of it. Its threads end with its time, or with `leave`."""

    def __init__(
        self, http_port: int, grpc_port: int, key: str, other_key: str, seconds: float, scale: float = 1.0
    ) -> None:
        """`scale`: of the sizes that are sent, less than 1 for tests."""
        self._scale = scale
        self._http_port = http_port
        self._grpc_port = grpc_port
        self.key = key
        self._other_key = other_key
        self.seconds = seconds
        self.end_s = time.monotonic() + seconds
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.examples: dict[str, str] = {}  # of an outcome, the beginning of what was answered
        self.notes: dict[str, Any] = {}  # what a kind measures beside the others' times
        self._left = threading.Event()
        self._num_calls = 0
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    @property
    def left_s(self) -> float:
        """Seconds until the attack ends, a little more than none."""
        return 0.05 if self._left.is_set() else max(0.05, self.end_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self._left.is_set() or time.monotonic() >= self.end_s

    @property
    def is_under_way(self) -> bool:
        """Whether it has sent something that is still open, or was told something."""
        return bool(self._open or self.outcomes)

    def some(self, count: int) -> int:
        """So many, on a scale of 1."""
        return max(1, int(count * self._scale))

    def may_go_on(self) -> bool:
        """Whether there may be one more call, which is counted."""
        with self._lock:
            self._num_calls += 1
            return not self.is_over and self._num_calls <= MOST_CALLS

    def spread(self, threads: int, act: Callable[[], object]) -> None:
        """Repeats `act` on so many threads until the end, and waits for it.

        Refusals that come at once are not asked for without a pause: the attacker's own work is not what is measured.
        """

        def work() -> None:
            while self.may_go_on():
                begun_s = time.monotonic()
                act()
                self._left.wait(max(0.0, min(self.left_s, PACE_S - (time.monotonic() - begun_s))))

        workers = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
        for worker in workers:
            worker.start()
        while not self.is_over and any(worker.is_alive() for worker in workers):
            self._left.wait(0.05)

    def pause(self, seconds: float) -> None:
        """Waits for so long, or until the end."""
        self._left.wait(min(seconds, self.left_s))

    def wait(self) -> None:
        """Until the end, with everything as it is."""
        self._left.wait(self.left_s)

    def count(self, outcome: str, text: str = "") -> None:
        """Notes how a call ended."""
        with self._lock:
            self.outcomes[outcome] += 1
            self.examples.setdefault(outcome, text[:200])

    def leave(self) -> None:
        """Ends the attack: closes every connection."""
        self._left.set()
        with self._lock:
            gone, self._open = self._open, set()
        for raw in gone:
            with contextlib.suppress(OSError):
                raw.shutdown(socket.SHUT_RDWR)
            raw.close()

    # ---- HTTP --------------------------------------------------------------------------------------------------------

    def connect(self) -> socket.socket:
        """A connection, which is closed when the attacker leaves. Raises OSError."""
        raw = socket.create_connection((HOST, self._http_port), timeout=self.left_s)
        with self._lock:
            self._open.add(raw)
            assert len(self._open) <= MOST_CONNECTIONS
        if self.is_over:  # it left meanwhile
            self.close(raw)
            raise TimeoutError
        return raw

    def close(self, raw: socket.socket) -> None:
        """Closes one connection."""
        with self._lock:
            self._open.discard(raw)
        raw.close()

    def head(self, path: str, length: int | None, kind: str = "application/json") -> bytes:
        """The head of a POST. `length`: None for a body in chunks."""
        size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        lines = f"POST {path} HTTP/1.1", f"host: {HOST}", f"authorization: Bearer {self.key}", f"content-type: {kind}"
        return "\r\n".join((*lines, size, "", "")).encode()

    def send(self, path: str, body: Mapping[str, Any] | bytes) -> socket.socket | None:
        """Sends a whole request and reads nothing. None where the server has closed the connection."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            raw = self.connect()
            raw.sendall(self.head(path, len(data)) + data)
        except OSError as error:
            self.count(type(error).__name__)
            return None
        return raw

    def post(self, path: str, body: Mapping[str, Any] | bytes, kind: str = "application/json") -> bytes:
        """Sends a request and reads its answer, for as long as the attack lasts. Empty where there was none."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        raw, found = None, b""
        try:
            raw = self.connect()
            raw.sendall(self.head(path, len(data), kind) + data)
            answer = http.client.HTTPResponse(raw, method="POST")
            answer.begin()
            size = 0
            while chunk := answer.read(2**20):
                found = found or chunk
                size += len(chunk)
                if size > MOST_READ:
                    break
            found = found if size == len(found) else found + b" ..."
            self.count(str(answer.status), found.decode(errors="replace"))
        except (OSError, http.client.HTTPException, ValueError) as error:
            in_time = not isinstance(error, TimeoutError) and not self.is_over
            self.count(type(error).__name__ if in_time else "no answer until the end")
        finally:
            if raw is not None:
                self.close(raw)
        return found

    def call_head(self, method: str, path: str, *lines: str) -> bytes:
        """The head of a call without a body. `lines`: further headers."""
        first = f"{method} {path} HTTP/1.1", f"host: {HOST}", f"authorization: Bearer {self.key}"
        return "\r\n".join((*first, *lines, "", "")).encode()

    def talk(self, data: bytes, method: str = "GET") -> bytes:
        """Sends these bytes and reads one answer, of a call of this method; empty where there was none."""
        raw, found = None, b""
        try:
            raw = self.connect()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the answer came before the end
                raw.sendall(data)
            answer = http.client.HTTPResponse(raw, method=method)
            answer.begin()
            found = answer.read(2**20)
            self.count(str(answer.status), found.decode(errors="replace"))
        except (OSError, http.client.HTTPException, ValueError) as error:
            in_time = not isinstance(error, TimeoutError) and not self.is_over
            self.count(type(error).__name__ if in_time else "no answer until the end")
        finally:
            if raw is not None:
                self.close(raw)
        return found

    def upload(self, data: bytes) -> str:
        """A file of requests for a batch; its id, or "" where it was refused."""
        mark = uuid.uuid4().hex
        part = f'--{mark}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{mark}\r\n'
        part += 'content-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        body = part.encode() + data + f"\r\n--{mark}--\r\n".encode()
        return self._id(self.post("/v1/files", body, f"multipart/form-data; boundary={mark}"))

    def batch(self, *lines: Mapping[str, Any], **fields: Any) -> str:
        """A batch of these bodies of completions; its id, or "" where it was refused."""
        texts = [
            json.dumps({"custom_id": str(k), "method": "POST", "url": COMPLETIONS, "body": body})
            for k, body in enumerate(lines)
        ]
        file = self.upload("\n".join(texts).encode())
        made = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h", **fields}
        return self._id(self.post("/v1/batches", made)) if file else ""

    @staticmethod
    def _id(answer: bytes) -> str:
        with contextlib.suppress(ValueError):
            return str(json.loads(answer).get("id", ""))
        return ""

    # ---- gRPC --------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def metadata(self) -> list[tuple[str, str]]:
        """Of each gRPC call."""
        return [("authorization", f"Bearer {self.key}")]

    @contextlib.contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        """A gRPC connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        with grpc.insecure_channel(f"{HOST}:{self._grpc_port}", options) as channel:
            yield channel

    def call(self, channel: grpc.Channel, method: str, message: Any) -> None:
        """One call, whose answers are read."""
        path, body = f"/jaxserve.v1.Inference/{method}", message.SerializeToString()
        try:
            if method == "Generate":
                for _ in channel.unary_stream(path)(body, timeout=self.left_s, metadata=self.metadata):
                    pass
            else:
                channel.unary_unary(path)(body, timeout=self.left_s, metadata=self.metadata)
        except (grpc.RpcError, ValueError) as error:  # a ValueError: the channel was closed
            code = error.code().name if isinstance(error, grpc.Call) else type(error).__name__
            self.count(code, error.details() or "" if isinstance(error, grpc.Call) else str(error))
        else:
            self.count("OK")

    # ---- the other caller --------------------------------------------------------------------------------------------

    def as_other(self) -> "Attacker":
        """The other key, with the same time, for what a kind measures beside chats."""
        return Attacker(self._http_port, self._grpc_port, self._other_key, self.key, self.left_s, self._scale)

    def afterwards(self) -> "Attacker":
        """The same key, with some more seconds, for what a kind puts in order."""
        return Attacker(self._http_port, self._grpc_port, self.key, self._other_key, 10.0, self._scale)

    def get(self, path: str) -> dict[str, Any]:
        """What a GET of JSON gives, {} where it fails."""
        connection = http.client.HTTPConnection(HOST, self._http_port, timeout=self.left_s)
        try:
            connection.request("GET", path, headers={"authorization": f"Bearer {self.key}"})
            return json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError):
            return {}
        finally:
            connection.close()


@dataclasses.dataclass(frozen=True)
class Kind:
    """`shows`: in a few words, what would be hurt. `server`: which one it needs. `attack` ends with its time."""

    name: str
    shows: str
    server: Literal["text", "vision"]
    attack: Callable[[Attacker], None]


KINDS: dict[str, Kind] = {}


def kind(shows: str, server: Literal["text", "vision"] = "text") -> Callable[[Callable[[Attacker], None]], Kind]:
    """Puts a function into the table under its own name."""

    def add(attack: Callable[[Attacker], None]) -> Kind:
        made = Kind(attack.__name__, shows, server, attack)
        KINDS[made.name] = made
        return made

    return add


# ---- pictures --------------------------------------------------------------------------------------------------------


def jpeg_of_scans(side: int, scans: int) -> bytes:
    """A progressive JPEG of one colour with `scans` empty scans, of which each costs a pass over all blocks."""
    blocks = ((side + 7) // 8) ** 2
    full = blocks // 32767
    rest = blocks - full * 32767
    assert rest >= 16384, "of the codes for runs of empty blocks only the longest is in the table"
    bits = ("0" + "1" * 14) * full + "0" + format(rest - 16384, "014b")
    bits += "1" * (-len(bits) % 8)
    data = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")

    def table(number: bytes, symbol: bytes) -> bytes:
        return b"\xff\xc4" + struct.pack(">H", 20) + number + b"\x01" + b"\0" * 15 + symbol

    def scan(tail: bytes, rows: bytes) -> bytes:
        return b"\xff\xda\0\x08\x01\x01\0" + tail + rows

    frame = b"\xff\xc2" + struct.pack(">HBHHB", 11, 8, side, side, 1) + b"\1\x11\0"
    head = b"\xff\xd8\xff\xdb\0\x43\0" + b"\1" * 64 + frame + table(b"\0", b"\0") + table(b"\x10", b"\xe0")
    first = scan(b"\0\0\0", b"\0" * (blocks // 8 + 1)) + scan(b"\1\x3f\1", data)
    return head + first + scan(b"\1\x3f\x10", data) * scans + b"\xff\xd9"


def png_of_zeros(width: int, height: int) -> bytes:
    """A black PNG, which has a thousandth of the bytes of its pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    packer = zlib.compressobj(9)
    rows = b"".join([*(packer.compress(b"\0" * (1 + 3 * width)) for _ in range(height)), packer.flush()])
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def of_pictures(*pictures: tuple[str, bytes]) -> dict[str, Any]:
    """A chat that shows pictures, each a media type and a file."""
    urls = [f"data:{media};base64,{base64.b64encode(data).decode()}" for media, data in pictures]
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {
        "messages": [{"role": "user", "content": [*content, {"type": "text", "text": "what?"}]}],
        "max_tokens": 4,
    }


@kind("decoding of a picture without a bound of time", "vision")
def jpeg_scans(by: Attacker) -> None:
    sizes = (7071, 40_000), (7071, 40_000), (7071, 200), (2000, 400), (1200, 40_000)
    bodies = [
        json.dumps(of_pictures(("image/jpeg", jpeg_of_scans(size[0], by.some(size[1]))))).encode() for size in sizes
    ]
    turns = itertools.cycle(bodies)
    by.spread(4, lambda: by.post(CHATS, next(turns)))


@kind("pictures of 25 megapixels, 16 in a request", "vision")
def png_megapixels(by: Attacker) -> None:
    one = "image/png", png_of_zeros(by.some(5000), 5000)
    bodies = [json.dumps(of_pictures(*[one] * count)).encode() for count in (1, 16)]
    turns = itertools.cycle(bodies)
    by.spread(4, lambda: by.post(CHATS, next(turns)))


# ---- work of the encoder ---------------------------------------------------------------------------------------------


@kind("texts of 4 MB to encode, 8 at a time")
def tokenize(by: Attacker) -> None:
    body = json.dumps({"prompt": "ab " * by.some(1_390_000)}).encode()
    by.spread(8, lambda: by.post("/tokenize", body))


@kind("texts of 4 MB to encode over gRPC, 24 at a time")
def grpc_tokenize(by: Attacker) -> None:
    message = pb.TokenizeRequest(text="ab " * by.some(1_390_000))
    with by.channel() as channel:
        by.spread(24, lambda: by.call(channel, "Tokenize", message))


@kind("a conversation of 60,000 messages")
def long_chat(by: Attacker) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "a"}] * by.some(60_000), "max_tokens": 1}).encode()
    by.spread(4, lambda: by.post(CHATS, body))


@kind("arguments of a tool call that are 4 MB of empty lists")
def tool_arguments(by: Attacker) -> None:
    arguments = '{"a": [' + ",".join(["[]"] * by.some(1_200_000)) + "]}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "1", "content": "b"}]
    body = json.dumps({"messages": messages, "max_tokens": 1}).encode()
    by.spread(2, lambda: by.post(CHATS, body))


@kind("bodies that are lists of empty lists, and lists in lists")
def nested_json(by: Attacker) -> None:
    flat = b'{"prompt": "a", "max_tokens": 1, "metadata": {"a": [' + b",".join([b"[]"] * by.some(1_300_000)) + b"]}}"
    deep = b'{"prompt": "a", "metadata": ' + b"[" * by.some(2_000_000) + b"]" * by.some(2_000_000) + b"}"
    turns = itertools.cycle((flat, deep))
    by.spread(4, lambda: by.post(COMPLETIONS, next(turns)))


# ---- work of each step -----------------------------------------------------------------------------------------------


@kind("stop strings, which are looked for after each token")
def stop_strings(by: Attacker) -> None:
    asked = {"prompt": "a", "max_tokens": by.some(200), "ignore_eos": True, "n": 16}
    many = json.dumps({**asked, "stop": [f"\1{k}" for k in range(by.some(16_384))]}).encode()
    few = json.dumps({**asked, "stop": [chr(0x4E00 + k) * by.some(100_000) for k in range(4)]}).encode()
    turns = itertools.cycle((many, few))
    by.spread(4, lambda: by.post(COMPLETIONS, next(turns)))


@kind("grammars that are large or explode, another one each time")
def grammars(by: Attacker) -> None:
    numbers = itertools.count(1)

    def ask_one() -> None:
        k = next(numbers)
        forms = (
            {"regex": f"((a{{1,{900 + k}}}){{1,900}}b){{1,900}}"},
            {"regex": "(a|aa)*" * (100 + k)},
            {"regex": f"(.*a.{{{200 + k}}})"},
            {"json": {"type": "array", "items": {"type": "string", "pattern": f"^([a-z]+)*{k}$"}, "maxItems": 100_000}},
            {"json": {"enum": [f"{k}-{j}" * 4 for j in range(by.some(20_000))]}},
            {"json": nested_schema(14, k)},
            {"choice": [f"{k} {j}" for j in range(by.some(20_000))]},
            {
                "grammar": "start: "
                + " ".join(f"a{j}?" for j in range(400))
                + "".join(f'\na{j}: "x{k}"' for j in range(400))
            },
        )
        by.post(COMPLETIONS, {"prompt": "a", "max_tokens": 20, "structured_outputs": forms[k % len(forms)]})

    by.spread(4, ask_one)


def nested_schema(depth: int, number: int) -> dict[str, Any]:
    """A schema with 2 to the power of `depth` leaves."""
    if depth == 0:
        return {"type": "string", "maxLength": 20 + number}
    half = nested_schema(depth - 1, number)
    return {"type": "object", "properties": {"a": half, "b": half}, "required": ["a", "b"]}


@kind("log-probabilities of 128 answers of one prompt")
def logprobs_of_many(by: Attacker) -> None:
    body = {"prompt": "a", "n": 128, "max_tokens": by.some(900), "ignore_eos": True, "logprobs": 20}
    by.spread(1, lambda: by.post(COMPLETIONS, body))


@kind("log-probabilities of the tokens of 32 long prompts")
def prompt_logprobs(by: Attacker) -> None:
    prompts = [[100 + (k + j) % 150 for j in range(1000)] for k in range(by.some(32))]
    body = {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 20}
    by.spread(2, lambda: by.post(COMPLETIONS, body))


@kind("an echoed prompt of 1,000 tokens, 128 times")
def echo(by: Attacker) -> None:
    body = {"prompt": [100 + k % 150 for k in range(1000)], "n": 128, "max_tokens": 1, "echo": True, "logprobs": 20}
    by.spread(1, lambda: by.post(COMPLETIONS, body))


@kind("bad words, biases and allowed tokens as many as a body holds")
def large_sampling(by: Attacker) -> None:
    asked = {"prompt": "a", "n": 16, "max_tokens": by.some(100), "ignore_eos": True}
    bodies = [
        {**asked, "logit_bias": {str(k): 1.0 for k in range(by.some(200_000))}},
        {**asked, "allowed_token_ids": [k % 300 for k in range(by.some(800_000))]},
        {**asked, "bad_words": [f"w{k}" for k in range(by.some(200_000))]},
        {**asked, "bad_words": ["ab" * by.some(20_000)] * 32},
        {**asked, "stop_token_ids": [*range(by.some(400_000))]},
    ]
    turns = itertools.cycle([json.dumps(body).encode() for body in bodies])
    by.spread(4, lambda: by.post(COMPLETIONS, next(turns)))


@kind("60,000 tools, which the template puts into the prompt, and arguments of the template")
def many_tools(by: Attacker) -> None:
    messages = [{"role": "user", "content": "a"}]
    tools = [{"type": "function", "function": {"name": f"f{k}"}} for k in range(by.some(60_000))]
    kwargs = {"a": ["x"] * by.some(400_000), "b": {str(k): k for k in range(by.some(100_000))}}
    bodies = [
        {"messages": messages, "max_tokens": 1, "tools": tools[: len(tools) // 4]},
        {"messages": messages, "max_tokens": 1, "tools": tools, "tool_choice": "required"},
        {"messages": messages, "max_tokens": 1, "chat_template_kwargs": kwargs},
    ]
    turns = itertools.cycle([json.dumps(body).encode() for body in bodies])
    by.spread(4, lambda: by.post(CHATS, next(turns)))


@kind("schemas whose references double at each step, or go on for long")
def schema_references(by: Attacker) -> None:
    numbers = itertools.count(1)

    def ask_one() -> None:
        k = next(numbers)
        depth = by.some(20_000) if k % 2 else 24
        names = [f"d{k}x{j}" for j in range(depth)]
        definitions: dict[str, Any] = {names[-1]: {"type": "integer"}}
        for name, below in itertools.pairwise(names):
            to = {"$ref": f"#/$defs/{below}"}
            one = {"type": "object", "properties": {"a": to, "b": to}, "required": ["a", "b"]}
            definitions[name] = to if k % 2 else one
        schema = {"$ref": f"#/$defs/{names[0]}", "$defs": definitions}
        by.post(COMPLETIONS, {"prompt": "a", "max_tokens": 20, "structured_outputs": {"json": schema}})

    by.spread(4, ask_one)


@kind("a word of a million letters to encode, and a million ids to decode")
def one_word(by: Attacker) -> None:
    bodies = [
        ("/tokenize", {"prompt": "a" * by.some(1_000_000)}),
        ("/tokenize", {"prompt": "\u4e00" * by.some(600_000)}),
        ("/tokenize", {"prompt": "1 \n" * by.some(300_000)}),
        ("/detokenize", {"tokens": [97] * by.some(1_000_000)}),
    ]
    turns = itertools.cycle([(path, json.dumps(body).encode()) for path, body in bodies])
    by.spread(8, lambda: by.post(*next(turns)))


@kind("2,048 inputs to embed, and 2,048 documents to compare")
def many_inputs(by: Attacker) -> None:
    texts = [f"{k} " + "a b c " * 20 for k in range(by.some(2048))]
    bodies = [
        ("/v1/embeddings", {"input": texts}),
        ("/v1/embeddings", {"input": [[100 + k % 150 for k in range(900)]] * by.some(800)}),
        ("/v1/rerank", {"query": "a", "documents": texts}),
    ]
    turns = itertools.cycle([(path, json.dumps(body).encode()) for path, body in bodies])
    by.spread(4, lambda: by.post(*next(turns)))


# ---- places in the queue ---------------------------------------------------------------------------------------------


@kind("4,096 sequences, which are all that may wait")
def queue(by: Attacker) -> None:
    for _ in range(4):
        by.send(COMPLETIONS, {"prompt": ["a"] * 32, "n": 128, "max_tokens": by.some(1000), "ignore_eos": True})
    by.spread(2, lambda: by.post(COMPLETIONS, {"prompt": ["a"] * 32, "n": 128, "max_tokens": by.some(1000)}))


@kind("300 streams with log-probabilities that nobody reads")
def unread_streams(by: Attacker) -> None:
    body = {"prompt": "a", "max_tokens": by.some(900), "ignore_eos": True, "stream": True, "logprobs": 20}
    for _ in range(by.some(300)):
        if not by.may_go_on():
            break
        by.send(COMPLETIONS, body)
    by.wait()


@kind("requests that are left as soon as they are sent")
def aborts(by: Attacker) -> None:
    body = {"prompt": "a", "n": 8, "max_tokens": by.some(500), "ignore_eos": True, "stream": True}

    def come_and_go() -> None:
        raw = by.send(COMPLETIONS, body)
        if raw is not None:
            by.count("left")
            by.close(raw)

    by.spread(8, come_and_go)


@kind("4,096 ids to abort over gRPC, and streams that are cancelled")
def grpc_aborts(by: Attacker) -> None:
    message = pb.AbortRequest(request_ids=[f"{k:0250d}" for k in range(4096)])
    body = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=by.some(500))).SerializeToString()

    with by.channel() as channel:

        def come_and_go() -> None:
            path = "/jaxserve.v1.Inference/Generate"
            with contextlib.suppress(ValueError):  # the attack is over, and the channel closed
                channel.unary_stream(path)(body, timeout=by.left_s, metadata=by.metadata).cancel()
            by.call(channel, "Abort", message)

        by.spread(8, come_and_go)


@kind("a tenant of its own for every request")
def tenants(by: Attacker) -> None:
    by.spread(8, lambda: by.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "user": uuid.uuid4().hex * 100}))


@kind("names of models and adapters that there are not, and paths")
def unknown_names(by: Attacker) -> None:
    def ask_one() -> None:
        name = uuid.uuid4().hex * 100
        by.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "model": name})
        by.post(f"/v1/{name}", {})
        by.get(f"/v1/files/..%2f{name[:64]}")
        by.get(f"/v1/models/{name}")

    by.spread(8, ask_one)


# ---- bytes -----------------------------------------------------------------------------------------------------------


@kind("five uploads that miss their last byte, which fill the room of all bodies")
def bodies_held(by: Attacker) -> None:
    def hold(size: int) -> None:
        try:
            raw = by.connect()
            raw.sendall(by.head("/v1/files", size, "multipart/form-data; boundary=x"))
            block = b"x" * 2**20
            for start in range(0, size - 1, len(block)):
                raw.sendall(block[: size - 1 - start])
            by.count("held")
            answer = raw.recv(4096)
            by.count(answer[9:12].decode() or "closed", answer.partition(b"\r\n\r\n")[2].decode(errors="replace"))
        except OSError as error:
            by.count("held until the end" if isinstance(error, TimeoutError) else type(error).__name__)

    sizes = itertools.cycle([*[by.some(62_000_000)] * 4, by.some(20_435_406)])
    by.spread(5, lambda: hold(next(sizes)))


@kind("64 unread streams whose bodies of 4 MB count until they end")
def metadata(by: Attacker) -> None:
    body = {"prompt": "a", "max_tokens": by.some(1000), "ignore_eos": True, "stream": True, "logprobs": 20}
    data = json.dumps({**body, "metadata": {"a": "x" * by.some(4_190_000)}}).encode()
    for _ in range(65):
        if not by.may_go_on():
            break
        by.send(COMPLETIONS, data)
    by.wait()


@kind("a gRPC message of 4 MB, 64 at a time")
def grpc_messages(by: Attacker) -> None:
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7] * by.some(4_100_000)))
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="a")] * by.some(350_000))
    turns = itertools.cycle((ids, pb.GenerateRequest(chat=chat)))
    with by.channel() as channel:
        by.spread(64, lambda: by.call(channel, "Generate", next(turns)))


@kind("answers of 3 MB to keep")
def stored_responses(by: Attacker) -> None:
    body = json.dumps(
        {"input": "a", "instructions": "", "metadata": {"a": "x" * 400}, "max_output_tokens": 16}
    ).encode()
    large = json.dumps({"input": "a b " * by.some(700_000), "max_output_tokens": 16, "truncation": "auto"}).encode()
    turns = itertools.cycle((body, body, body, large))
    by.spread(4, lambda: by.post("/v1/responses", next(turns)))


# ---- connections -----------------------------------------------------------------------------------------------------


@kind("200 bodies that come a byte at a time")
def slow_uploads(by: Attacker) -> None:
    raws = []
    for k in range(by.some(200)):
        with contextlib.suppress(OSError):
            raws.append(by.connect())
            raws[-1].sendall(by.head(COMPLETIONS, None if k % 2 else 1000))
    while not by.is_over:
        for k, raw in enumerate(raws):
            with contextlib.suppress(OSError):
                raw.sendall(b"1\r\nx\r\n" if k % 2 else b"x")
        by.pause(0.5)


@kind("streams whose clients have closed their half of the connection")
def half_closed(by: Attacker) -> None:
    body = {"prompt": "a", "max_tokens": by.some(900), "ignore_eos": True, "stream": True}

    def one() -> None:
        raw = by.send(COMPLETIONS, body)
        if raw is not None:
            with contextlib.suppress(OSError):
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(65536):
                    pass
            by.count("ended")
            by.close(raw)

    by.spread(by.some(50), one)


@kind("1,000 connections that say nothing")
def connections(by: Attacker) -> None:
    for _ in range(by.some(MOST_CONNECTIONS)):
        try:
            by.connect()
        except OSError as error:
            by.count(type(error).__name__)
            break
        by.count("open")
    by.wait()


@kind("heads of 60 kB: one header, or thousands of them")
def headers(by: Attacker) -> None:
    heads = [
        by.call_head("GET", "/v1/models", "x-a: " + "x" * by.some(60_000)),
        by.call_head("GET", "/v1/models", *(f"x-{k}: y" for k in range(by.some(6000)))),
        by.call_head("GET", "/v1/models", *["x-request-id: " + "x" * 256] * by.some(200)),
        by.call_head("GET", "/v1/models", "cookie: " + "a=b; " * by.some(12_000), "traceparent: " + "0" * 1000),
        by.call_head("GET", "/v1/models", "x-a: " + "x" * by.some(500_000)),
    ]
    turns = itertools.cycle(heads)
    by.spread(8, lambda: by.talk(next(turns)))


@kind("paths and queries of 15 kB, and names and ids as long as a body")
def long_names(by: Attacker) -> None:
    size = by.some(15_000)
    paths = [
        f"/v1/responses/{'x' * size}",
        f"/v1/files/file-{'0' * size}/content",
        f"/v1/models/{'a/' * (size // 2)}",
        f"/v1/batches?after={'x' * size}",
        f"/v1/files?{'limit=1&' * (size // 8)}",
        f"/v1/files?purpose={'%41' * (size // 3)}",
        f"/{'%2e%2e/' * (size // 7)}",
    ]
    long = "x" * by.some(3_000_000)
    asked = {"prompt": "a", "max_tokens": 1}
    bodies = [json.dumps({**asked, name: long}).encode() for name in ("model", "user", "request_id", "cache_salt")]
    heads, texts = itertools.cycle([by.call_head("GET", path) for path in paths]), itertools.cycle(bodies)

    def ask_both() -> None:
        by.talk(next(heads))
        by.post(COMPLETIONS, next(texts))

    by.spread(8, ask_both)


@kind("HEAD, OPTIONS, Range and methods that there are not, on every route")
def methods(by: Attacker) -> None:
    file = by.upload(b"x" * by.some(1_000_000))
    paths = [path.replace("{file_id}", file) for path in by.get("/openapi.json").get("paths", {})]
    ranges = "range: bytes=" + ",".join(f"{k}-{k + 1}" for k in range(0, by.some(10_000), 4))
    calls = [(method, path) for path in paths for method in ("HEAD", "OPTIONS", "TRACE", "PROPFIND", "DELETE")]
    turns = itertools.cycle([*calls, ("GET", f"/v1/files/{file}/content")] if file else calls)

    def ask_one() -> None:
        method, path = next(turns)
        if method == "DELETE" and file and file in path:
            method = "PATCH"
        by.talk(by.call_head(method, path, "content-length: 0", ranges), method)

    by.spread(8, ask_one)


@kind("large answers that nobody reads: echoes, vectors, and the content of files")
def unread_answers(by: Attacker) -> None:
    file = by.upload(b"x" * by.some(20_000_000))
    echo = {"prompt": [100 + k % 150 for k in range(by.some(1000))], "n": 16, "max_tokens": 1, "echo": True}
    for k in range(by.some(300)):
        if not by.may_go_on():
            break
        if k % 3 == 0 and file:
            with contextlib.suppress(OSError):
                by.connect().sendall(by.call_head("GET", f"/v1/files/{file}/content"))
        elif k % 3 == 1:
            by.send(COMPLETIONS, {**echo, "logprobs": 20})
        else:
            by.send("/v1/embeddings", {"input": ["a"] * by.some(2048)})
    by.wait()


@kind("offers of another protocol: WebSocket, and HTTP/2")
def upgrades(by: Attacker) -> None:
    socket_lines = "connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: YQ=="
    heads = [
        by.call_head("GET", "/v1/models", *socket_lines),
        by.call_head("GET", "/live", *socket_lines),
        by.call_head("GET", "/v1/models", "connection: upgrade, http2-settings", "upgrade: h2c", "http2-settings: AA"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 1000,
        b"CONNECT example.com:80 HTTP/1.1\r\nhost: example.com\r\n\r\n",
    ]
    turns = itertools.cycle(heads)
    by.spread(8, lambda: by.talk(next(turns)))


@kind("10,000 requests on one connection, sent before the first answer")
def pipelined(by: Attacker) -> None:
    one = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    data = (by.head(COMPLETIONS, len(one)) + one) * by.some(10_000)
    gets = by.call_head("GET", "/v1/models") * by.some(10_000)
    turns = itertools.cycle((data, gets))
    by.spread(4, lambda: by.talk(next(turns)))


@kind("heads that wait for 100 Continue, and send no body")
def expects(by: Attacker) -> None:
    for _ in range(by.some(500)):
        try:
            raw = by.connect()
            raw.sendall(by.head(COMPLETIONS, 1000)[:-2] + b"expect: 100-continue\r\n\r\n")
        except OSError as error:
            by.count(type(error).__name__)
            break
        by.count("open")
    by.wait()


@kind("bodies in chunks of one byte")
def tiny_chunks(by: Attacker) -> None:
    body = json.dumps({"prompt": "a" * by.some(500_000), "max_tokens": 1})
    data = by.head(COMPLETIONS, None) + b"1\r\n" + "\r\n1\r\n".join(body).encode() + b"\r\n0\r\n\r\n"
    by.spread(4, lambda: by.talk(data, "POST"))


@kind("bodies that are compressed, a thousandth of their size")
def compressed(by: Attacker) -> None:
    text = b'{"max_tokens": 1, "prompt": "' + b"a" * by.some(30_000_000) + b'"}'
    packer = zlib.compressobj(9, wbits=31)
    body = packer.compress(text) + packer.flush()
    turns = itertools.cycle(("gzip", "deflate", "br", "gzip, gzip", "identity"))

    def ask_one() -> None:
        head = by.head(COMPLETIONS, len(body))[:-2] + f"content-encoding: {next(turns)}\r\n\r\n".encode()
        by.talk(head + body, "POST")

    by.spread(4, ask_one)


@kind("JSON of huge numbers, deep lists, names that repeat, and halves of characters")
def odd_json(by: Attacker) -> None:
    digits = "9" * by.some(3_000_000)
    ask = '{"prompt": "a", "max_tokens": 1, %s}'
    texts = [
        ask % f'"seed": {digits}',
        ask % f'"max_tokens": -{digits}',
        *(ask % f'"{name}": {digits[:4000]}' for name in ("seed", "max_tokens", "top_k", "priority", "logprobs", "n")),
        ask % f'"stop_token_ids": [{digits[:4000]}], "logit_bias": {{"{digits[:4000]}": 1}}',
        f'{{"prompt": [{digits[:4000]}], "max_tokens": 1}}',
        ask % f'"temperature": {digits}.{digits[:100]}',
        ask % f'"temperature": 1e{digits[:1000]}',
        ask % f'"temperature": 0.{"0" * by.some(3_000_000)}1',
        ask % f'"logit_bias": {{"{digits[:100_000]}": 1}}',
        ask % f'"stop_token_ids": [{digits[:100_000]}]',
        ask % f'"metadata": {{{",".join([chr(34) + "a" + chr(34) + ":1"] * by.some(400_000))}}}',
        ask % f'"metadata": {"[" * by.some(1_000_000)}',
        ask % '"user": "\\ud800", "cache_salt": "\\udfff"',
        ask % '"\\ud800": 1',
        ask % f'"user": "{chr(92)}u0000{chr(92)}u202e"',
        f'{{"prompt": [{digits[:100_000]}], "max_tokens": 1}}',
    ]
    turns = itertools.cycle([text.encode() for text in texts])
    by.spread(4, lambda: by.post(COMPLETIONS, next(turns)))


@kind("forms of thousands of parts, and parts that never end")
def form_parts(by: Attacker) -> None:
    head = b'--x\r\ncontent-disposition: form-data; name="%b"; filename="%d"\r\n\r\n'
    forms = [
        b"".join(head % (b"file", k) + b"a\r\n" for k in range(by.some(200_000))) + b"--x--\r\n",
        b"".join(head.replace(b"; filename", b"; a") % (b"a", k) + b"\r\n" for k in range(by.some(200_000))),
        head % (b"file", 1) + b"\r\n--" * by.some(2_000_000),
        b"--x\r\n" + b"a: b\r\n" * by.some(2_000_000),
        b"--x\r\ncontent-disposition: form-data; " + b'name="a"; ' * by.some(1_000_000) + b"\r\n\r\n",
        b"\r\n" * by.some(5_000_000),
    ]
    turns = itertools.cycle(forms)
    by.spread(4, lambda: by.post("/v1/files", next(turns), "multipart/form-data; boundary=x"))


# ---- batches ---------------------------------------------------------------------------------------------------------


@kind("a line of a batch with 24 MB of empty lists")
def batch_line(by: Attacker) -> None:
    lists = ",".join(["[]"] * by.some(8_000_000))
    text = '{"custom_id":"1","method":"POST","url":"/v1/completions","body":{"prompt":"a","max_tokens":1,"metadata":'
    file = by.upload((text + '{"a":[' + lists + "]}}}").encode())
    if file:
        by.post("/v1/batches", {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"})
    by.wait()


@kind("a batch that runs for long, and that of another key behind it")
def batches_wait(by: Attacker) -> None:
    body = {"prompt": "a", "max_tokens": by.some(1000), "ignore_eos": True, "user": "slow"}
    mine = by.batch(*[body] * by.some(200), metadata={"a": "b"})
    other = by.as_other()
    begun_s = time.monotonic()
    theirs = other.batch({"prompt": "a", "max_tokens": 1})
    status = ""
    while not by.is_over and status != "completed":
        status = other.get(f"/v1/batches/{theirs}").get("status", "")
        by.pause(0.1)
    by.notes["the other key's batch"] = {"status": status, "seconds": round(time.monotonic() - begun_s, 1)}
    by.wait()
    by.afterwards().post(f"/v1/batches/{mine}/cancel", {})


@kind("files that are small, many of them, and lists of all")
def small_files(by: Attacker) -> None:
    def ask_one() -> None:
        by.upload(b'{"custom_id":"1","method":"POST","url":"/v1/completions","body":{"prompt":"a"}}')
        by.get("/v1/files?limit=10000")

    by.spread(16, ask_one)


@kind("lists of 2,000 files and of batches, in pages or whole, 16 at a time")
def lists(by: Attacker) -> None:
    made, file = {"endpoint": COMPLETIONS, "completion_window": "24h"}, ""
    for _ in range(by.some(2000)):
        if by.left_s < by.seconds / 2:
            break
        file = by.upload(b"x")
    for _ in range(by.some(100)):
        by.post("/v1/batches", {**made, "input_file_id": file})
    paths = [
        "/v1/files?limit=10000",
        "/v1/files?limit=1",
        f"/v1/files?after={file}&order=asc",
        "/v1/batches?limit=100",
        f"/v1/batches?after={file}",
        "/v1/responses/resp_1/input_items?limit=100",
    ]
    turns = itertools.cycle([by.call_head("GET", path) for path in paths])
    by.spread(16, lambda: by.talk(next(turns)))


@kind("descriptions of batches that are large, and many of them")
def batch_descriptions(by: Attacker) -> None:
    file = by.upload(b'{"custom_id":"1","method":"POST","url":"/v1/completions","body":{"prompt":"a"}}')
    made = {"input_file_id": file, "endpoint": "/v1/embeddings", "completion_window": "24h"}
    large = json.dumps({**made, "metadata": {"a": "x" * by.some(4_000_000)}}).encode()
    turns = itertools.cycle((large, json.dumps(made).encode()))
    by.spread(4, lambda: by.post("/v1/batches", next(turns)))


def run_kind(name: str, http_port: int, grpc_port: int, keys: tuple[str, str], seconds: float) -> dict[str, Any]:
    """Runs the attack of a kind with the first of the keys, and leaves. Returns what came of it."""
    by = Attacker(http_port, grpc_port, *keys, seconds)
    try:
        KINDS[name].attack(by)
    finally:
        by.leave()
    time.sleep(0.5)  # its threads see that, and count what they have waited for
    return {"outcomes": dict(by.outcomes), "examples": by.examples, **by.notes}
