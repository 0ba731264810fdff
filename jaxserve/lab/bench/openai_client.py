"""A client of any server with OpenAI's HTTP API: streamed completions and chat completions.

Nothing is retried, since retries would distort the measurement. A piece of output is an event with choices, as in
vLLM's `bench serve`; here an event of a chat that only names the role does not count, since servers send it before
there is a token.
"""

import contextlib
import json
import ssl
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from jaxserve.errors import ConfigError
from jaxserve.lab.bench.recording import Recording, RequestFailed
from jaxserve.lab.bench.serve_options import Endpoint
from jaxserve.lab.workloads.samples import Sample

_IDLE_S = 4.0  # servers commonly close idle connections after 5 s; a request on one of those is lost
_DETAIL = 300


class OpenAIClient:
    """One session with one server. Belongs to the event loop on which it was made."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Raises ConfigError for a file of authorities that cannot be used."""
        self._endpoint = endpoint
        self._chat = endpoint.backend == "openai-chat"
        self._url = endpoint.url.rstrip("/").removesuffix("/v1")
        self._path = f"{self._url}/v1/{'chat/' if self._chat else ''}completions"
        self._model = endpoint.model
        headers = {"Content-Type": "application/json"}
        if endpoint.api_key is not None:
            headers["Authorization"] = f"Bearer {endpoint.api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S, ssl=_context(endpoint.ca_file)),
            timeout=aiohttp.ClientTimeout(total=None),  # `load` has the limit
            headers=headers,
            read_bufsize=2**20,
        )

    async def describe(self, timeout_s: float) -> dict[str, str]:
        """See `LoadClient.describe`. Takes the first model that the server names, unless one was given."""
        known: dict[str, str] = {}
        if self._model is None:
            try:
                self._model = str((await self._ask("/v1/models", timeout_s))["data"][0]["id"])
            except (KeyError, IndexError, TypeError) as error:
                raise ConfigError(f"{self._url}/v1/models names no model; give --model NAME") from error
        with contextlib.suppress(ConfigError, KeyError, TypeError):  # not part of OpenAI's API, and only for the record
            known["version"] = str((await self._ask("/version", timeout_s))["version"])
        return {"model": self._model, **known}

    async def count_tokens(self, text: str, *, with_added: bool, timeout_s: float) -> int | None:
        """See `LoadClient.count_tokens`. OpenAI's API has no such route; several servers have vLLM's.

        A chat has nothing added but the text of its template, whose length depends on the chat.
        """
        body = {"model": self._model, "prompt": text, "add_special_tokens": with_added and not self._chat}
        try:
            count = (await self._ask("/tokenize", timeout_s, body))["count"]
        except (ConfigError, KeyError, TypeError):
            return None
        return count if isinstance(count, int) and count > 0 else None

    async def _ask(self, path: str, timeout_s: float, body: Mapping[str, Any] | None = None) -> Any:
        url, timeout = self._url + path, aiohttp.ClientTimeout(total=timeout_s)
        method = "GET" if body is None else "POST"
        try:
            async with self._session.request(method, url, json=body, timeout=timeout) as response:
                answer = await response.read()
                if response.status != 200:
                    raise ConfigError(f"{url} answers with HTTP {response.status}: {_message(answer)}")
                return json.loads(answer)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ConfigError(
                f"{url} does not answer: {error or 'time is up'}; is the server running there?"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{url} does not answer in JSON: {error}") from error

    async def send(self, sample: Sample, recording: Recording) -> None:
        """See `LoadClient.send`."""
        body = json.dumps(self._body(sample)).encode()
        recording.start()
        try:
            async with self._session.post(self._path, data=body) as response:
                if response.status != 200:
                    raise RequestFailed(f"HTTP {response.status}", _message(await response.read()))
                await _read_stream(response, recording)
        except aiohttp.ClientConnectorError as error:
            raise RequestFailed("cannot connect", str(error)) from error
        except aiohttp.ClientError as error:
            raise RequestFailed("connection lost", f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Closes the connections."""
        await self._session.close()

    def _body(self, sample: Sample) -> dict[str, Any]:
        assert self._model is not None, "`describe` comes first"
        body: dict[str, Any] = {"model": self._model}
        prompt = sample.prompt
        if self._chat:
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            body["max_completion_tokens"] = sample.output_len
        else:
            body["prompt"] = prompt
            body["max_tokens"] = sample.output_len
        if self._endpoint.temperature is not None:
            body["temperature"] = self._endpoint.temperature
        if self._endpoint.ignore_eos:
            body["ignore_eos"] = True
        return body | {"stream": True, "stream_options": {"include_usage": True}} | dict(self._endpoint.extra)


def _context(ca_file: Path | None) -> ssl.SSLContext | bool:
    try:
        return True if ca_file is None else ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use --ca-file {ca_file}: {error}") from error


class EventReader:
    """Cuts a byte stream into the data of server-sent events. Mutated by `feed`."""

    def __init__(self) -> None:
        self._line = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The data of each event that is now complete. Comments and other fields are passed over."""
        *lines, self._line = (self._line + chunk).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line:
                yield from self._take()

    def close(self) -> Iterator[bytes]:
        """The data of an event that the end of the stream has ended: not every server writes the last empty line."""
        yield from self.feed(b"\n")
        yield from self._take()

    def _take(self) -> Iterator[bytes]:
        if self._data:
            yield b"\n".join(self._data)
            self._data.clear()


async def _read_stream(response: aiohttp.ClientResponse, recording: Recording) -> None:
    reader = EventReader()
    complete, now_s = False, recording.start_s
    async for chunk in response.content.iter_any():
        now_s = time.perf_counter()
        for data in reader.feed(chunk):
            complete |= _take_event(data, now_s, recording)
    for data in reader.close():
        try:
            complete |= _take_event(data, now_s, recording)
        except RequestFailed as error:
            raise (RequestFailed("cut off", error.detail) if error.kind == "bad event" else error) from error
    if not complete:
        raise RequestFailed("cut off", "the stream ended without a finish reason and without [DONE]")


def _take_event(data: bytes, now_s: float, recording: Recording) -> bool:
    """Records one event. True when it ends the answer: a finish reason, or [DONE]."""
    if data == b"[DONE]":
        return True
    try:
        event = json.loads(data)
        if error := event.get("error") or (event if event.get("object") == "error" else None):
            raise RequestFailed("error in stream", json.dumps(error)[:_DETAIL])
        if usage := event.get("usage"):
            recording.prompt_tokens = usage.get("prompt_tokens")
            recording.output_tokens = usage.get("completion_tokens")
            recording.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            drafts = usage.get("completion_tokens_details") or {}
            if (accepted := drafts.get("accepted_prediction_tokens")) is not None:
                recording.accepted_tokens = accepted
                recording.drafted_tokens = accepted + drafts.get("rejected_prediction_tokens", 0)
        choices = event.get("choices")
        if not choices:
            return False
        choice = choices[0]
        if choice.get("finish_reason") == "abort":  # vLLM's word
            raise RequestFailed("aborted", "the server ended the request before its end")
        if not _names_role_only(choice):
            recording.output_times_s.append(now_s)
        return choice.get("finish_reason") is not None
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise RequestFailed("bad event", f"{type(error).__name__} in {data[:_DETAIL]!r}") from error


def _names_role_only(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None or "role" not in delta or choice.get("finish_reason") is not None:
        return False
    return not any(value for name, value in delta.items() if name != "role")


def _message(body: bytes) -> str:
    """The message of an error body: OpenAI's, else its beginning."""
    try:
        return str(json.loads(body)["error"]["message"])[:_DETAIL]
    except (ValueError, KeyError, TypeError):
        return body[:_DETAIL].decode(errors="replace")
