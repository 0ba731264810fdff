"""`bench serve`: one load, or a sweep of loads, against an endpoint.

The order is: dataset, connection, warm-up, runs, report. Every run of a sweep draws new prompts, since a server
remembers the old ones in its prefix cache and would look faster than it is.
"""

import asyncio
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxserve.errors import ConfigError, how_to_install
from jaxserve.lab.bench.about import about_machine
from jaxserve.lab.bench.lag import judge
from jaxserve.lab.bench.load import LoadClient, LoadResult, run_load
from jaxserve.lab.bench.report import Run, ServeReport
from jaxserve.lab.bench.serve_options import Endpoint, ServeOptions
from jaxserve.lab.bench.words import Words, learn_words
from jaxserve.lab.workloads.arrivals import ArrivalOptions, arrival_times
from jaxserve.lab.workloads.datasets import DatasetOptions, make_samples
from jaxserve.lab.workloads.metrics import Metrics, compute_metrics
from jaxserve.lab.workloads.outcome import Outcome
from jaxserve.lab.workloads.prompts import IdPrompts, PromptMaker, TextPrompts, WordPrompts
from jaxserve.lab.workloads.samples import Sample

_ASK_S = 10.0
_MAX_LEN_ERROR = 0.05  # share of the prompts, beyond which a result has a warning
_NEVER_ALIKE = ("random", "lognormal", "sharegpt", "azure", "burstgpt")  # datasets whose prompts share nothing
_MAX_CACHED = 0.05  # share of their prompts, beyond which they were sent before

Say = Callable[[str], None]  # a line for a person
OnDone = Callable[[str, int, int], None]  # a request has ended: label of the run, how many, of how many


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """One run of a sweep."""

    label: str
    samples: Sequence[Sample]
    due_s: np.ndarray
    rate: float | None
    max_concurrency: int | None


def bench_serve(options: ServeOptions, say: Say, on_done: OnDone) -> ServeReport:
    """Runs the bench on an event loop of its own: uvloop's where it is installed. The report names the loop.

    Raises ConfigError for a bench that cannot be started; failures of requests are part of the report.
    """
    try:
        import uvloop
    except ImportError:
        factory = None
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(measure(options, say, on_done))


async def measure(options: ServeOptions, say: Say, on_done: OnDone) -> ServeReport:
    """`bench_serve` on the running loop."""
    words = Words()
    points = _make_points(options, words)  # wrong options are reported before any request is sent
    client, server = await _connect(options.endpoint)
    runs = []
    try:
        if _spells_words(options):
            words = await learn_words(client, _ASK_S)
            points = _make_points(options, words)
        await _warm_up(client, points[0].samples[0], options, words, say)
        for point in points:
            say(f"{point.label}: {len(point.samples)} requests")
            runs.append(await _run(client, point, options, on_done))
    finally:
        await client.close()
    return ServeReport(
        about=about_machine(),
        target={"backend": options.endpoint.backend, "url": options.endpoint.url, **server},
        load=options.as_json(),
        runs=tuple(runs),
    )


def _spells_words(options: ServeOptions) -> bool:
    """Also of a custom dataset the warm-up."""
    needs_any = options.dataset.name != "custom" or options.warmup > 0
    return needs_any and options.prompts.tokenizer is None and options.prompts.vocab_size is None


def _make_points(options: ServeOptions, words: Words) -> list[_Point]:
    """Draws all samples before the first is sent. Raises ConfigError."""
    arrivals, limit = options.arrivals, options.max_concurrency
    if options.sweep_rates:
        each = [(dataclasses.replace(arrivals, rate=rate), limit) for rate in options.sweep_rates]
    elif options.sweep_concurrencies:
        each = [(arrivals, limit) for limit in options.sweep_concurrencies]
    else:
        each = [(arrivals, limit)]
    points = []
    for number, (arrivals, limit) in enumerate(each):
        samples = make_samples(options.dataset, make_prompts(options, number, words))
        _check_prompts(samples, options.endpoint.backend)
        points.append(
            _Point(
                label=_label(arrivals, limit, samples[0]),
                samples=samples,
                due_s=arrival_times(samples, arrivals, options.dataset.seed + number),
                rate=_rate(arrivals, samples[0]),
                max_concurrency=limit,
            )
        )
    return points


def make_prompts(options: ServeOptions, run: int, words: Words) -> PromptMaker:
    """The maker of the prompts of a run; -1 is the warm-up. Equal seeds draw equal prompts, different runs never do."""
    seed = options.dataset.seed * 1000 + run + 1
    if options.prompts.tokenizer is not None:
        from jaxserve.text import load_tokenizer  # its libraries are not needed for words

        return TextPrompts(load_tokenizer(options.prompts.tokenizer), seed)
    if options.prompts.vocab_size is not None:
        return IdPrompts(options.prompts.vocab_size, seed)
    return WordPrompts(seed, words.words, words.lead, words.num_added)


def _check_prompts(samples: Sequence[Sample], backend: str) -> None:
    for sample in samples:
        is_ids = isinstance(sample.prompt, tuple) and isinstance(sample.prompt[0], int)
        if backend == "openai-chat" and is_ids:
            raise ConfigError(
                "openai-chat takes no token ids: leave out --vocab-size, or give --tokenizer DIR for text"
            )
        if backend == "openai" and isinstance(sample.prompt, tuple) and not is_ids:
            raise ConfigError("the dataset has chat messages: use --backend openai-chat or grpc")


def _rate(arrivals: ArrivalOptions, first: Sample) -> float | None:
    if arrivals.ramp is not None or arrivals.diurnal is not None or (arrivals.recorded and first.arrival_s is not None):
        return None
    return math.inf if arrivals.rate is None else arrivals.rate


