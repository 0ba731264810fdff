"""Small programs for other libraries, and what they are here: these run, and docs/python.md counts the lines.

`programs/NAME.before.txt` is written for the other library, `programs/NAME.py` for this one.
"""

import contextlib
import difflib
import functools
import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from adapter_files import write_adapter
from serve_parts import Served, served

from jaxserve import LLM
from jaxserve.config.schema import GrpcConfig, HttpConfig
from jaxserve.testing import ByteTokenizer

PROGRAMS = Path(__file__).parent / "programs"
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py"))
PAGE = Path(__file__).parents[2] / "docs/python.md"
LLAMA = Path(__file__).parents[1] / "fixtures" / "llama"


@functools.cache
def printed(name: str, *arguments: str) -> str:
    """What the program prints. It runs in this process, since JAX takes seconds to load."""
    file, shown = PROGRAMS / f"{name}.py", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        patch.setattr(sys, "argv", [str(file), *arguments])
        made = runpy.run_path(str(file), run_name="__main__")
    for value in made.values():
        if isinstance(value, LLM):
            value.close()
    return shown.getvalue()


def story() -> str:
    return printed("vllm_batch").splitlines()[0].removeprefix("Once upon a time -> ")


def answer() -> str:
    return printed("vllm_batch").splitlines()[-1]


def test_batch() -> None:
    assert printed("vllm_batch").count(" -> ") == 2
    assert story() and answer()


@pytest.mark.parametrize("name", ["vllm_async", "transformers_streamer"])
def test_streams(name: str) -> None:
    assert printed(name).strip() == story().strip()


def test_llama_cpp() -> None:
    assert printed("llama_cpp_stream") == f"Once upon a time{story()}"


def test_pipeline() -> None:
    assert answer().startswith(printed("transformers_pipeline").strip())


def test_structured() -> None:
    choice, number, text = printed("vllm_structured").splitlines()
    assert choice in ("yes", "no") and re.fullmatch("[0-9]{1,3}", number)
    assert 0 <= json.loads(text) <= 99


def test_lora(tmp_path: Path) -> None:
    plain, tuned = printed("vllm_lora", str(LLAMA), str(write_adapter(tmp_path / "tuned", LLAMA))).splitlines()
    assert len(json.loads(plain)) == len(json.loads(tuned)) == 8 and plain != tuned


def test_embeddings() -> None:
    same, *others = [float(line.split()[-1]) for line in printed("vllm_embed").splitlines()]
    assert same == 1 and len(others) == 2 and all(-1 <= other < 1 for other in others)


def test_scores() -> None:
    found = {(words := line.rsplit(" ", 1))[0]: float(words[1]) for line in printed("vllm_score").splitlines()}
    assert list(found) == ["Cows eat grass.", "Snow is white."] and all(0 <= score <= 1 for score in found.values())


def test_drafts() -> None:
    assert printed("vllm_ngram").strip()


def test_a_client() -> None:
    with served(Served(tokenizer=ByteTokenizer()), grpc_config=GrpcConfig(), http_config=HttpConfig(port=0)) as parts:
        whole, streamed = printed("openai_client", f"{parts.http_url}/v1").split("\n", 1)
    assert whole and streamed


@pytest.mark.parametrize("name", NAMES)
def test_the_page_counts_lines(name: str) -> None:
    before = (PROGRAMS / f"{name}.before.txt").read_text().splitlines()
    after = (PROGRAMS / f"{name}.py").read_text().splitlines()
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    away = sum(line[0] == "-" for line in changes)
    row = f"| `{name}` | {len(before)} | {len(after)} | {away} | {len(changes) - away} |"
    assert row in PAGE.read_text(), row


def test_all_are_there() -> None:
    assert len(NAMES) == 11
    assert len(re.findall(r"^\| `\w+` \| \d", PAGE.read_text(), re.MULTILINE)) == 11
