"""The curl commands of the documentation work as they stand, against servers on other ports.

A server has the settings with which the first line of a block starts it, and no others.
"""

import contextlib
import functools
import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from http_parts import NO_GRPC, ToolTokenizer
from serve_parts import WAIT_S, Served, served

from jaxserve.assemble.answers import find_reranker
from jaxserve.config import load_config
from jaxserve.config.model_path import resolve_model_path
from jaxserve.config.schema import GrpcConfig, HttpConfig, SchedConfig, ServeConfig, VisionConfig
from jaxserve.serve.http.messages_bodies import MessagesRequest
from jaxserve.serve.http.requests import ChatRequest, CompletionRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from jaxserve.serve.http.responses_api_bodies import ResponsesRequest
from jaxserve.text import load_tokenizer

ROOT = Path(__file__).parents[3]


PLAIN = "jaxserve serve demo --port 8000"


def commands() -> list[tuple[str, str]]:
    """Each with what starts its server."""
    found = []
    for name in ("docs/http.md", "README.md"):
        for block in re.findall(r"^```bash\n(.*?)^```", (ROOT / name).read_text(), re.DOTALL | re.MULTILINE):
            first, *rest = re.split(r"^(?=curl )", block, flags=re.MULTILINE)
            server = re.sub(r"\\\n# *", "", first).strip().removeprefix("# ") or PLAIN
            found += [(server, part.strip()) for part in rest]
    return found


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Served]]:
    """Starts a server by its command, in a folder of its own and with a fake model; each command once."""
    folder = tmp_path_factory.mktemp("folder")

    @functools.cache
    def started(command: str) -> Served:
        before, plain, options = command.rpartition(PLAIN)
        assert plain
        subprocess.run(["bash", "-c", f"{before} true"], cwd=folder, check=True)
        settings = [word for word in shlex.split(options) if word != "--set"]
        with contextlib.chdir(folder):
            config = load_config(None, ["model.path=demo", "serve.http.port=0", *settings]).config
        find_reranker(config, load_tokenizer(resolve_model_path("demo")))  # as a start of the demo model does
        tokenizer = ToolTokenizer()
        parts = Served(tokenizer=tokenizer, vocab_size=259, reranker=find_reranker(config, tokenizer))
        doors = {"http_config": config.serve.http, "admin_tokens_file": config.serve.admin_tokens_file}
        return running.enter_context(served(parts, grpc_config=NO_GRPC, **doors))

    with contextlib.ExitStack() as running:
        yield started


@pytest.mark.parametrize(("server", "command"), commands())
def test_curl(start: Callable[[str], Served], server: str, command: str) -> None:
    assert "http://127.0.0.1:8000/" in command
    command = command.replace("http://127.0.0.1:8000", start(server).http_url).replace(
        '"model": "demo"', '"model": "fake"'
    )
    done = subprocess.run(
        ["bash", "-c", f"{command} --silent --show-error --fail-with-body"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if '"stream": true' in command:
        events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["usage"]["completion_tokens"] == 40
    else:
        json.loads(done.stdout)


def test_there_are_commands_for_the_main_routes() -> None:
    text = "\n".join(command for _, command in commands())
    for route in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models", "/tokenize", "/health"):
        assert route in text
    assert "/v1/rerank" in text and "/v1/score" in text


_LIMIT = re.compile(r"max_|(header|body|request|message)_timeout_s$|stored_responses|batch_(?!dir$)")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "Mi": 2**20}
_STATUSES = {"400", "408", "413", "429", "503", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "-"}


def test_the_table_of_limits_is_that_of_the_settings() -> None:
    """Each limit of a request, a caller or the server stands there, with its default and the status beyond it."""
    text = (ROOT / "docs/http.md").read_text().partition("\n## Limits\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \| ([^|]+) \| [^|]+ \|$", text, re.MULTILINE)
    told = {name: (default, status) for name, default, status in rows}
    sections = {"serve": ServeConfig, "serve.http": HttpConfig, "serve.grpc": GrpcConfig, "sched": SchedConfig}
    sections["vision"] = VisionConfig
    fields = {
        f"{section}.{name}": field for section, kind in sections.items() for name, field in kind.model_fields.items()
    }
    limits = {name for name in fields if _LIMIT.match(name.rpartition(".")[2]) and name.startswith("serve.")}
    pictures = {"vision.max_pictures", "vision.max_source_pixels", "vision.decode_s"}  # the others are in pictures.md
    assert set(told) == limits | pictures | {"sched.max_waiting", "sched.max_waiting_tokens"}
    assert len(rows) == len(told)
    for name, (default, status) in told.items():
        assert set(status.split(", ")) <= _STATUSES, name
        if fields[name].default is not None:
            number, _, unit = default.replace(",", "").partition(" ")
            assert float(number) * _UNITS.get(unit, 1) == fields[name].default, name


def test_every_setting_and_field_is_in_the_documentation() -> None:
    text = (ROOT / "docs/http.md").read_text()
    elsewhere = {"port", "web_page", "profile_dir", "vllm_metrics"}
    missing = [name for name in HttpConfig.model_fields if name not in elsewhere and f"serve.http.{name}" not in text]
    bodies = (
        ChatRequest,
        CompletionRequest,
        EmbeddingRequest,
        RerankRequest,
        ScoreRequest,
        MessagesRequest,
        ResponsesRequest,
    )
    fields = {name for body in bodies for name in body.model_fields}
    missing += [name for name in sorted(fields) if f"`{name}`" not in text and f'"{name}"' not in text]
    assert not missing
