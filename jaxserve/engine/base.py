"""`AnyEngine`: the protocol through which front doors use an engine, kept by one engine and by a group of replicas.

A door written against it need not know how many devices, loops and schedulers are behind it. `Answering` is the part of
it that needs none here: a router keeps it, too, whose requests run on servers.
"""

from collections.abc import Callable
from typing import Protocol

from jaxserve.api import NO_OPTIONS, Request, RequestOptions, SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.engine.inputs import ModelInfo, Prompt
from jaxserve.engine.load import NOTHING_PENDING, Load, Pending
from jaxserve.engine.outputs import Sink
from jaxserve.engine.stats import EngineStats
from jaxserve.text.base import Tokenizer
from jaxserve.text.chat import ChatTemplate


class Answering(Protocol):
    """What takes requests and answers them. `Engine` says which methods may be used from which thread."""

    @property
    def model(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def failure(self) -> BaseException | None:
        """Why no request can be answered any more; None while requests can."""
        ...

    @property
    def load(self) -> "Load":
        """The load now."""
        ...

    def prepare(self, prompt: Prompt, sampling: SamplingParams, options: RequestOptions = NO_OPTIONS) -> Request:
        """Encodes and checks; see `Engine.prepare`."""
        ...

    def chat_template(self) -> ChatTemplate:
        """The model's own template; see `Engine.chat_template`."""
        ...

    def submit(self, request: Request, sink: Sink) -> None:
        """Hands over a prepared request; see `Engine.submit`."""
        ...

    def check_room(self, num_sequences: int, owner: str, pending: Pending = NOTHING_PENDING) -> None:
        """Raises QueueFull when this many more would be refused now; see `Engine.check_room`."""
        ...

    def abort(self, *requests: Request) -> None:
        """Ends requests; see `Engine.abort`."""
        ...

    def watch_deliveries(self, tell: Callable[[], None]) -> None:
        """`tell` is called after each turn in which sinks may have been called; see `Engine.watch_deliveries`."""
        ...

    def unwatch_deliveries(self, tell: Callable[[], None]) -> None:
        """Ends what `watch_deliveries` began."""
        ...


class AnyEngine(Answering, Protocol):
    """An `Engine`, or several of them."""

    @property
    def accepting(self) -> bool:
        """False once it drains, stops or has died."""
        ...

    @property
    def ready(self) -> bool:
        """Takes requests, and its steps advance or it has none: new requests should come."""
        ...

    @property
    def stalled_s(self) -> float:
        """Seconds for which a loop has not come round although it has work to do."""
        ...

    @property
    def stats(self) -> tuple[EngineStats, ...]:
        """The statistics of each loop, one for each replica."""
        ...

    @property
    def replicas(self) -> tuple[Engine, ...]:
        """The engines that it is, one at least, for observers and operators; requests go through it."""
        ...

    @property
    def num_live(self) -> int:
        """Requests that have been taken and have not ended."""
        ...

    @property
    def num_unstarted(self) -> int:
        """Requests that have no token yet."""
        ...

    def chat_template(self, source: str | None = None) -> ChatTemplate:
        """The model's own template, or one of Jinja `source`; see `Engine.chat_template`."""
        ...

    def abort(self, *requests: str | Request) -> None:
        """Ends requests; see `Engine.abort`."""
        ...

    def step(self) -> bool:
        """One turn, for a caller that drives the loop by hand. False when there is nothing to do."""
        ...

    def pause(self, most_s: float = ...) -> None:
        """Between two turns: sleeps while all work waits for something outside; see `Engine.pause`."""
        ...

    def run_until_idle(self) -> None:
        """Drives the loop by hand until every request has ended."""
        ...

    def fail(self, error: BaseException) -> None:
        """Declares it dead, for a caller that drives the loop by hand when a step raised."""
        ...

    def start(self) -> None:
        """Gives each loop a thread of its own."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for the live ones. True when all ended in time."""
        ...

    def export(self, timeout_s: float) -> None:
        """Brings pages of the device to the store; see `Engine.export`."""
        ...

    def stop(self, *, hand_over: bool = False) -> None:
        """Refuses new requests, ends the live ones, and ends the threads; see `Engine.stop`."""
        ...
