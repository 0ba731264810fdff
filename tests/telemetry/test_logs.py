"""Log lines: whole, parsable, with the id of the request, and without what was said in it."""

import json
import logging

import pytest

from jaxserve.api import RequestOptions, SamplingParams
from jaxserve.config.schema import RuntimeConfig
from jaxserve.engine import Engine, ModelInfo
from jaxserve.offline.console import set_up_logging
from jaxserve.sched import create_scheduler
from jaxserve.telemetry import JsonFormatter, observe_requests
from jaxserve.testing import ByteTokenizer, FakeRunner, make_limits

SECRET = "hunter2"


def _engine() -> Engine:
    limits = make_limits()
    return Engine(
        runner=FakeRunner(limits, vocab_size=128),
        scheduler=create_scheduler("fcfs", limits),
        tokenizer=ByteTokenizer(),
        model=ModelInfo(name="fake", vocab_size=259, max_model_len=64, eos_token_ids=(257,)),
    )


def _run(engine: Engine, request_id: str = "r-1", *, sampling: SamplingParams | None = None) -> None:
    sampling = sampling or SamplingParams(temperature=0.0, max_tokens=3)
    engine.submit(
        engine.prepare(SECRET, sampling, RequestOptions(request_id=request_id, tenant="t")), lambda update: None
    )
    engine.run_until_idle()


def _record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    return logging.getLogger("x").makeRecord("x", logging.WARNING, "f", 1, message, args, None, extra=extra)


def test_a_record_is_one_line_of_json() -> None:
    record = _record("a\nb %s", "c", request_id="r\n", count=3, _of_a_library=1)
    record.created = 1_700_000_000.25
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250Z", "level": "warning", "logger": "x", "message": "a\nb c",
        "request_id": "r\n", "count": 3,
    }  # fmt: skip


def test_nothing_makes_a_record_unwritable() -> None:
    record = _record("%s", "\ud800", strange=object(), message_id="ё")
    parsed = json.loads(JsonFormatter().format(record))
    assert parsed["message_id"] == "ё"
    assert "object" in parsed["strange"]


def test_a_traceback_is_one_field() -> None:
    record = _record("failed")
    try:
        raise ZeroDivisionError("x")
    except ZeroDivisionError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    assert "ZeroDivisionError: x" in json.loads(JsonFormatter().format(record))["error"]


def test_the_program_logs_json_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(RuntimeConfig(log_format="json", log_requests=True))
    engine = _engine()
    with observe_requests(engine, RuntimeConfig(log_requests=True)):
        _run(engine)
    (line,) = capsys.readouterr().err.splitlines()
    parsed = json.loads(line)
    assert (parsed["level"], parsed["request_id"], parsed["finish_reason"]) == ("info", "r-1", "length")
    assert (parsed["prompt_tokens"], parsed["new_tokens"], parsed["tenant"]) == (8, 3, "t")
    assert parsed["e2e_ms"] >= parsed["ttft_ms"] >= parsed["queue_ms"] >= 0


def test_other_packages_warn_in_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # the second takes the place of the first
        set_up_logging(RuntimeConfig(log_format="json"))
    logging.getLogger("another.package").warning("a\nb")
    logging.getLogger("jaxserve").warning("c")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["logger"], line["message"]) for line in lines] == [("another.package", "a\nb"), ("jaxserve", "c")]
    set_up_logging(RuntimeConfig(log_format="text"))
    assert not [h for h in logging.getLogger().handlers if isinstance(h.formatter, JsonFormatter)]


def test_no_prompt_is_logged_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "jaxserve")
    for with_prompts in (False, True):
        caplog.clear()
        engine = _engine()
        with observe_requests(engine, RuntimeConfig(log_requests=True, log_prompts=with_prompts)):
            _run(engine)
        (record,) = caplog.records
        written = JsonFormatter().format(record) + record.getMessage()
        assert SECRET not in written
        assert (str(list(SECRET.encode()))[1:-1] in written) is with_prompts


def test_an_id_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve")
    engine = _engine()
    with observe_requests(engine, RuntimeConfig(log_requests=True)):
        _run(engine, "a\nINFO all is well")
    assert "\n" not in caplog.records[0].getMessage()


def test_every_end_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve")
    engine = _engine()
    sampling = SamplingParams(temperature=0.0, max_tokens=5, n=3)
    with observe_requests(engine, RuntimeConfig(log_requests=True)):
        engine.submit(engine.prepare("ab", sampling, RequestOptions(request_id="aborted")), lambda update: None)
        engine.step()
        engine.abort("aborted")
        _run(engine, "done", sampling=sampling)
    ends = {record.__dict__["request_id"]: record.__dict__["finish_reason"] for record in caplog.records}
    assert ends == {"aborted": "abort", "done": "length"}
    assert len(caplog.records) == 2


def test_nothing_watches_by_default() -> None:
    engine = _engine()
    with observe_requests(engine, RuntimeConfig()):
        assert not engine.stats[0]._watchers


def test_a_watcher_that_fails_harms_no_request(caplog: pytest.LogCaptureFixture) -> None:
    engine, updates = _engine(), []

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    engine.stats[0].watch_ends(broken)
    engine.submit(engine.prepare("a", SamplingParams(temperature=0.0, max_tokens=2)), updates.append)
    engine.run_until_idle()
    assert updates[-1].last
    assert "a watcher of requests failed" in caplog.text
