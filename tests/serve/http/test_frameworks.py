"""Agents of pydantic-ai as they come: a tool called and answered, and a structured result."""

from collections.abc import Iterator

import openai
import pydantic
import pytest
from http_parts import Script, ToolTokenizer, http_served
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from serve_parts import WAIT_S, Served

SCRIPT = Script()
CALL = '<tool_call>{"name": "get_weather", "arguments": {"days": 3}}</tool_call>'


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
