"""`bench throughput` and `bench latency`: a model in this process, without a door.

Prompts are new in each repetition, so that a prefix cache has nothing to remember.
"""

import dataclasses
import time
from collections.abc import Sequence

from jaxserve.api import SamplingParams
from jaxserve.errors import ConfigError
from jaxserve.lab.bench.about import about_device, about_machine
from jaxserve.lab.bench.report import OfflineReport
from jaxserve.lab.workloads.datasets import DatasetOptions, make_samples
from jaxserve.lab.workloads.metrics import spread_ms
from jaxserve.lab.workloads.prompts import IdPrompts
from jaxserve.lab.workloads.samples import Sample
from jaxserve.offline.llm import LLM, RequestOutput

_PERCENTILES = (10, 25, 50, 75, 90, 99)
_WARMUP_TOKENS = 8


def bench_throughput(llm: LLM, dataset: DatasetOptions, vocab_size: int | None) -> OfflineReport:
    """All requests of the dataset at once, to their full length, greedy. Arrival times do not count."""
    maker = _prompts(llm, vocab_size, dataset.seed)
    samples = make_samples(dataset, maker)
    _generate(llm, _warm_up_samples(llm, samples[0], vocab_size))
    start_s = time.perf_counter()
    outputs = _generate(llm, samples)
    elapsed_s = time.perf_counter() - start_s
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(sequence.token_ids) for output in outputs for sequence in output.outputs)
    firsts_s = [o.metrics.first_token_s - o.metrics.arrival_s for o in outputs if o.metrics.first_token_s is not None]
    return OfflineReport(
        title=f"{llm.model_name}: {len(samples)} requests at once",
        about=about_machine() | {"device": about_device()},
        load={"model": llm.model_name, **dataset.as_json(), "num_prompts": len(samples)},
        figures={
            "elapsed_time": elapsed_s,
            "num_requests": len(outputs),
            "total_input_tokens": num_input,
            "total_cached_tokens": sum(output.num_cached_tokens for output in outputs),
            "total_output_tokens": num_output,
            **_drafts(outputs, num_output),
            "requests_per_second": len(outputs) / elapsed_s,
            "output_tokens_per_second": num_output / elapsed_s,
            "tokens_per_second": (num_input + num_output) / elapsed_s,
        },
        spreads={"first token after submission (ms)": spread_ms(firsts_s, _PERCENTILES)},
    )


def _drafts(outputs: Sequence[RequestOutput], num_output: int) -> dict[str, float]:
    """Figures of drafts; none without any."""
    drafted, accepted = (
        sum(getattr(output.metrics, name) for output in outputs) for name in ("drafted_tokens", "accepted_tokens")
    )
    if not drafted:
        return {}
    return {
        "total_drafted_tokens": drafted,
        "total_accepted_tokens": accepted,
        "tokens_per_round": num_output / max(1, num_output - accepted),
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions:
    """`iterations` batches of `batch_size` prompts, after `warmup` that do not count."""

    batch_size: int
    input_len: int
    output_len: int
    iterations: int
    warmup: int
    seed: int


def bench_latency(llm: LLM, options: LatencyOptions, vocab_size: int | None) -> OfflineReport:
    """Times from the submission of a batch to the last token of all of it."""
    batch_size, output_len = options.batch_size, options.output_len
    dataset = DatasetOptions(num_prompts=batch_size, input_len=options.input_len, output_len=output_len)
    times_s: list[float] = []
    for number in range(options.warmup + options.iterations):
        samples = make_samples(dataset, _prompts(llm, vocab_size, options.seed * 10_000 + number))
        start_s = time.perf_counter()
        _generate(llm, samples)
        if number >= options.warmup:
            times_s.append(time.perf_counter() - start_s)
    spread = spread_ms(times_s, _PERCENTILES)
    assert spread.mean is not None, "at least one iteration"
    return OfflineReport(
        title=f"{llm.model_name}: batches of {batch_size}, {options.input_len} tokens in, {output_len} out",
        about=about_machine() | {"device": about_device()},
        load={"model": llm.model_name} | dataclasses.asdict(options),
        figures={
            "avg_latency_ms": spread.mean,
            "ms_per_output_token": spread.mean / output_len,
            "output_tokens_per_second": batch_size * output_len / (spread.mean / 1e3),
        },
        spreads={"latency (ms)": spread},
    )


def _prompts(llm: LLM, vocab_size: int | None, seed: int) -> IdPrompts:
    tokenizer = llm.get_tokenizer()
    if vocab_size is not None:
        return IdPrompts(vocab_size, seed)
    if tokenizer is None:
        raise ConfigError("the model has no tokenizer here, so the ids to draw from are not known: give --vocab-size")
    return IdPrompts(tokenizer.vocab_size, seed, tokenizer.special_ids)


def _warm_up_samples(llm: LLM, like: Sample, vocab_size: int | None) -> list[Sample]:
    """One short request of other tokens: nothing compiles any more, but the first step touches memory."""
    tokens = min(_WARMUP_TOKENS, like.output_len)
    dataset = DatasetOptions(num_prompts=1, input_len=min(_WARMUP_TOKENS, like.prompt_len), output_len=tokens)
    return make_samples(dataset, _prompts(llm, vocab_size, seed=2**32))


def _generate(llm: LLM, samples: Sequence[Sample]) -> list[RequestOutput]:
    options = [SamplingParams(temperature=0.0, max_tokens=s.output_len, ignore_eos=True) for s in samples]
    return llm.generate([_as_prompt(s) for s in samples], options, use_tqdm=False)


def _as_prompt(sample: Sample) -> str | list[int]:
    if isinstance(sample.prompt, str):
        return sample.prompt
    ids = [i for i in sample.prompt if isinstance(i, int)]
    if len(ids) != len(sample.prompt):
        raise ConfigError("the dataset has chat messages: `bench serve` sends them, a model in this process takes none")
    return ids
