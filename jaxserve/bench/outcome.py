"""What became of one request, in plain times.

Owns `Recording`, which a client fills, and the frozen `Outcome` that it leaves. Refuses to compute (`metrics`). Times
are those of `time.perf_counter`, in seconds.
"""

import dataclasses
import time


class RequestFailed(Exception):
    """A request without a whole answer. `kind` is counted by, `detail` is for reading."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request.

    Attributes:
      start_s: when it was handed to the network.
      output_times_s: when each piece of output came; a piece may have several tokens.
      prompt_tokens: as the server counts, else as the dataset did.
      output_tokens: as the server counts; None when it does not say.
      cached_tokens: prompt tokens that the server had cached; None when it does not say.
      asked_tokens: the output length that was asked for.
      failure: kind of failure; None for an answer.
      end_s: of a failure, when it was noticed; else the last piece.
    """

    start_s: float
    output_times_s: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int | None = None
    cached_tokens: int | None = None
    asked_tokens: int = 0
    failure: str | None = None
    detail: str = ""
    end_s: float = 0.0


class Recording:
    """What is known so far. Filled by one client for one request."""

    __slots__ = ("cached_tokens", "output_times_s", "output_tokens", "prompt_tokens", "start_s")

    def __init__(self) -> None:
        self.start_s = time.perf_counter()
        self.output_times_s: list[float] = []
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None

    def start(self) -> None:
        """The request leaves now."""
        self.start_s = time.perf_counter()

    def finish(self, prompt_len: int, asked_tokens: int, failed: RequestFailed | None) -> Outcome:
        """`prompt_len` stands in where the server did not count."""
        if failed is None and not self.output_times_s:
            failed = RequestFailed("no output", "the answer ended without any output")
        return Outcome(
            start_s=self.start_s,
            output_times_s=tuple(self.output_times_s),
            prompt_tokens=prompt_len if self.prompt_tokens is None else self.prompt_tokens,
            output_tokens=self.output_tokens,
            cached_tokens=self.cached_tokens,
            asked_tokens=asked_tokens,
            failure=None if failed is None else failed.kind,
            detail="" if failed is None else failed.detail,
            end_s=self.output_times_s[-1] if failed is None else time.perf_counter(),
        )
