"""The OpenAPI document against the live server: Schemathesis makes requests from it and judges the answers.

The engine is the fake one, so that what is tested is the door: no 5xx, no status and no body that the document does not
know, no refusal of OpenAI's error shape, nothing accepted that the document forbids.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_parts import ToolTokenizer, browse, http_served
from serve_parts import Served

from jaxserve.engine import Reranker

KEY = "sk-schemathesis"
NUM_OPERATIONS = 18  # that are tested
# What is right by the document may still be too long, or an id outside of the vocabulary: a 400 for it is no fault.
# Hence no `positive_data_acceptance`.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    # Short contexts: `max_tokens` null means all that fits, and `n` may be a thousand.
    judges = Reranker(template="{instruction}{query} {document}", instruction="", yes_id=ord("y"), no_id=ord("n"))
    parts = Served(
        tokenizer=ToolTokenizer(), vocab_size=259, max_model_len=64, num_pages=512, max_rows=16, reranker=judges
    )
    with http_served(parts, api_keys_file=str(keys), max_body_bytes=200_000) as served:
        yield served


def run_schemathesis(server: Served, folder: Path, phases: str, num_examples: int, timeout_s: float) -> None:
    """Fails with its report when a check did."""
    command = [sys.executable, "-c", "import sys; from schemathesis.cli import schemathesis; sys.exit(schemathesis())"]
    command += ["run", f"{server.http_url}/openapi.json", "--header", f"Authorization: Bearer {KEY}"]
    command += ["--checks", ",".join(CHECKS), "--phases", phases]
    command += ["--max-examples", str(num_examples), "--generation-deterministic", "--no-color", "--workers", "1"]
    command += ["--suppress-health-check", "all", "--request-timeout", "120", "--warnings", "off"]
    # A stream that never ends, and one that needs a device.
    command += ["--exclude-path", "/events", "--exclude-path", "/debug/profile"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=folder, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert re.search(rf"Tested: {NUM_OPERATIONS}\b", done.stdout), done.stdout


def check_unharmed(server: Served) -> None:
    with browse(server, authorization=f"Bearer {KEY}") as client:
        assert client.get("/health").status_code == 200
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).json()
        assert answer["choices"][0]["text"] == "bcd"
    server.scheduler.check()


def test_a_few_requests_for_each_operation(server: Served, tmp_path: Path) -> None:
    run_schemathesis(server, tmp_path, "fuzzing", 10, 1200)
    check_unharmed(server)


@pytest.mark.slow
def test_a_hundred_requests_for_each_operation(server: Served, tmp_path: Path) -> None:
    run_schemathesis(server, tmp_path, "coverage,fuzzing", 100, 3600)
    check_unharmed(server)


def test_the_document_names_every_route(server: Served) -> None:
    with browse(server, authorization=f"Bearer {KEY}") as client:
        paths = set(client.get("/openapi.json").json()["paths"])
    assert len(paths - {"/events", "/debug/profile"}) == NUM_OPERATIONS
    wanted = {"/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model}", "/v1/embeddings"}
    wanted |= {"/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"}
    wanted |= {"/tokenize", "/detokenize", "/health", "/live", "/ready", "/version", "/load", "/metrics"}
    assert wanted <= paths
