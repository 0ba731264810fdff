"""`bench serve` against an OpenAI server that answers by a script of times."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certificates import Authority
from scripted_server import NUM_ADDED, Script, ScriptedServer, scripted

from jaxserve.errors import ConfigError
from jaxserve.lab.bench.openai_client import EventReader
from jaxserve.lab.bench.report import ServeReport
from jaxserve.lab.bench.serve import bench_serve
from jaxserve.lab.bench.serve_options import Endpoint, PromptOptions, ServeOptions
from jaxserve.lab.workloads.arrivals import ArrivalOptions
from jaxserve.lab.workloads.datasets import DatasetOptions


def ask(
    server: ScriptedServer,
    tmp_path: Path,
    *,
    backend: str = "openai",
    numbers: tuple[int, ...] | None = None,
    endpoint: dict[str, object] | None = None,
    timeout_s: float = 120.0,
    max_concurrency: int | None = None,
    max_tokens: int = 5,
) -> ServeReport:
    """Sends one request for each script, or for each of `numbers`, all at once."""
    asked = range(len(server.scripts)) if numbers is None else numbers
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"number {n}", "max_tokens": max_tokens}) + "\n" for n in asked))
    options = ServeOptions(
        endpoint=Endpoint(backend=backend, url=server.url, **(endpoint or {})),
        dataset=DatasetOptions(name="custom", path=path, num_prompts=None),
        warmup=0,
        timeout_s=timeout_s,
        max_concurrency=max_concurrency,
    )
    return bench_serve(options, lambda line: None, lambda label, done, total: None)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_the_figures_are_those_of_the_schedule(tmp_path: Path, backend: str) -> None:
    scripts = [
        Script(waits_s=(0.6, 0.2, 0.2, 0.2, 0.2), role_first=backend == "openai-chat"),  # TPOT 0.2, E2EL 1.4
        Script(waits_s=(0.2, 0.5), tokens_each=5),  # 10 tokens: TPOT 0.5 / 9, E2EL 0.7
        Script(waits_s=(0.4,)),  # one token
    ]
    with scripted(scripts) as server:
        report = ask(server, tmp_path, backend=backend)
    [run] = report.runs
    metrics = run.metrics
    assert (metrics.completed, metrics.failed) == (3, 0)
    assert metrics.output_tokens == 5 + 10 + 1
    assert metrics.cached_tokens == 6
    assert (metrics.drafted_tokens, metrics.accepted_tokens) == (8 + 3, 8)
    assert metrics.tokens_per_round == 16 / 8
    assert metrics.max_concurrency == 3
    for outcome, script, sent_s in zip(run.outcomes, scripts, map(server.sent_s.__getitem__, range(3)), strict=True):
        due_s = outcome.start_s + np.cumsum(script.waits_s)
        assert all(seen_s >= sent for seen_s, sent in zip(outcome.output_times_s, sent_s, strict=True))
        assert (np.array(outcome.output_times_s) >= due_s - 1e-3).all(), "sleeps are never shorter than asked"
    # However late all of it was: the figures are those of what was seen.
    seen = [np.array([outcome.start_s, *outcome.output_times_s]) for outcome in run.outcomes]
    expected = {
        "ttft_ms": [times[1] - times[0] for times in seen],
        "e2el_ms": [times[-1] - times[0] for times in seen],
        "itl_ms": [gap for times in seen for gap in np.diff(times[1:])],
        "tpot_ms": [
            (times[-1] - times[1]) / (number - 1) for times, number in zip(seen, (5, 10, 1), strict=True) if number > 1
        ],
    }
    assert len(expected["itl_ms"]) == 5
    for name, values in expected.items():
        spread = getattr(metrics, name)
        assert spread.count == len(values), name
        assert spread.mean == pytest.approx(1e3 * np.mean(values)), name
        assert spread.percentiles[99] == pytest.approx(1e3 * np.percentile(values, 99)), name
    assert metrics.duration_s >= 1.4 - 1e-3
    assert report.target == {"backend": backend, "url": server.url, "model": "scripted", "version": "1.2.3"}


def test_the_name_of_a_role_is_no_output(tmp_path: Path) -> None:
    with scripted([Script(waits_s=(0.4, 0.0), role_first=True)]) as server:
        [run] = ask(server, tmp_path, backend="openai-chat").runs
    [outcome] = run.outcomes
    assert len(outcome.output_times_s) == 2
    assert outcome.output_times_s[0] - outcome.start_s >= 0.399


def test_tokens_that_the_server_does_not_count(tmp_path: Path) -> None:
    with scripted([Script(waits_s=(0.0, 0.01, 0.01), count=False)]) as server:
        [run] = ask(server, tmp_path).runs
    assert (run.metrics.output_tokens, run.metrics.input_tokens) == (3, 2)
    assert any("did not count" in note for note in run.notes)
    assert any("shorter than asked for" in note for note in run.notes)


def test_failures_are_counted_by_name_and_hurt_nobody_else(tmp_path: Path) -> None:
    scripts = [
        Script(waits_s=(0.0, 0.01)),
        Script(status=429),
        Script(status=500),
        Script(ending="cut"),
        Script(ending="error"),
        Script(ending="object"),
        Script(ending="abort"),
        Script(ending="half"),
        Script(ending="garbage"),
        Script(ending="silent"),
        Script(waits_s=(0.0, 0.01)),
        Script(status=429),
    ]
    with scripted(scripts) as server:
        [run] = ask(server, tmp_path).runs
    assert run.metrics.completed == 2
    assert run.metrics.failures == {
        "HTTP 429": 2,
        "HTTP 500": 1,
        "cut off": 2,
        "error in stream": 2,
        "aborted": 1,
        "bad event": 1,
        "no output": 1,
    }
    details = {outcome.failure: outcome.detail for outcome in run.outcomes}
    assert details["HTTP 429"] == "scripted 429"
    assert "scripted error" in details["error in stream"]
    with scripted([Script(ending="hang")]) as server:
        [run] = ask(server, tmp_path, timeout_s=0.5).runs
    assert run.metrics.failures == {"timeout": 1}


def test_streams_of_other_servers(tmp_path: Path) -> None:
    scripts = [
        Script(waits_s=(0.0, 0.01), tokens_each=3, line_end="\r\n"),
        Script(waits_s=(0.0, 0.01), tokens_each=3, whole_end=False),
    ]
    with scripted(scripts) as server:
        [run] = ask(server, tmp_path).runs
    assert (run.metrics.completed, run.metrics.num_uncounted, run.metrics.output_tokens) == (2, 0, 12)
    assert run.metrics.itl_ms.count == 2


def small_vocabulary(text: str) -> int:
    """Words of four letters are a token with the blank before them; all else is a token a letter."""
    return sum(1 if len(word) == 5 and word[0] == " " else len(word) for word in re.findall(r" ?[^ ]+", text))


@pytest.mark.parametrize("dataset", [{"name": "random"}, {"name": "prefix-repetition", "num_prefixes": 2}])
def test_words_are_tokens_of_the_server(dataset: dict[str, Any]) -> None:
    options = {"num_prompts": 4, "input_len": 24, "prefix_len": 16, "output_len": 2, **dataset}
    with scripted([Script()], small_vocabulary) as server:
        [run] = words_of(server, options).runs
    asked = 24 + (16 if "num_prefixes" in dataset else 0)
    assert [outcome.prompt_tokens for outcome in run.outcomes] == [asked] * 4
    assert not [note for note in run.notes if "prompts have" in note]


def test_a_warm_up_is_as_long_as_the_prompts(tmp_path: Path) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps({"prompt": [0] * 30}) + "\n")
    with scripted([Script()], small_vocabulary) as server:
        words_of(server, {"name": "custom", "path": path, "num_prompts": None})
        warm_up, asked = (body["prompt"] for body in server.bodies)
    assert small_vocabulary(warm_up) + NUM_ADDED == len(asked) == 30


def test_prompts_of_another_length_are_told() -> None:
    with scripted([Script()], len) as server:  # a token a letter: no word is one
        [run] = words_of(server, {"num_prompts": 4, "input_len": 24, "output_len": 2}).runs
    [note] = [note for note in run.notes if "prompts have" in note]
    assert "24.0 were asked for" in note
    with scripted([Script()]) as server:  # words are all that it knows
        [run] = words_of(server, {"num_prompts": 4, "input_len": 24, "output_len": 2}).runs
    assert [outcome.prompt_tokens for outcome in run.outcomes] == [24] * 4


def words_of(server: ScriptedServer, dataset: dict[str, Any]) -> ServeReport:
    options = ServeOptions(endpoint=Endpoint(backend="openai", url=server.url), dataset=DatasetOptions(**dataset))
    return bench_serve(options, lambda line: None, lambda label, done, total: None)


def test_a_server_of_a_private_authority(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    with scripted([Script()], pair=authority.issue("server")) as server:
        [run] = ask(server, tmp_path, endpoint={"ca_file": Path(authority.path)}).runs
        assert run.metrics.completed == 1
        with pytest.raises(ConfigError, match="certificate verify failed"):
            ask(server, tmp_path)


def test_nobody_listens(tmp_path: Path) -> None:
    with scripted([Script()]) as server:
        pass
    [run] = ask(server, tmp_path, endpoint={"model": "any"}).runs
    assert run.metrics.failures == {"cannot connect": 1}
    with pytest.raises(ConfigError, match="does not answer"):
        ask(server, tmp_path)


def test_what_is_sent(tmp_path: Path) -> None:
    with scripted([Script()]) as server:
        ask(server, tmp_path, endpoint={"api_key": "secret", "ignore_eos": True, "extra": {"seed": 7, "top_p": 0.5}})
        ask(server, tmp_path, backend="openai-chat", endpoint={"temperature": None, "model": "other"})
    plain, chat = server.bodies
    assert plain == {
        "model": "scripted",
        "prompt": "number 0",
        "max_tokens": 5,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 7,
        "top_p": 0.5,
    }
    assert server.headers[0]["authorization"] == "Bearer secret"
    assert chat == {
        "model": "other",
        "messages": [{"role": "user", "content": "number 0"}],
        "max_completion_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert "authorization" not in server.headers[1]


def test_a_closed_loop_keeps_its_limit(tmp_path: Path) -> None:
    with scripted([Script(waits_s=(0.05,))]) as server:
        [run] = ask(server, tmp_path, numbers=(0,) * 12, max_concurrency=3).runs
    assert server.most_open <= 3
    assert run.metrics.max_concurrency == 3
    assert run.metrics.duration_s >= 4 * 0.05


@pytest.mark.slow
def test_a_limit_that_holds_a_rate_back_is_told() -> None:
    with scripted([Script(waits_s=(0.3,))]) as server:
        reports = [
            bench_serve(
                ServeOptions(
                    endpoint=Endpoint(backend="openai", url=server.url),
                    dataset=DatasetOptions(num_prompts=4, input_len=4, output_len=1),
                    arrivals=ArrivalOptions(rate=rate),
                    max_concurrency=1,
                    warmup=0,
                ),
                lambda line: None,
                lambda label, done, total: None,
            )
            for rate in (40.0, None)
        ]
    limited, closed = (report.runs[0].notes for report in reports)
    assert any("3 of 4 requests were due while 1 were open" in note for note in limited)
    assert not any("were due" in note for note in closed)


def test_a_sweep_draws_new_prompts_for_each_run() -> None:
    with scripted([Script()]) as server:
        options = ServeOptions(
            endpoint=Endpoint(backend="openai", url=server.url),
            dataset=DatasetOptions(num_prompts=4, input_len=16, output_len=2),
            prompts=PromptOptions(vocab_size=1000),
            sweep_concurrencies=(1, 4),
            warmup=2,
        )
        report = bench_serve(options, lambda line: None, lambda label, done, total: None)
    assert [run.label for run in report.runs] == ["concurrency 1", "concurrency 4"]
    assert [run.metrics.completed for run in report.runs] == [4, 4]
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(prompts) == 2 + 4 + 4
    assert len(set(prompts)) == len(prompts)
    assert {len(prompt) for prompt in prompts} == {16}


def test_a_warm_up_that_fails_ends_it() -> None:
    with scripted([Script(status=401)]) as server:
        options = ServeOptions(
            endpoint=Endpoint(backend="openai", url=server.url), dataset=DatasetOptions(num_prompts=2)
        )
        with pytest.raises(ConfigError, match="HTTP 401: scripted 401"):
            bench_serve(options, lambda line: None, lambda label, done, total: None)


STREAM = b': hi\n\ndata: {"a": "x"}\r\n\r\nevent: y\ndata: one\ndata: two\n\ndata:[DONE]\n\ndata: last'


@pytest.mark.parametrize("size", [1, 3, 7, len(STREAM)])
def test_events_are_read_however_they_are_cut(size: int) -> None:
    reader = EventReader()
    found = [data for i in range(0, len(STREAM), size) for data in reader.feed(STREAM[i : i + size])]
    assert found == [b'{"a": "x"}', b"one\ntwo", b"[DONE]"]
    assert list(reader.close()) == [b"last"]
    assert not list(reader.close())
