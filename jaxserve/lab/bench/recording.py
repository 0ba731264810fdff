"""`Recording`: the times of one request, filled by a client while it runs, and turned into an `Outcome` at its end.

Times are those of `time.perf_counter`, in seconds.
"""

import time

from jaxserve.lab.workloads.outcome import Outcome


class RequestFailed(Exception):
    """A request without a whole answer. Failures are counted by `kind`; `detail` is for people."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class Recording:
    """The times so far. Filled by one client for one request."""

    __slots__ = (
        "accepted_tokens",
        "cached_tokens",
        "drafted_tokens",
        "output_times_s",
        "output_tokens",
        "prompt_tokens",
        "start_s",
    )

    def __init__(self) -> None:
        self.start_s = time.perf_counter()
        self.output_times_s: list[float] = []
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.drafted_tokens: int | None = None
        self.accepted_tokens: int | None = None

    def start(self) -> None:
        """The request is sent now."""
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
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            asked_tokens=asked_tokens,
            failure=None if failed is None else failed.kind,
            detail="" if failed is None else failed.detail,
            end_s=self.output_times_s[-1] if failed is None else time.perf_counter(),
        )
