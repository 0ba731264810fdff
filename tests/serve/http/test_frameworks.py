"""Frameworks as they come: pydantic-ai, langchain and litellm, each with a tool and a structured result."""

import warnings
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from http_parts import Script, ToolTokenizer, http_served
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from serve_parts import WAIT_S, Served

SCRIPT = Script()
CALL = '<tool_call>{"name": "get_weather", "arguments": {"days": 3}}</tool_call>'


GET_WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]},
    },
}


class Forecast(pydantic.BaseModel):
    sunny: bool


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    parts = Served(tokenizer=ToolTokenizer(), forced=SCRIPT, vocab_size=259, max_model_len=4096, num_pages=2048)
    with http_served(parts):
        yield parts


@pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
async def test_pydantic_ai(server: Served, kind: type[OpenAIChatModel | OpenAIResponsesModel]) -> None:
    client = openai.AsyncOpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
    async with client:
        await run_agents(kind("fake", provider=OpenAIProvider(openai_client=client)))


async def run_agents(model: OpenAIChatModel | OpenAIResponsesModel) -> None:
    agent = Agent(model, instructions="Help.")
    asked: list[int] = []

    @agent.tool_plain
    def get_weather(days: int) -> str:
        """Weather of a city."""
        asked.append(days)
        return "sunny"

    SCRIPT.texts = [CALL, "Sunny."]
    assert (await agent.run("Weather?")).output == "Sunny."
    assert asked == [3]
    # Its results are calls of a tool, which are demanded, so that the grammar of their arguments writes them.
    structured = Agent(model, output_type=Forecast, model_settings={"max_tokens": 200})
    assert isinstance((await structured.run("Weather?")).output, Forecast)


@pytest.mark.parametrize("responses", [False, True])
def test_langchain(server: Served, responses: bool) -> None:
    options: dict[str, Any] = {"max_tokens": 200, "max_retries": 0, "timeout": WAIT_S, "use_responses_api": responses}
    chat = ChatOpenAI(model="fake", base_url=f"{server.http_url}/v1", api_key=pydantic.SecretStr("none"), **options)
    SCRIPT.texts = ["Sunny."] * 2
    assert chat.invoke("Weather?").text == "Sunny."
    assert "".join(chunk.text for chunk in chat.stream("Weather?")) == "Sunny."
    SCRIPT.texts = [CALL, "Sunny."]
    with_tool = chat.bind_tools([GET_WEATHER])
    asked = with_tool.invoke("Weather?")
    assert [(call["name"], call["args"]) for call in asked.tool_calls] == [("get_weather", {"days": 3})]
    told = ToolMessage("sunny", tool_call_id=asked.tool_calls[0]["id"] or "")
    assert with_tool.invoke([HumanMessage("Weather?"), asked, told]).text == "Sunny."
    assert isinstance(chat.with_structured_output(Forecast, method="json_schema").invoke("Weather?"), Forecast)


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_litellm(server: Served, api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks the network for prices
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        import litellm

        base = f"{server.http_url}/v1" if api == "openai" else server.http_url
        asked: dict[str, Any] = {"model": f"{api}/fake", "api_base": base, "api_key": "none", "max_tokens": 200}
        asked["timeout"] = WAIT_S
        question: list[Any] = [{"role": "user", "content": "Weather?"}]
        SCRIPT.texts = ["Sunny."] * 2
        answer: Any = litellm.completion(**asked, messages=question)
        assert answer.choices[0].message.content == "Sunny." and answer.usage.completion_tokens > 0
        chunks: Any = litellm.completion(**asked, messages=question, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Sunny."
        SCRIPT.texts = [CALL, "Sunny."]
        called: Any = litellm.completion(**asked, messages=question, tools=[GET_WEATHER])
        (call,) = called.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments.replace(" ", "")) == ("get_weather", '{"days":3}')
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        turns = [*question, called.choices[0].message.model_dump(exclude_none=True), result]
        last: Any = litellm.completion(**asked, messages=turns, tools=[GET_WEATHER])
        assert last.choices[0].message.content == "Sunny."
        if api == "openai":
            formed: Any = litellm.completion(**asked, messages=question, response_format=Forecast)
            Forecast.model_validate_json(formed.choices[0].message.content)
