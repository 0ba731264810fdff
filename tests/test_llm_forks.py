"""Children that are really forked: what cannot work is told at once, and what can does. On the fake device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
WAIT_S = 120

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")

BEGIN = """
import asyncio, os, sys, traceback
from fake_parts import Fakes
from jaxserve import LLM, AsyncLLM, SamplingParams
from jaxserve.errors import ForkedProcess
Fakes().install()
PARENT = os.getpid()
LONG = SamplingParams(max_tokens=50)

def refused(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except ForkedProcess as error:
        assert f"process {PARENT}" in str(error) and "'spawn'" in str(error), error
    else:
        raise AssertionError(call)

def in_child(check):
    if (child := os.fork()) == 0:
        try:
            check()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""

INHERITED = """
llm = LLM(progress=False)
held = llm.stream("abc", LONG)
next(held)

def check():
    refused(llm.generate, "abc", use_tqdm=False)
    refused(llm.chat, [], use_tqdm=False)
    refused(llm.embed, "abc", use_tqdm=False)
    refused(llm.stream, "abc")
    refused(lambda: list(held))
    refused(llm.sleep)
    refused(llm.update_weights, "x", version="2")
    llm.close()

in_child(check)
assert llm.generate("abc", use_tqdm=False)[0].outputs[0].text
llm.close()
"""

ASYNC = """
llm = AsyncLLM(progress=False)

def check():
    refused(llm.generate, "abc")
    for call in (llm.embed("abc"), llm.score("a", "b"), llm.sleep(), llm.wake_up()):
        refused(asyncio.run, call)
    asyncio.run(llm.shutdown())

in_child(check)
asyncio.run(llm.shutdown())
"""

NEW = """
import jax, jaxserve.offline.llm
jax.devices()  # as a program does that has no LLM itself

def check():
    refused(LLM, progress=False)
    refused(LLM.from_config, None)
    refused(AsyncLLM, progress=False)

in_child(check)
in_child(lambda: in_child(check))  # PARENT has started it for them, too
"""

BEFORE = """
import jaxserve.offline.llm

def check():
    import jax
    jax.devices()
    for _ in range(2):
        with LLM(progress=False) as llm:
            assert llm.generate("abc", use_tqdm=False)[0].outputs[0].text

in_child(check)
"""


@pytest.mark.parametrize("program", [INHERITED, ASYNC, NEW, BEFORE], ids=["inherited", "async", "new", "before"])
def test_a_child(program: str) -> None:
    settings = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    command = [sys.executable, "-W", "ignore", "-c", BEGIN + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, cwd=TESTS, env=settings)
    assert done.returncode == 0, done.stderr
