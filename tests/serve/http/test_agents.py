"""Bodies of Codex and Claude Code, in the shape that the programs send them; and the two programs themselves.

The bodies have the fields of Codex 0.171 and Claude Code 2.1, and further ones of older and newer releases. Each is
answered, and the prompt has what a model here can read of it.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_parts import Script, ToolTokenizer, browse, http_served
from serve_parts import WAIT_S, Served, note_prepared

SCRIPT = Script()
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
OBJECT = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """Room for the programs' own instructions, a byte a token."""
    parts = Served(
        tokenizer=ToolTokenizer(), forced=SCRIPT, vocab_size=259, max_model_len=200_000, num_pages=25_000, max_rows=4
    )
    with http_served(parts) as parts:
        yield parts


@pytest.fixture
def client(server: Served) -> Iterator[httpx.Client]:
    SCRIPT.texts.clear()
    with browse(server) as client:
        yield client


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "description": "d", "strict": False, "parameters": OBJECT, **fields}


def said(role: str, text: str, **fields: Any) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "id": "msg_1", "role": role, "content": [{"type": kind, "text": text}], **fields}


AGENTS = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Sub-agents.",
    "tools": [
        function("close_agent", output_schema={}),
        {"type": "custom", "name": "note", "format": {"type": "text"}},
    ],
}
FOREIGN_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": True},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start:"}},
    {"type": "local_shell"},
    {"type": "image_generation", "output_format": "png"},
    {"type": "tool_search", "execution": "client"},
    {"type": "mcp", "server_label": "x", "server_url": "https://mcp.example"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
]
CODEX: dict[str, Any] = {
    "model": "fake",
    "instructions": "Work.",
    "input": [said("developer", "Sandbox: none."), said("user", "<environment_context/>"), said("user", "hi ")],
    "tools": [function("exec_command"), AGENTS, *FOREIGN_TOOLS],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "high", "summary": "auto", "context": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
    "prompt_cache_key": "k",
    "client_metadata": {"x-codex-installation-id": "1", "turn_id": "2"},
    "text": {"verbosity": "low"},
    "service_tier": "priority",
    "truncation": "auto",
    "max_output_tokens": 3,
}
FOREIGN_ITEMS: list[dict[str, Any]] = [
    {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c", "name": "apply_patch", "input": "FOREIGN"},
    {"type": "custom_tool_call_output", "call_id": "c", "output": "FOREIGN"},
    {"type": "local_shell_call", "call_id": "l", "status": "completed", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "FOREIGN"}},
    {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "FOREIGN"},
    {"type": "item_reference", "id": "msg_9"},
    {"type": "mcp_call", "id": "m", "name": "f", "server_label": "x", "arguments": "{}", "output": "FOREIGN"},
    {"type": "mcp_list_tools", "id": "m", "server_label": "x", "tools": []},
    {"type": "compaction", "encrypted_content": "FOREIGN"},
    {"type": "ghost_snapshot", "ghost_commit": {"id": "FOREIGN"}},
    {"type": "tool_search_call", "call_id": "t", "execution": "client", "arguments": {}},
    {"type": "tool_search_output", "call_id": "t", "tools": []},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "FOREIGN"},
]
LATER: list[dict[str, Any]] = [
    {"type": "reasoning", "id": "rs_2", "summary": [], "content": [{"type": "text", "text": "hm"}]},
    {
        "type": "function_call",
        "id": "fc_1",
        "status": "completed",
        "call_id": "call_1",
        "namespace": "multi_agent_v1",
        "name": "close_agent",
        "arguments": '{"cmd": "x"}',
    },
    {
        "type": "function_call_output",
        "id": "fco_1",
        "call_id": "call_1",
        "output": [{"type": "input_text", "text": "ok"}],
    },
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "refusal", "refusal": "I cannot."}],
        "phase": "final",
    },
    said("user", "why "),
]

MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **OBJECT, "additionalProperties": False}
    return {"name": name, "description": "d", "input_schema": schema, **fields}


