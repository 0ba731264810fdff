"""The loads of every engine, and their requests for each round.

Prompts are new in each round, so that no cache of prefixes remembers a round before, and the same for all engines in
it.
"""

import dataclasses
import zlib

import numpy as np

from jaxserve.lab.workloads.arrivals import ArrivalOptions, draw_times
from peers.values import Ask

WORKLOADS = {
    "one": "1 stream: {prompt} tokens in, {output} out",
    "streams": "{streams} streams: {prompt} tokens in, {output} out, all at once",
    "short_prefill": "1 prompt of {short_prefill} tokens, 1 token out",
    "prefill": "1 prompt of {prefill} tokens, 1 token out",
    "long_prefill": "1 prompt of {long_prefill} tokens, 1 token out",
    "mixed": "{requests} at once, {mixed_prompt[0]}-{mixed_prompt[1]} in, {mixed_output[0]}-{mixed_output[1]} out",
    "poisson": "the same {requests} as a Poisson process",
    "shared": "{requests} at once: {prefix} equal tokens and {tail[0]}-{tail[1]} others in, {shared_output} out",
}
_FIRST_TOKEN = 3  # below are the special ones of many vocabularies


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Lengths in tokens (pairs: drawn evenly from first to last), `streams` and `requests` in requests."""

    prompt: int = 128
    output: int = 64
    streams: int = 16
    short_prefill: int = 128
    prefill: int = 512
    long_prefill: int = 512
    requests: int = 64
    mixed_prompt: tuple[int, int] = (16, 512)
    mixed_output: tuple[int, int] = (16, 256)
    prefix: int = 400
    tail: tuple[int, int] = (16, 64)
    shared_output: int = 32

    @property
    def max_len(self) -> int:
        """Tokens of the longest request."""
        return max(
            self.prompt + self.output,
            max(self.short_prefill, self.prefill, self.long_prefill) + 1,
            self.mixed_prompt[1] + self.mixed_output[1],
            self.prefix + self.tail[1] + self.shared_output,
        )

    @property
    def max_requests(self) -> int:
        return max(self.streams, self.requests)


TINY = Sizes(
    prompt=8,
    output=6,
    streams=3,
    short_prefill=16,
    prefill=32,
    long_prefill=48,
    requests=5,
    mixed_prompt=(2, 12),
    mixed_output=(2, 8),
    prefix=32,
    tail=(2, 5),
    shared_output=4,
)


def describe(name: str, sizes: Sizes) -> str:
    return WORKLOADS[name].format(**dataclasses.asdict(sizes))


def make_asks(name: str, round_number: int, vocab: int, sizes: Sizes, rate: float | None = None) -> list[Ask]:
    """The requests of one round. `rate`, in requests a second, is needed by "poisson" alone."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), round_number])

    def ids(length: int) -> tuple[int, ...]:
        return tuple(rng.integers(_FIRST_TOKEN, vocab, length).tolist())

    def lengths(ends: tuple[int, int]) -> list[int]:
        return rng.integers(ends[0], ends[1] + 1, sizes.requests).tolist()

    match name:
        case "one" | "streams":
            count = sizes.streams if name == "streams" else 1
            return [Ask(prompt=ids(sizes.prompt), num_tokens=sizes.output) for _ in range(count)]
        case "short_prefill" | "prefill" | "long_prefill":
            return [Ask(prompt=ids(getattr(sizes, name)), num_tokens=1)]
        case "shared":
            prefix = ids(sizes.prefix)
            return [Ask(prompt=prefix + ids(n), num_tokens=sizes.shared_output) for n in lengths(sizes.tail)]
        case "mixed" | "poisson":
            prompts, outputs = lengths(sizes.mixed_prompt), lengths(sizes.mixed_output)
            dues_s = [0.0] * sizes.requests
            if name == "poisson":
                assert rate is not None, "a process needs its rate"
                dues_s = draw_times(sizes.requests, ArrivalOptions(rate=rate), round_number).tolist()
            return [Ask(prompt=ids(p), num_tokens=o, due_s=d) for p, o, d in zip(prompts, outputs, dues_s, strict=True)]
    raise KeyError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}")


def make_again(asks: list[Ask], attempt: int, vocab: int) -> list[Ask]:
    """The same requests in other tokens, for a run that is repeated: no cache of prefixes remembers the run before.

    Every token is replaced by another one, the same everywhere, so that lengths, times and equal prefixes stay.
    """
    others = _FIRST_TOKEN + np.random.default_rng([attempt, vocab]).permutation(vocab - _FIRST_TOKEN)
    return [
        dataclasses.replace(ask, prompt=tuple(others[np.asarray(ask.prompt) - _FIRST_TOKEN].tolist())) for ask in asks
    ]


def make_warm_up(asks: list[Ask]) -> list[Ask]:
    """The same shapes for a start: all at once, a few tokens each, and other tokens, so that nothing is remembered."""
    return [Ask(prompt=ask.prompt[::-1], num_tokens=min(ask.num_tokens, 8)) for ask in asks]


def make_touch(vocab: int) -> list[Ask]:
    """A little work, with which a process that was stopped has its memory and threads at hand again."""
    rng = np.random.default_rng()  # new each time: nothing may be remembered
    return [Ask(prompt=tuple(rng.integers(_FIRST_TOKEN, vocab, 32).tolist()), num_tokens=4)]
