"""The official client for Node, as it comes from npm: chats, its loop of tools, Responses, embeddings, errors.

Without node, or without its package `openai` (`npm install -g openai`), the test is skipped; `.ci/run` installs it.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from http_parts import Script, ToolTokenizer, http_served
from serve_parts import WAIT_S, Served

PROGRAM = Path(__file__).parent / "node_client.js"
CALL = '<tool_call>{"name": "get_weather", "arguments": {"days": 3}}</tool_call>'


def find_node() -> tuple[str, dict[str, str]]:
    """Node, and the environment in which it finds the package: where NODE_PATH says, or among the global ones."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("there is no node, or no npm")
    installed = subprocess.run([npm, "root", "-g"], capture_output=True, text=True, timeout=WAIT_S, check=True)
    paths = [path for path in (os.environ.get("NODE_PATH"), installed.stdout.strip()) if path]
    environment = {**os.environ, "NODE_PATH": os.pathsep.join(paths)}
    asked = subprocess.run(
        [node, "-e", "require.resolve('openai')"], env=environment, capture_output=True, timeout=WAIT_S, check=False
    )
    if asked.returncode:
        pytest.skip("node has no package openai; npm install -g openai")
    return node, environment


def test_openai_of_node() -> None:
    node, environment = find_node()
    script = Script()
    script.texts = ["Sunny.", "Sunny.", CALL, "It is sunny."]
    parts = Served(tokenizer=ToolTokenizer(), forced=script, vocab_size=259, max_model_len=4096, num_pages=2048)
    with http_served(parts):
        command = [node, str(PROGRAM), f"{parts.http_url}/v1"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.returncode == 0, done.stderr
        parts.scheduler.check()
    seen = json.loads(done.stdout)
    assert seen["model"] == "fake" and seen["whole"] == seen["streamed"] == "Sunny."
    assert seen["tokens"] == len("Sunny.") + 1, "with the end of the sequence"
    assert seen["asked"] == [3] and seen["final"] == "It is sunny."
    assert set(seen["parsed"]) == {"ok"} and isinstance(seen["parsed"]["ok"], bool)
    assert seen["response"] and seen["events"] == ["response.created", "response.completed"]
    assert len(seen["embeddings"]) == 2 and len(set(seen["embeddings"])) == 1
    kind, status, message = seen["error"]
    assert (kind, status) == ("BadRequestError", 400) and "temperature is 101" in message
