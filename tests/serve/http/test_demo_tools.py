"""The demo model with its adapter for tools behind real HTTP: agents, and the documentation's examples as pasted.

The model calls by itself: nothing demands a call or constrains one, except where a client asks for strict arguments.
"""

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import agents
import openai
import pytest
from eval_demo_tools import ENOUGH, PROMISED, evaluate
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from serve_parts import WAIT_S, Served, served
from test_http_weights import _Real

from jaxserve.assemble import assemble
from jaxserve.config import load_config
from jaxserve.config.schema import GrpcConfig, HttpConfig

# Agents on a scripted model, quick: tests/serve/http/test_frameworks.py.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_quickly")]

ROOT = Path(__file__).parents[3]
MODEL = "demo-tools"
SETTINGS = {
    "model.dtype": "float32",
    "kernels.matmul": "xla",  # a fraction of the start: Numba would compile its kernels for adapters
    "kernels.paged_attention": "xla",
    "sched.max_rows": 16,
    "sched.max_step_tokens": 256,
    "runtime.token_buckets": [256],
    "runtime.row_buckets": [16],
}
ASKED, ANSWER = "What is 347*29?", "The answer is 10063."


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    assembly = assemble(load_config(ROOT / "configs" / "demo-tools.yaml", SETTINGS))
    with served(_Real(assembly), grpc_config=GrpcConfig(), http_config=HttpConfig(port=0)) as parts:
        yield parts


@contextlib.asynccontextmanager
async def client_of(server: Served):
    async with openai.AsyncOpenAI(base_url=f"{server.http_url}/v1", api_key="none", timeout=WAIT_S * 10) as client:
        yield client


def examples() -> list[str]:
    """The blocks of Python in the documentation that name the adapter."""
    text = (ROOT / "docs" / "http.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for block in blocks if f'"{MODEL}"' in block]


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.split()[1])
def test_examples_run_as_pasted(server: Served, example: str) -> None:
    """Question, call, result, answer: with OpenAI's client, openai-agents and Anthropic's client."""
    code = example.replace("http://127.0.0.1:8000", server.http_url)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=20 * WAIT_S, check=False
    )
    assert done.stdout == f"calculator 347*29\n{ANSWER}\n", done.stderr


async def test_openai_agents_streamed(server: Served) -> None:
    asked: list[str] = []

    @agents.function_tool
    def calculator(expression: str) -> str:
        """Evaluates an arithmetic expression."""
        asked.append(expression)
        return {"347*29": "10063", "500-63": "437"}[expression]

    agents.set_tracing_disabled(True)
    async with client_of(server) as client:
        model = agents.OpenAIResponsesModel(model=MODEL, openai_client=client)
        greedy = agents.ModelSettings(temperature=0)
        agent = agents.Agent(name="agent", instructions="Help.", tools=[calculator], model=model, model_settings=greedy)
        first = await agents.Runner.run(agent, ASKED)
        assert first.final_output == ANSWER
        streamed = agents.Runner.run_streamed(
            agent, [*first.to_input_list(), {"role": "user", "content": "What is 500-63?"}]
        )
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == "The answer is 437."
    assert asked == ["347*29", "500-63"]


@pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
async def test_pydantic_ai(server: Served, kind: type[OpenAIChatModel | OpenAIResponsesModel]) -> None:
    """A tool called and answered, and a structured result, which is a call that is demanded."""
    asked: list[str] = []
    async with client_of(server) as client:
        model = kind(MODEL, provider=OpenAIProvider(openai_client=client))
        agent = Agent(model, instructions="Help.", model_settings={"temperature": 0})

        @agent.tool_plain
        def calculator(expression: str) -> str:
            """Evaluates an arithmetic expression."""
            asked.append(expression)
            return "10063"

        assert (await agent.run(ASKED)).output == ANSWER
        assert asked == ["347*29"]


async def test_held_out_calls(server: Served) -> None:
    async with client_of(server) as client:
        calls, wrong_calls = await evaluate(client, MODEL, 250, seed=2, kinds=("call",))
        shares, wrong = await evaluate(client, MODEL, 25, seed=2, kinds=PROMISED)
    assert calls["call"] >= ENOUGH, wrong_calls  # 0.982 of 1,000 in benchmarks/demo_tools.json
    assert min(shares.values()) >= 0.5, (shares, wrong)  # 0.75 to 0.98 there