def _label(arrivals: ArrivalOptions, limit: int | None, first: Sample) -> str:
    rate = _rate(arrivals, first)
    at_once = ["all at once"] if limit is None else []
    words = at_once if rate == math.inf else [arrivals.label or "as recorded"]
    words += [] if limit is None else [f"concurrency {limit}"]
    return ", ".join(words)


async def _connect(endpoint: Endpoint) -> tuple[LoadClient, dict[str, Any]]:
    """A client, and the server's description of itself. Raises ConfigError."""
    if endpoint.backend == "grpc":
        from jaxserve.lab.bench.grpc_client import GrpcClient

        client: LoadClient = GrpcClient(endpoint)
    else:
        try:
            from jaxserve.lab.bench.openai_client import OpenAIClient
        except ImportError as error:
            raise ConfigError(f"the backend {endpoint.backend} needs aiohttp: {how_to_install('bench')}") from error
        client = OpenAIClient(endpoint)
    try:
        return client, await client.describe(_ASK_S)
    except BaseException:
        await client.close()
        raise


async def _warm_up(client: LoadClient, like: Sample, options: ServeOptions, words: Words, say: Say) -> None:
    """Requests of the size of the first one, of other tokens. Raises ConfigError when none is answered."""
    if not options.warmup:
        return
    input_len = max(1, like.prompt_len)  # a prompt of blanks has no word
    dataset = DatasetOptions(num_prompts=options.warmup, input_len=input_len, output_len=like.output_len)
    samples = make_samples(dataset, make_prompts(options, -1, words))
    say(f"warm-up: {len(samples)} requests")
    result = await run_load(
        client, samples, np.zeros(len(samples)), max_concurrency=options.max_concurrency, timeout_s=options.timeout_s
    )
    failed = [outcome for outcome in result.outcomes if outcome.failure is not None]
    if len(failed) == len(samples):
        raise ConfigError(f"every request of the warm-up failed; the first: {failed[0].failure}: {failed[0].detail}")


async def _run(client: LoadClient, point: _Point, options: ServeOptions, on_done: OnDone) -> Run:
    num_done = 0

    def count(outcome: Outcome) -> None:
        nonlocal num_done
        num_done += 1
        on_done(point.label, num_done, len(point.samples))

    result = await run_load(
        client,
        point.samples,
        point.due_s,
        max_concurrency=point.max_concurrency,
        timeout_s=options.timeout_s,
        on_done=count,
    )
    metrics = compute_metrics(
        result.outcomes, result.duration_s, goodput=options.goodput, percentiles=options.percentiles
    )
    return Run(
        label=point.label,
        rate=point.rate,
        max_concurrency=point.max_concurrency,
        metrics=metrics,
        lag=result.lag,
        outcomes=result.outcomes,
        start_s=result.start_s,
        warnings=(*judge(result.lag, metrics), *_warn_cached(metrics, options)),
        notes=(*_notes(metrics, options, _asked_len(point.samples, result.outcomes)), *_note_waits(point, result)),
    )


def _warn_cached(metrics: Metrics, options: ServeOptions) -> list[str]:
    """Warns of prompts that a prefix cache should not know, and knows."""
    cached = metrics.cached_tokens or 0
    if options.dataset.name not in _NEVER_ALIKE or cached <= _MAX_CACHED * metrics.input_tokens:
        return []
    return [
        f"{cached / metrics.input_tokens:.0%} of the prompts' tokens were found in the server's prefix cache, though "
        f"no prompts of {options.dataset.name} are alike: they were sent before with this seed, and these times are "
        f"those of a cache; give another --seed than {options.dataset.seed}"
    ]


def _note_waits(point: _Point, result: LoadResult) -> list[str]:
    """With a rate the limit hides how long requests queue; a closed loop has nothing to hide."""
    if not result.num_waited or point.rate == math.inf:
        return []
    return [
        f"{result.num_waited} of {len(point.samples)} requests were due while {point.max_concurrency} were open, and "
        "left later: --max-concurrency bounds the load, and no time here includes that wait"
    ]


def _asked_len(samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> int:
    """Tokens of the prompts that were answered, as the dataset has them."""
    return sum(s.prompt_len for s, outcome in zip(samples, outcomes, strict=True) if outcome.failure is None)


def _notes(metrics: Metrics, options: ServeOptions, asked_len: int) -> list[str]:
    notes = []
    off = metrics.input_tokens - asked_len
    if options.dataset.name != "custom" and abs(off) > _MAX_LEN_ERROR * asked_len:
        is_chat = options.endpoint.backend == "openai-chat" and off > 0
        hint = "a chat template adds its own" if is_chat else "--tokenizer DIR, or --vocab-size, makes them exact"
        notes.append(
            f"prompts have {metrics.input_tokens / metrics.completed:.1f} tokens on average as the server counts, "
            f"{asked_len / metrics.completed:.1f} were asked for: {hint}"
        )
    if metrics.num_short:
        hint = "" if options.endpoint.ignore_eos else "; --ignore-eos, where the server knows it, keeps them going"
        notes.append(f"{metrics.num_short} of {metrics.completed} answers are shorter than asked for{hint}")
    if metrics.num_uncounted:
        notes.append(
            f"the server did not count the tokens of {metrics.num_uncounted} answers: their events were counted instead"
        )
    if options.dataset.name == "custom" and (options.sweep_rates or options.sweep_concurrencies):
        notes.append("each run of this sweep sends the same prompts: a prefix cache remembers them from the run before")
    return notes
