"""What the tests of handoffs share: servers on the fake device, whose pages hold the tokens themselves."""

import contextlib
import math
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from serve_parts import Served, serve_bytes, served

from jaxserve.api import Request
from jaxserve.config.schema import GrpcConfig, HandoffConfig
from jaxserve.engine.exchanging import Exchanger
from jaxserve.kv.handoff import BadFrame, Frame
from jaxserve.sched.page_exchange import Lent, Place
from jaxserve.sched.plan import HostSlots
from jaxserve.serve.handoff import HandoffCounts, HandoffSetup
from jaxserve.serve.handoff_receiver import HandoffReceiver, Receipt
from jaxserve.serve.handoff_sender import HandoffSender
from jaxserve.testing import ManualClock, make_request

_BYTES = 64  # of a token, by which frames are cut: 16 tokens in the least frame
TOKENS = tuple((7 * i) % 100 for i in range(70))


class TokenPages:
    """A `PageForm` of a fake runner. `before_read` is called with the number of each frame, `change` makes its data."""

    describe = "pages of a fake"

    def __init__(self, parts: Served, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.before_read: Callable[[int], None] = lambda number: None
        self.num_frames = 0
        self._slots = parts.runner.inner._slots

    def step(self, page_tokens: int, most_bytes: int) -> int:
        unit = math.lcm(page_tokens, self.page_tokens)
        return unit // self.page_tokens * max(1, most_bytes // (_BYTES * unit))

    def read(self, lent: Lent, begin: int, end: int) -> Frame:
        self.before_read(self.num_frames)
        self.num_frames += 1
        tokens = [token for slot in lent.slots[0][begin:end] for token in self._slots[slot]]
        first, last = begin * self.page_tokens, end * self.page_tokens
        return Frame(first, last, (first,), struct.pack(f"<{len(tokens)}q", *tokens))

    def write(self, frame: Frame, slots: Mapping[Place, int]) -> set[Place]:
        if len(frame.data) != 8 * (frame.end_token - frame.first_token):
            raise BadFrame("its size is wrong")
        tokens = struct.unpack(f"<{len(frame.data) // 8}q", frame.data)
        filled = set()
        for place, slot in slots.items():
            start = place.block * self.page_tokens - frame.first_token
            if start >= 0 and start + self.page_tokens <= len(tokens):
                self._slots[slot] = list(tokens[start : start + self.page_tokens])
                filled.add(place)
        return filled


def secret_file(folder: Path, name: str = "secret") -> str:
    path = folder / name
    path.write_text(f"{name} 0123456789abcdef")
    return str(path)


def fake(page_size: int = 8, num_slots: int = 64, **options: Any) -> Served:
    """A server on the fake device, every token of which follows from all before it."""
    slots = HostSlots(num_slots, 16, 16)
    return serve_bytes(mode="context", page_size=page_size, slots=slots, max_rows=4, vocab_size=100, **options)


@contextlib.contextmanager
def server(
    role: str, secret: str, page_size: int = 8, tokens_file: str | None = None, **options: Any
) -> Iterator[tuple[Served, TokenPages]]:
    """A whole server with a role. Options of `fake`, and `handoff_` those of `HandoffConfig`."""
    given = {name.removeprefix("handoff_"): options.pop(name) for name in [*options] if name.startswith("handoff_")}
    config = HandoffConfig(**{"role": role, "secret_file": secret, "wait_s": 60.0, "least_wait_s": 60.0} | given)
    parts = fake(page_size, **options)
    form = TokenPages(parts, page_size)
    grpc_config = GrpcConfig(port=0, tokens_file=tokens_file)
    with served(parts, grpc_config=grpc_config, handoff=HandoffSetup(config, form)) as running:
        yield running, form


class Side:
    """An engine with one or both sides of handoffs, on clocks of the test."""

    def __init__(self, secret: str, page_size: int = 8, num_slots: int = 64, **handoff: Any) -> None:
        self.clock = ManualClock()
        self.parts = fake(page_size, num_slots)
        self.form = TokenPages(self.parts, page_size)
        config = HandoffConfig(
            **{"secret_file": secret, "wait_s": 60.0, "least_wait_s": 60.0, "frame_bytes": 1024} | handoff
        )
        setup = HandoffSetup(config, self.form)
        self.counts = HandoffCounts()
        self.exchanger = Exchanger(self.parts.engine)
        self.sender = HandoffSender(setup, self.exchanger, self.counts, self.clock)
        self.receiver = HandoffReceiver(setup, self.exchanger, self.counts)
        self.address = self.sender.start()
        self.parts.engine.start()

    def close(self) -> None:
        self.sender.stop()
        self.receiver.close()
        self.parts.engine.stop()
        self.parts.scheduler.check()

    def num_held(self) -> int:
        return self.exchanger.num_held()

    def answer(self, request: Request) -> tuple[list[int], int]:
        """The tokens of a request, and how many of its prompt were found."""
        done = threading.Event()
        tokens: list[int] = []
        found: list[int] = []

        def sink(update: Any) -> None:
            tokens.extend(update.token_ids)
            if update.prompt is not None:
                found.append(update.prompt.num_cached_tokens)
            if update.last:
                done.set()

        self.parts.engine.submit(request, sink)
        assert done.wait(120)
        return tokens, found[0]

    def lend(self, request: Request) -> bytes:
        """Computes the prompt of a request, and lends its pages."""
        self.answer(make_request(f"for {request.request_id}", request.prompt_token_ids, 1))
        return self.sender.lend(self.sender.leases.reserve(), request)[0]

    def fetch(self, request: Request, ticket: bytes) -> tuple[list[int], int]:
        """Answers a request that came with a ticket."""
        receipt = Receipt()
        self.receiver.fetch(request, self.receiver.open(request, ticket), receipt)
        result = self.answer(request)
        self.receiver.release(receipt)
        return result


@contextlib.contextmanager
def sides(folder: Path, *page_sizes: int, **handoff: Any) -> Iterator[list[Side]]:
    """Engines of one fleet, as many as sizes of pages are given."""
    made: list[Side] = []
    try:
        for size in page_sizes:
            made.append(Side(secret_file(folder), size, **handoff))
        yield made
    finally:
        for side in made:
            side.parts.runner.release()
            side.close()
