"""A prompt computed by one engine and answered by another, of other devices, kernels and sizes of pages."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from whole import SMALL, scheduler

from jaxserve.api import Pooling, SamplingParams
from jaxserve.assemble import assemble
from jaxserve.config import load_config
from jaxserve.engine import pooling_params
from jaxserve.engine.exchanging import Exchanger
from jaxserve.errors import ConfigError
from jaxserve.models import load_trainable
from jaxserve.runtime.compile_events import CompileCounter
from jaxserve.serve.handoff import HandoffCounts, HandoffSetup
from jaxserve.serve.handoff_receiver import HandoffReceiver, Receipt
from jaxserve.serve.handoff_sender import HandoffSender

SETTINGS = {
    "model.path": "demo",
    "model.max_len": 200,
    "model.dtype": "float32",
    "cache.page_size": 16,
    "cache.num_pages": 40,
    "cache.host_bytes": 32 << 20,
    "kernels.self_check": False,
    "serve.grpc.port": 0,
    "handoff.wait_s": 120.0,
    "handoff.least_wait_s": 120.0,
    "handoff.frame_bytes": 1 << 18,
    **SMALL,
}
PROMPT = [3 + (i * 7) % 400 for i in range(150)]
SAMPLINGS = (
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1, seed=1),
    SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=2, n=2),
)


class Side:
    """An engine with both sides of a handoff, whose loop has a thread."""

    def __init__(self, secret: Path, **overrides: Any) -> None:
        named = {name.replace("__", "."): value for name, value in overrides.items()}
        resolved = load_config(None, {**SETTINGS, "handoff.secret_file": str(secret), **named})
        made = assemble(resolved)
        assert made.pages is not None
        self.engine: Any = made.engine
        self.weights = made.weights
        # A step of this model is so short that computing may win by the clock of a busy machine.
        scheduler(self.engine).memory.costs.note_commit = lambda *args: None
        self.counts = HandoffCounts()
        setup = HandoffSetup(resolved.config.handoff, made.pages)
        exchanger = Exchanger(self.engine)
        self.sender = HandoffSender(setup, exchanger, self.counts)
        self.receiver = HandoffReceiver(setup, exchanger, self.counts)
        self.sender.start()
        self.engine.start()

    def close(self) -> None:
        self.sender.stop()
        self.receiver.close()
        self.engine.stop()
        scheduler(self.engine).check()


@contextlib.contextmanager
def side(*args: Any, **overrides: Any) -> Iterator[Side]:
    made = Side(*args, **overrides)
    try:
        yield made
    finally:
        made.close()


def answer(engine: Any, request: Any) -> tuple[list[Any], int]:
    """Tokens and log-probabilities of all sequences, and how many tokens of the prompt were found."""
    done, found = threading.Event(), []
    parts: list[list[Any]] = [[] for _ in range(request.sampling.n)]

    def sink(update: Any) -> None:
        parts[update.index] += [update.token_ids, *(entry.token_id for entry in update.logprobs or ())]
        if update.prompt is not None:
            found.append(update.prompt.num_cached_tokens)
        assert update.error is None, update
        if update.last:
            done.set()

    engine.submit(request, sink)
    assert done.wait(300)
    return parts, found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [
        pytest.param(
            {"cache__page_size": 32, "cache__num_pages": 20, "parallel__tensor": 2}, id="tensor 2, pages of 32"
        ),
        pytest.param(
            {"cache__page_size": 8, "cache__num_pages": 80, "kernels__paged_attention": "xla_batched"},
            id="another kernel, pages of 8",
        ),
    ],
)
def test_tokens_are_those_of_one_engine_alone(tmp_path: Path, other: dict[str, Any]) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    with side(secret, **other) as sender, side(secret, handoff__role="decode") as receiver:
        compiles = CompileCounter()
        for number, sampling in enumerate(SAMPLINGS):
            request = receiver.engine.prepare(PROMPT[number:], sampling)
            expected, _ = answer(receiver.engine, request)
            receiver.engine.call(lambda scheduler: scheduler.flush(None)).result()
            # As `HandoffService` computes a prompt: a request that generates nothing.
            num_full = sender.sender.num_full(request)
            alone = sender.engine.prepare(PROMPT[number : number + num_full], pooling_params())
            answer(sender.engine, dataclasses.replace(alone, pooling=Pooling.LAST, max_tokens=0))
            ticket, num_tokens = sender.sender.lend(sender.sender.leases.reserve(), request)
            assert num_tokens == num_full
            receipt = Receipt()
            receiver.receiver.fetch(request, receiver.receiver.open(request, ticket), receipt)
            again = dataclasses.replace(request, request_id=f"again {number}")
            found_tokens, found = answer(receiver.engine, again)
            receiver.receiver.release(receipt)
            assert found_tokens == expected and found == num_full // 16 * 16
        assert not receiver.counts.missed and compiles.count == 0
        assert sender.counts.bytes_sent == receiver.counts.bytes_pulled > 0


@pytest.mark.slow
def test_pages_of_other_weights_are_not_fetched_until_both_have_the_same(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    _, params = load_trainable("demo")
    with side(secret) as sender, side(secret, handoff__role="decode") as receiver:
        request = receiver.engine.prepare(PROMPT, SAMPLINGS[0])
        expected, _ = answer(receiver.engine, request)
        receiver.engine.call(lambda scheduler: scheduler.flush(None)).result()
        sender.weights.update({name: array * 1.5 for name, array in params.items()}, "other", "recompute")
        answer(sender.engine, sender.engine.prepare(PROMPT, SAMPLINGS[0]))
        ticket, num_tokens = sender.sender.lend(sender.sender.leases.reserve(), request)
        assert num_tokens > 0
        receipt = Receipt()
        receiver.receiver.fetch(request, receiver.receiver.open(request, ticket), receipt)
        assert answer(receiver.engine, dataclasses.replace(request, request_id="again")) == (expected, 0)
        receiver.receiver.release(receipt)
        assert receiver.counts.missed == {"mismatch": num_tokens}
        receiver.engine.call(lambda scheduler: scheduler.flush(None)).result()
        sender.weights.update("demo", "as at the start", "recompute")
        answer(sender.engine, sender.engine.prepare(PROMPT, SAMPLINGS[0]))
        ticket, _ = sender.sender.lend(sender.sender.leases.reserve(), request)
        receipt = Receipt()
        receiver.receiver.fetch(request, receiver.receiver.open(request, ticket), receipt)
        assert answer(receiver.engine, dataclasses.replace(request, request_id="a third time")) == (expected, 144)
        receiver.receiver.release(receipt)


def test_settings_that_cannot_work_are_refused_at_the_start(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    for changes, message in (
        ({"handoff.secret_file": None, "handoff.role": "prefill"}, "handoff.secret_file is not"),
        ({"cache.host_bytes": 0}, "set cache.host_bytes"),
        ({"cache.prefix_caching": False}, "set cache.prefix_caching"),
        ({"parallel.data": 2}, "set parallel.data to 1"),
        ({"serve.grpc.port": None}, "set serve.grpc.port"),
        ({"handoff.tls_cert": "x"}, "TLS needs all"),
        ({"handoff.tls_name": "x"}, "have no TLS"),
    ):
        config = {
            "model.path": "demo",
            "serve.grpc.port": 0,
            "cache.host_bytes": 1 << 20,
            "handoff.secret_file": str(secret),
        }
        with pytest.raises(ConfigError, match=message):
            assemble(load_config(None, config | changes))
