"""`bench serve` against jaxserve's own gRPC service on a fake device."""

from collections.abc import AsyncIterator, Iterator

import pytest
from serve_parts import Served, serve_bytes, served

from jaxserve.client import AsyncClient
from jaxserve.errors import ConfigError
from jaxserve.lab.bench.report import ServeReport
from jaxserve.lab.bench.serve import bench_serve
from jaxserve.lab.bench.serve_options import Endpoint, PromptOptions, ServeOptions
from jaxserve.lab.workloads.datasets import DatasetOptions
from jaxserve.serve.gen import inference_pb2 as pb


@pytest.fixture
def server() -> Iterator[Served]:
    with served(serve_bytes(delay_s=0.002)) as parts:
        yield parts


def bench(address: str, *, temperature: float = 0.0, **options: object) -> ServeReport:
    chosen = ServeOptions(
        endpoint=Endpoint(backend="grpc", url=address, ignore_eos=True, temperature=temperature),
        **({"dataset": DatasetOptions(num_prompts=20, input_len=32, output_len=12)} | options),
    )
    return bench_serve(chosen, lambda line: None, lambda label, done, total: None)


@pytest.mark.parametrize("vocab_size", [100, None])
def test_tokens_are_counted_and_timed(server: Served, vocab_size: int | None) -> None:
    report = bench(server.address, prompts=PromptOptions(vocab_size=vocab_size), max_concurrency=4)
    [run] = report.runs
    assert report.target["model"] == "fake"
    assert (run.metrics.completed, run.metrics.failed, run.metrics.num_short) == (20, 0, 0)
    assert run.metrics.output_tokens == 20 * 12
    assert run.metrics.input_tokens == 20 * 32 or vocab_size is None
    assert any("prompts have" in note for note in run.notes) == (vocab_size is None)  # no word is one byte
    assert run.metrics.max_concurrency == 4
    assert run.metrics.itl_ms.count <= 20 * 11
    assert run.metrics.e2el_ms.median is not None
    assert run.metrics.e2el_ms.median >= 12 * 1.9  # a step of the fake device takes 2 ms
    assert server.engine.num_live == 0


def test_repeated_prefixes_are_found_in_the_cache(server: Served) -> None:
    dataset = DatasetOptions(
        name="prefix-repetition", num_prompts=16, num_prefixes=2, prefix_len=64, input_len=8, output_len=4
    )
    [run] = bench(server.address, dataset=dataset, prompts=PromptOptions(vocab_size=100), max_concurrency=1).runs
    assert run.metrics.cached_tokens == 14 * 64  # all but the first of each prefix, in whole pages of 8


def test_prompts_that_were_sent_before_are_told(server: Served) -> None:
    def warnings(seed: int) -> list[str]:
        dataset = DatasetOptions(num_prompts=6, input_len=64, output_len=4, seed=seed)
        [run] = bench(server.address, dataset=dataset, prompts=PromptOptions(vocab_size=100)).runs
        return [line for line in run.warnings if "prefix cache" in line]

    assert not warnings(1)
    [told] = warnings(1)
    assert "sent before with this seed" in told and "another --seed than 1" in told
    assert not warnings(2)


def test_a_refused_request_is_a_failure_with_its_status(server: Served) -> None:
    dataset = DatasetOptions(num_prompts=3, input_len=600, output_len=4)
    [run] = bench(server.address, dataset=dataset, prompts=PromptOptions(vocab_size=100), warmup=0).runs
    assert run.metrics.failures == {"gRPC invalid": 3}
    assert "512" in run.outcomes[0].detail


def test_an_option_that_cannot_be_is_told_as_a_failure(server: Served) -> None:
    dataset = DatasetOptions(num_prompts=2, input_len=8, output_len=4)
    [run] = bench(server.address, dataset=dataset, temperature=1000.0, warmup=0).runs
    assert run.metrics.failures == {"cannot be sent": 2}
    assert "temperature is 1000.0" in run.outcomes[0].detail


def test_what_the_server_ended_is_no_answer(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(*arguments: object) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(token_ids=[5])
        yield pb.GenerateResponse(finish_reason=pb.FINISH_REASON_ABORT, usage=pb.Usage(num_generated_tokens=1))

    monkeypatch.setattr(AsyncClient, "generate", generate)
    [run] = bench(server.address, dataset=DatasetOptions(num_prompts=2, input_len=8), warmup=0).runs
    assert run.metrics.failures == {"aborted": 2}


def test_a_timeout_frees_the_request(server: Served) -> None:
    server.runner.delay_s = 0.05
    dataset = DatasetOptions(num_prompts=2, input_len=8, output_len=300)
    [run] = bench(server.address, dataset=dataset, timeout_s=0.5, warmup=0).runs
    assert run.metrics.failures == {"timeout": 2}


def test_no_server_is_told() -> None:
    with served(serve_bytes()) as parts:
        address = parts.address
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxserve.lab.bench.serve._ASK_S", 1.0)
        with pytest.raises(ConfigError, match="does not serve"):
            bench(address)
