"""Runs a client library against a server, as its users would: python scripts/try_clients.py CLIENT URL [--model NAME]

Chat, stream, a demanded tool call and a structured answer, each with a line of what came back. Each library may have an
environment of its own, in which this file runs, with nothing else of this package: for versions that the tests do not
have.

    python -m venv /tmp/instructor && /tmp/instructor/bin/pip install instructor
    /tmp/instructor/bin/python scripts/try_clients.py instructor http://127.0.0.1:8000

docs/http.md says which versions were tried. An exception, or an answer that is not what was asked for, ends the script
with exit code 1.
"""

import argparse
import importlib.metadata
import json
from typing import Any

import pydantic

QUESTION = "Fill in name, age, city: My friend Ada from Quito is 36."
MAX_TOKENS = 80


class Person(pydantic.BaseModel):
    """A person and where they live."""

    name: str
    age: int
    city: str


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "person",
        "description": "Stores a person.",
        "parameters": {**Person.model_json_schema(), "additionalProperties": False},
    },
}
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


def try_langchain(url: str, model: str) -> None:
    """langchain-openai, over chat completions and over Responses."""
    from langchain_core.messages import AIMessageChunk  # pyright: ignore[reportMissingImports]
    from langchain_openai import ChatOpenAI  # pyright: ignore[reportMissingImports]

    for responses in (False, True):
        options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "use_responses_api": responses}
        chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=pydantic.SecretStr("none"), **options)
        door = "Responses" if responses else "chat completions"
        answer = chat.invoke(QUESTION)
        assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] > 0
        tell(f"{door}: chat", answer.text)
        whole: Any = None
        for chunk in chat.stream(QUESTION):
            assert isinstance(chunk, AIMessageChunk)
            whole = chunk if whole is None else whole + chunk
        assert whole.text == answer.text, (whole.text, answer.text)
        tell(f"{door}: stream", whole.text)
        (call,) = chat.bind_tools([TOOL], tool_choice="person").invoke(QUESTION).tool_calls
        tell(f"{door}: tool", Person.model_validate(call["args"]))
        found = chat.with_structured_output(Person, method="json_schema").invoke(QUESTION)
        assert isinstance(found, Person)
        tell(f"{door}: structured", found)


def try_litellm(url: str, model: str) -> None:
    """litellm, over the APIs of OpenAI and Anthropic."""
    import litellm  # pyright: ignore[reportMissingImports]

    for name, base in ((f"openai/{model}", f"{url}/v1"), (f"anthropic/{model}", url)):
        asked: dict[str, Any] = {"model": name, "api_base": base, "api_key": "none", "messages": MESSAGES}
        asked |= {"max_tokens": MAX_TOKENS, "temperature": 0.0}
        answer: Any = litellm.completion(**asked)
        assert answer.usage.completion_tokens > 0
        tell(f"{name}: chat", answer.choices[0].message.content)
        chunks: Any = litellm.completion(**asked, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == answer.choices[0].message.content, text
        tell(f"{name}: stream", text)
        choice = {"type": "function", "function": {"name": "person"}}
        called: Any = litellm.completion(**asked, tools=[TOOL], tool_choice=choice)
        (call,) = called.choices[0].message.tool_calls
        tell(f"{name}: tool", Person.model_validate_json(call.function.arguments))
        if name.startswith("openai/"):
            formed: Any = litellm.completion(**asked, response_format=Person)
            tell(f"{name}: structured", Person.model_validate_json(formed.choices[0].message.content))


def try_instructor(url: str, model: str) -> None:
    """instructor, which asks for its results as a tool or as a JSON schema."""
    import instructor  # pyright: ignore[reportMissingImports]
    import openai

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as plain:
            client = instructor.from_openai(plain, mode=mode)
            asked: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": MAX_TOKENS}
            found = client.chat.completions.create(response_model=Person, **asked)
            assert isinstance(found, Person)
            tell(f"{mode.name}: structured", found)
            parts = list(client.chat.completions.create_partial(response_model=Person, **asked))
            tell(f"{mode.name}: stream", f"{len(parts)} parts, the last {parts[-1]}")


CLIENTS = {
    "langchain-openai": try_langchain,
    "litellm": try_litellm,
    "instructor": try_instructor,
}


def tell(what: str, found: object) -> None:
    """One line a step."""
    print(f"{what}: {json.dumps(str(found))}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("client", choices=sorted(CLIENTS))
    parser.add_argument("url", help="of the server, without /v1")
    parser.add_argument("--model", default="demo")
    options = parser.parse_args()
    print(f"{options.client} {importlib.metadata.version(options.client)}", flush=True)
    CLIENTS[options.client](options.url.rstrip("/"), options.model)


if __name__ == "__main__":
    main()
