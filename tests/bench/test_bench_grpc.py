"""`bench serve` against jaxserve's own gRPC service on a fake device."""

from collections.abc import Iterator

import pytest
from serve_parts import Served, serve_bytes, served

from jaxserve.bench.datasets import DatasetOptions
from jaxserve.bench.report import ServeReport
from jaxserve.bench.serve import bench_serve
from jaxserve.bench.serve_options import Endpoint, PromptOptions, ServeOptions
from jaxserve.errors import ConfigError


@pytest.fixture
def server() -> Iterator[Served]:
    with served(serve_bytes(delay_s=0.002)) as parts:
        yield parts


def bench(address: str, **options: object) -> ServeReport:
    chosen = ServeOptions(
        endpoint=Endpoint(backend="grpc", url=address, ignore_eos=True),
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
    if vocab_size is not None:
        assert run.metrics.input_tokens == 20 * 32
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


def test_a_refused_request_is_a_failure_with_its_status(server: Served) -> None:
    dataset = DatasetOptions(num_prompts=3, input_len=600, output_len=4)
    [run] = bench(server.address, dataset=dataset, prompts=PromptOptions(vocab_size=100), warmup=0).runs
    assert run.metrics.failures == {"gRPC invalid": 3}
    assert "512" in run.outcomes[0].detail


def test_a_timeout_frees_the_request(server: Served) -> None:
    server.runner.delay_s = 0.05
    dataset = DatasetOptions(num_prompts=2, input_len=8, output_len=300)
    [run] = bench(server.address, dataset=dataset, timeout_s=0.5, warmup=0).runs
    assert run.metrics.failures == {"timeout": 2}


def test_no_server_is_told() -> None:
    with served(serve_bytes()) as parts:
        address = parts.address
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxserve.bench.serve._ASK_S", 1.0)
        with pytest.raises(ConfigError, match="does not serve"):
            bench(address)
