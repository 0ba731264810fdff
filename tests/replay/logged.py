"""A crowd of requests through the whole loop on the fake device, logged: what the tests of replays share."""

import random
from pathlib import Path

from jaxserve.api import RequestOptions, SamplingParams, StructuredOutput
from jaxserve.engine import Engine, ModelInfo
from jaxserve.engine.step_log import StepLogWriter
from jaxserve.sched import Limits, SchedulerOptions, create_scheduler
from jaxserve.sched.record import LogHeader
from jaxserve.testing import ByteTokenizer, FakeRunner, ManualClock, make_limits

VOCAB = 259


def small_limits(shapes: tuple[tuple[int, int], ...] = ()) -> Limits:
    """So few pages that rows are taken away."""
    return make_limits(max_rows=4, num_pages=14, max_model_len=48, shapes=shapes)


def fresh_runner(limits: Limits | None = None) -> FakeRunner:
    """Its tokens are hashes of all that a row reads through its block table."""
    counts = random.Random(0)
    return FakeRunner(
        limits or small_limits(), vocab_size=VOCAB, mode="context", draw_count=lambda most: counts.randint(1, most)
    )


def write_log(path: Path, seed: int, shapes: tuple[tuple[int, int], ...] = ()) -> Engine:
    """Preemptions, prefix hits, copies, masks, aborts and embeddings. Returns the engine, stopped."""
    rng, clock = random.Random(seed), ManualClock()
    runner = fresh_runner(small_limits(shapes))
    options = SchedulerOptions(watermark=0.0, growth=0.0)
    header = LogHeader(limits=runner.limits, model="fake", policy="preemptive", vocab_size=VOCAB)
    engine = Engine(
        runner=runner,
        scheduler=create_scheduler("preemptive", runner.limits, options=options, clock=clock),
        tokenizer=ByteTokenizer(),
        model=ModelInfo(name="fake", vocab_size=VOCAB, max_model_len=48, eos_token_ids=(257,)),
        clock=clock,
        observers=[StepLogWriter(path, header, start_s=clock())],
    )
    ids = []
    for number in range(30):
        prompt = "hello abc"[: rng.randint(1, 9)] * rng.randint(1, 2)
        mask = StructuredOutput(regex="[0-9]{5,9}") if number % 4 == 1 else None
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 20),
            n=rng.choice([1, 1, 3]),
            ignore_eos=mask is None,
            structured=mask,
            seed=number,
        )
        pooling = number % 10 == 9
        request = engine.prepare(
            prompt,
            SamplingParams(max_tokens=1) if pooling else sampling,
            RequestOptions(pooling=pooling, priority=rng.randint(0, 3)),
        )
        engine.submit(request, lambda update: None)
        ids.append(request.request_id)
        for _ in range(rng.randint(0, 3)):
            engine.step()
        if number % 7 == 6:
            engine.abort(rng.choice(ids))
    engine.run_until_idle()
    engine.stop()
    return engine
