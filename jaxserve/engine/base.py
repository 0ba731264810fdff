"""What front doors use of an engine, whichever it is.

Owns the protocol that one engine and a group of replicas both keep. Holds no code: a door written against it need not
know how many devices, loops and schedulers are behind it.
"""

from typing import Protocol

from jaxserve.api import Request, SamplingParams
from jaxserve.engine.inputs import ModelInfo, Prompt
from jaxserve.engine.outputs import Sink
from jaxserve.text.base import Tokenizer
from jaxserve.text.chat import ChatTemplate


class AnyEngine(Protocol):
    """An `Engine`, or several of them. `Engine` says which methods may be used from which thread."""

    @property
    def model(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def failure(self) -> BaseException | None:
        """Why nothing can be answered any more; None while something can."""
        ...

    @property
    def accepting(self) -> bool:
        """False once it drains, stops or has died."""
        ...

    @property
    def stalled_s(self) -> float:
        """Seconds for which a loop has not come round although it has work."""
        ...

    @property
    def num_live(self) -> int:
        """Requests that have been taken and have not ended."""
        ...

    @property
    def num_unstarted(self) -> int:
        """Requests that have no token yet."""
        ...

    def prepare(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        add_special_tokens: bool = True,
    ) -> Request:
        """Encodes and checks; see `Engine.prepare`."""
        ...

    def chat_template(self, source: str | None = None) -> ChatTemplate:
        """The model's own template, or one of Jinja `source`; see `Engine.chat_template`."""
        ...

    def submit(self, request: Request, sink: Sink, *, echo: bool = False) -> None:
        """Hands over a prepared request; see `Engine.submit`."""
        ...

    def abort(self, request: str | Request) -> None:
        """Ends a request; see `Engine.abort`."""
        ...

    def step(self) -> bool:
        """One turn, for whoever drives the loop by hand. False when there is nothing to do."""
        ...

    def run_until_idle(self) -> None:
        """Drives the loop by hand until every request has ended."""
        ...

    def fail(self, error: BaseException) -> None:
        """Declares it dead, for whoever drives the loop by hand when a step raised."""
        ...

    def start(self) -> None:
        """Gives each loop a thread of its own."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for the live ones. True when all ended in time."""
        ...

    def stop(self) -> None:
        """Refuses new requests, ends the live ones with ABORT, and ends the threads."""
        ...
