"""A stream over HTTP that was cut after any event and is asked for with `resume` gives the events that it lacked.

Tool calls, two answers of one prompt, characters of several tokens, echo and log-probabilities; the ids of events.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import httpx
import pytest
from http_parts import ToolTokenizer, browse, http_served, say
from serve_parts import Served
from test_openai_client import MESSAGES, TWO_CALLS, WEATHER


class Event(NamedTuple):
    """One event: its id, and its body without what each call has of its own."""

    id: str
    body: dict[str, Any]

    @property
    def choice(self) -> dict[str, Any]:
        return self.body["choices"][0] if self.body["choices"] else {}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tools": ("chat/completions", {"messages": MESSAGES, "tools": [WEATHER], "request_id": "calls-2"}),
    "demanded": (
        "chat/completions",
        {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required", "logprobs": True},
    ),
    "two": ("chat/completions", {"messages": MESSAGES, "n": 2, "max_tokens": 9, "request_id": "two"}),
    "text": ("completions", {"prompt": "a", "logprobs": 1, "echo": True, "max_tokens": 9, "request_id": "umlaut"}),
}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    forced = {**say("calls-2", TWO_CALLS), **say("umlaut", "é日!"), **say("two", "日本"), **say("two", "xyzé", 1)}
    with http_served(Served(tokenizer=ToolTokenizer(), forced=forced, vocab_size=259)) as parts:
        with browse(parts) as client:
            yield client
        assert parts.engine.load.num_waiting == 0


def ask(client: httpx.Client, name: str, resume: list[dict[str, Any]] | None = None) -> list[Event]:
    route, body = CASES[name]
    options = {"temperature": 0, "seed": 3, "return_token_ids": True, "stream": True, "max_tokens": 200}
    body = {**options, "stream_options": {"include_usage": True}, **body}
    answer = client.post(f"/v1/{route}", json=body if resume is None else {**body, "resume": resume})
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]:
        head, _, data = block.rpartition("data: ")
        found = json.loads(data)
        for part in ("id", "created", "prompt_token_ids"):
            found.pop(part, None)
        for choice in found["choices"]:
            choice.pop("prompt_token_ids", None)
            for call in choice.get("delta", {}).get("tool_calls") or ():
                call.pop("id", None)
        events.append(Event(head.removeprefix("id: ").strip(), found))
    return events


def known(events: Sequence[Event], count: int) -> list[dict[str, Any]]:
    """What a client with these events says that it has."""
    have = [{"token_ids": [], "finished": False} for _ in range(count)]
    for event in events:
        mine = have[event.choice["index"]]
        mine["token_ids"] += event.choice.get("token_ids") or []
        mine["finished"] |= event.choice["finish_reason"] is not None
    return have


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_cut_gives_the_rest(client: httpx.Client, name: str) -> None:
    count = CASES[name][1].get("n", 1)
    whole = ask(client, name)
    *answer, usage = whole
    assert not usage.choice
    counts = [0] * count
    for event in answer:
        index = event.choice["index"]
        counts[index] += len(event.choice.get("token_ids") or ())
        assert event.id in ("", f"{index}:{counts[index]}")
    cuts = [k + 1 for k, event in enumerate(answer) if event.id]
    assert len(cuts) > 5
    for cut in cuts:
        have = known(answer[:cut], count)
        if all(one["finished"] for one in have):
            continue
        rest = ask(client, name, have)
        for index in range(count):
            roles = [] if have[index]["token_ids"] else [e for e in answer[:cut] if e.choice["index"] == index]
            expected = [*roles, *(e for e in answer[cut:] if e.choice["index"] == index)]
            assert [e for e in rest[:-1] if e.choice["index"] == index] == expected, (cut, index)
        assert rest[-1].body["usage"]["completion_tokens"] == usage.body["usage"]["completion_tokens"]
        assert rest[-1].body["usage"]["prompt_tokens"] == usage.body["usage"]["prompt_tokens"]


def test_a_choice_that_had_not_begun_has_no_part_of_the_scores_of_its_prompt(client: httpx.Client) -> None:
    body = {"prompt": "a", "n": 2, "logprobs": 1, "echo": True, "max_tokens": 3, "seed": 3, "stream": True}
    resume = [{"token_ids": [98]}, {"token_ids": []}]
    answer = client.post("/v1/completions", json={**body, "temperature": 0, "resume": resume})
    data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(part)["choices"][0] for part in data]
    for index, tokens, offsets in ((0, ["c", "d"], [2, 3]), (1, ["b", "c", "d"], [1, 2, 3])):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == ("cd" if index == 0 else "abcd"), "the text has the prompt"
        assert [token for choice in mine for token in choice["logprobs"]["tokens"]] == tokens
        assert [offset for choice in mine for offset in choice["logprobs"]["text_offset"]] == offsets


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "a", "resume": [{"token_ids": [98]}]}, "stream is not true"),
        ({"prompt": ["a", "b"], "stream": True, "resume": [{"token_ids": [98]}]}, "one by one"),
        ({"prompt": "a", "stream": True, "resume": [{"token_ids": [98]}]}, "needs the seed"),
        ({"prompt": "a", "stream": True, "resume": []}, "resume has 0 sequences, but n is 1"),
    ],
)
def test_what_cannot_be_resumed_is_refused(client: httpx.Client, body: dict[str, Any], message: str) -> None:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
