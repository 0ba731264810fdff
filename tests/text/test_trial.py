"""What would take years to compile, or bring the process down, is refused, and costs nobody else anything."""

import gc
import json
import os
import signal
import threading

import pytest

from jaxserve.errors import InvalidRequest, JaxserveError, UnsupportedOption
from jaxserve.testing import ByteTokenizer
from jaxserve.text import grammar as grammar_module
from jaxserve.text import trial as trial_module
from jaxserve.text.grammar import GrammarCompiler
from jaxserve.text.trial import Trial
from jaxserve.values.structured_output import StructuredOutput

WAIT_S = 120.0  # for anything that must happen: far more than a busy machine takes
SOURCE = "start: /a/"


def slow_schema(count: int) -> StructuredOutput:
    """Every pattern more takes three times as long."""
    patterns = [{"type": "string", "pattern": f".*a.{{{i}}}b"} for i in range(1, count)]
    return StructuredOutput(json_schema=json.dumps({"allOf": patterns}))


def deep_schema(count: int) -> StructuredOutput:
    links: dict[str, object] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": {"type": "null"}}}
    return StructuredOutput(json_schema=json.dumps(schema))


def deep_grammar(count: int) -> StructuredOutput:
    rules = [f'a{i}: a{i + 1} | "q" a{i + 1}' for i in range(count)]
    return StructuredOutput(grammar="\n".join(["start: a0", *rules, f'a{count}: "x"']))


def trial_of(seconds: float = 3.0) -> Trial:
    return Trial(seconds=seconds, max_items_in_row=2000, max_lexer_states=10_000)


def test_what_takes_too_much_is_refused_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_TRIAL_S", 0.3)
    compiler = GrammarCompiler(ByteTokenizer(), 259, (257,))
    for asked, words in (
        (slow_schema(30), "the json_schema takes more than 0.3 s to compile; give a simpler one"),
        (deep_schema(3000), "the json_schema is nested too deep"),
        (deep_grammar(3000), "the grammar is nested too deep"),
        (StructuredOutput(grammar="\n" * 100_000 + 'root ::= "a"'), "the grammar takes more than"),
    ):
        with pytest.raises(UnsupportedOption, match=words):
            compiler.compile(asked)
        assert compiler._trial._process is None, "lost"
        with pytest.raises(UnsupportedOption, match=words):
            compiler.compile(asked)
        assert compiler._trial._process is None, "what is known is not tried again"
        compiler.compile(StructuredOutput(json_schema='{"type": "null"}')).start()
    for asked in (deep_schema(25), deep_grammar(25)):
        compiler.compile(asked).start()
    with pytest.raises(InvalidRequest, match="look-ahead"):
        compiler.compile(StructuredOutput(regex="(?=a)b"))


def test_threads_share_one_process_which_somebody_may_end() -> None:
    trial, found = trial_of(), []

    def work() -> None:
        found.extend(trial.check("grammar", SOURCE) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert found == [SOURCE] * 20
    process = trial._process
    assert process is not None
    os.kill(process._popen.pid, signal.SIGTERM)  # as a supervisor does to all of a service, which then drains
    assert trial.check("grammar", SOURCE) == SOURCE
    assert trial._process is process
    os.kill(process._popen.pid, signal.SIGKILL)
    process._popen.wait(WAIT_S)
    assert trial.check("grammar", SOURCE) == SOURCE
    assert trial._process is not process


def test_the_process_ends_with_its_owner() -> None:
    trial = trial_of()
    assert trial.check("grammar", SOURCE) == SOURCE
    process = trial._process
    assert process is not None
    assert process.poll() is None
    del trial
    gc.collect()
    assert process.poll() is not None


def test_a_program_that_cannot_run_is_no_fault_of_the_grammar(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(trial_module, "_PROGRAM", tmp_path / "missing.py")
    with pytest.raises(JaxserveError, match="ended with status 2") as caught:
        trial_of().check("grammar", SOURCE)
    assert type(caught.value) is JaxserveError