CHAT = [{"role": "user", "content": "hi "}]
LONG = "mcp__" + "a" * 123
CLAUDE: dict[str, Any] = {
    "model": "fake",
    "system": [{"type": "text", "text": "x-billing: 1"}, {"type": "text", "text": "Work.", **MARK}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi "}, {"type": "text", "text": "there", **MARK}]},
        {"role": "system", "content": "Agents: none."},
    ],
    "tools": [
        tool("Bash", eager_input_streaming=True, **MARK),
        tool(LONG, defer_loading=True, input_examples=[{"cmd": "EXAMPLE"}]),
        tool("programs_only", allowed_callers=["code_execution_20260120"]),
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
    ],
    "metadata": {"user_id": "me", "team": "us"},
    "max_tokens": 3,
    "thinking": {"type": "adaptive", "display": "summarized"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "xhigh", "task_budget": {"type": "tokens", "total": 9}},
    "mcp_servers": [{"type": "url", "name": "x", "url": "https://mcp.example"}],
    "speed": "fast",
    "betas": ["x"],
}
CLAUDE_LATER: list[dict[str, Any]] = [
    {
        "role": "assistant",
        "content": [
            {"type": "redacted_thinking", "data": "FOREIGN"},
            {"type": "thinking", "thinking": "hm", "signature": "FOREIGN"},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "FOREIGN"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result"}]},
            {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"cmd": "x"}, "caller": {"type": "direct"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "is_error": False,
                "content": [
                    {"type": "text", "text": "ok", **MARK},
                    {"type": "tool_reference", "tool_name": "mcp__found"},
                    {
                        "type": "document",
                        "title": "TITLE",
                        "source": {"type": "text", "media_type": "text/plain", "data": "DOCUMENT"},
                        "citations": {"enabled": False},
                    },
                    {
                        "type": "search_result",
                        "title": "t",
                        "source": "s",
                        "content": [{"type": "text", "text": "FOUND"}],
                    },
                ],
                **MARK,
            },
            {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "PARTS"}]}},
        ],
    },
    {
        "role": "system",
        "content": [
            {"type": "text", "text": "more tools"},
            {"type": "tool_addition", "tool": {"type": "tool_reference", "name": LONG}},
            {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool("added")}},
            {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "Bash"}},
        ],
    },
    {"role": "system", "content": [{"type": "tool_addition", "tool": {"type": "tool_reference", "name": LONG}}]},
]


def prompt_of(server: Served, client: httpx.Client, path: str, body: Any) -> str:
    """The prompt of a body that is answered."""
    with pytest.MonkeyPatch.context() as patch:
        prepared = note_prepared(server, patch)
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
    return ToolTokenizer().decode(prepared[-1].prompt_token_ids, skip_special_tokens=False)


def test_codex(server: Served, client: httpx.Client) -> None:
    items = [*CODEX["input"], *FOREIGN_ITEMS, *LATER]
    prompt = prompt_of(server, client, RESPONSES, {**CODEX, "input": items})
    names = [each["function"]["name"] for each in json.loads(prompt.split("\n")[0].removeprefix("tools: "))]
    assert names == ["exec_command", "multi_agent_v1__close_agent"]
    for text in ("Work.", "Sandbox: none.", "multi_agent_v1__close_agent({", "tool: ok", "I cannot.", "why "):
        assert text in prompt
    assert "FOREIGN" not in prompt and "apply_patch" not in prompt


def test_claude_code(server: Served, client: httpx.Client) -> None:
    first = prompt_of(server, client, MESSAGES, CLAUDE)
    assert "<|chat|>system: Agents: none." in first
    assert f'"name": "{LONG}"' in first and "EXAMPLE" in first
    assert "web_search" not in first and "programs_only" not in first
    later = prompt_of(server, client, MESSAGES, {**CLAUDE, "messages": CLAUDE["messages"] + CLAUDE_LATER})
    for text in ("tool: ok\nmcp__found\nTITLE\nDOCUMENT\nt\ns\nFOUND", "user: PARTS", "system: more tools", "Bash({"):
        assert text in later
    names = [each["function"]["name"] for each in json.loads(later.split("\n")[0].removeprefix("tools: "))]
    assert names == [LONG, "added"] and "FOREIGN" not in later
    counted = client.post(
        f"{MESSAGES}/count_tokens", json={name: CLAUDE[name] for name in ("model", "messages", "tools")}
    )
    assert counted.status_code == 200


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_every_effort(client: httpx.Client, effort: str) -> None:
    for path, fields in (
        ("/v1/chat/completions", {"messages": CHAT, "reasoning_effort": effort, "max_tokens": 1}),
        (MESSAGES, {"messages": CHAT, "output_config": {"effort": effort}, "max_tokens": 1}),
        (RESPONSES, {"input": "hi ", "reasoning": {"effort": effort}, "max_output_tokens": 1}),
    ):
        assert client.post(path, json={"model": "fake", **fields}).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [
        *((RESPONSES, {"tool_choice": {**each, "name": "n"}}, f"{each['type']!r}") for each in FOREIGN_TOOLS),
        (RESPONSES, {"tools": FOREIGN_TOOLS, "tool_choice": "required"}, "web_search"),
        (
            RESPONSES,
            {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "image_generation"}]}},
            "image_generation",
        ),
        (RESPONSES, {"input": [{"type": "mesage", "role": "user", "content": "hi"}]}, "mesage"),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "message.output_text.logprobs"),
        (RESPONSES, {"tools": [function("f"), function("f")]}, "'f'"),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "web_search"}}, "web_search_20250305"),
        (MESSAGES, {"tools": CLAUDE["tools"][3:], "tool_choice": {"type": "any"}}, "web_search_20250305"),
        (MESSAGES, {"tools": [tool("a" * 129)]}, "128"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "poem", "text": "x"}]}]}, "poem"),
        (
            MESSAGES,
            {"messages": [said("user", "") | {"content": [{"type": "document", "source": {"type": "base64"}}]}]},
            "send its text",
        ),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "tools": [{"type": "web_search"}], "tool_choice": "required"},
            "web_search",
        ),
    ],
)  # fmt: skip
def test_what_is_demanded_and_not_here_is_refused_by_name(
    client: httpx.Client, path: str, fields: Any, text: str
) -> None:
    base = {RESPONSES: CODEX, MESSAGES: CLAUDE}.get(path, {"model": "fake"})
    answer = client.post(path, json={**base, **fields})
    assert answer.status_code == 400
    assert text in answer.json()["error"]["message"]


def test_names_of_a_namespace_come_back(client: httpx.Client) -> None:
    """Whole, streamed, and demanded by `tool_choice`."""
    call = '<tool_call>{"name": "multi_agent_v1__close_agent", "arguments": {"cmd": "x"}}</tool_call>'
    expected = ("multi_agent_v1", "close_agent", {"cmd": "x"})
    SCRIPT.texts = [call, call]
    body = {**CODEX, "max_output_tokens": 300}
    (item,) = client.post(RESPONSES, json=body).json()["output"]
    assert (item["namespace"], item["name"], json.loads(item["arguments"])) == expected
    lines = client.post(RESPONSES, json={**body, "stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    items = [event["item"] for event in events if event["type"].startswith("response.output_item")]
    assert {(item["namespace"], item["name"]) for item in items} == {expected[:2]}
    for choice in (
        {"type": "function", "name": "multi_agent_v1__close_agent"},
        {"type": "function", "namespace": "multi_agent_v1", "name": "close_agent"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "multi_agent_v1"}]},
    ):
        answer = client.post(RESPONSES, json={**body, "tool_choice": choice, "parallel_tool_calls": False}).json()
        assert {(item["namespace"], item["name"]) for item in answer["output"]} == {expected[:2]}


# ---- the programs ----------------------------------------------------------------------------------------------------


def find_program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"there is no program {name}; npm install -g @openai/codex @anthropic-ai/claude-code")
    return path


def run(command: list[str], home: Path, **environment: str) -> str:
    """What the program prints. It has a home of its own, and no variables of this process but the path."""
    environment |= {"HOME": str(home), "PATH": os.environ["PATH"], "IS_SANDBOX": "1"}
    done = subprocess.run(
        command,
        env=environment,
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=4 * WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def call_text(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.slow
def test_codex_itself(server: Served, tmp_path: Path) -> None:
    """Its shell, a function of a namespace, and its last word."""
    program = find_program("codex")
    SCRIPT.texts = [
        call_text("exec_command", cmd="echo made > made.txt"),
        call_text("multi_agent_v1__close_agent", target="nobody"),
        "All is done.",
    ]
    provider = f'model_providers.local={{name="local", base_url="{server.http_url}/v1", wire_api="responses"}}'
    command = [program, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    command += ["-m", "fake", "-c", 'model_provider="local"', "-c", provider, "Make a file."]
    assert "All is done." in run(command, tmp_path)
    assert (tmp_path / "made.txt").read_text() == "made\n"
    assert not SCRIPT.texts


@pytest.mark.slow
def test_claude_code_itself(server: Served, tmp_path: Path) -> None:
    program = find_program("claude")
    SCRIPT.texts = [call_text("Bash", command="echo made > made.txt", description="x"), "All is done."]
    command = [program, "-p", "Make a file.", "--model", "fake", "--dangerously-skip-permissions"]
    printed = run(
        command,
        tmp_path,
        ANTHROPIC_BASE_URL=server.http_url,
        ANTHROPIC_API_KEY="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    assert printed.strip() == "All is done."
    assert (tmp_path / "made.txt").read_text() == "made\n"
    assert not SCRIPT.texts
