"""Datasets by name, and the synthetic ones: the lengths of requests, and the beginnings that they share.

Files are read in `traces` and `custom`, conversations made in `sessions`, tokens in `prompts`. Everything is drawn from
one seed, one request at a time.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.lab.workloads.custom import read_custom
from jaxserve.lab.workloads.prompts import PromptMaker, make_sample
from jaxserve.lab.workloads.samples import Part, Sample, Shape
from jaxserve.lab.workloads.sessions import SessionOptions, session_turns
from jaxserve.lab.workloads.sharegpt import MAX_PROMPT, MAX_TOTAL, MIN_LEN, read_sharegpt
from jaxserve.lab.workloads.traces import read_azure, read_burstgpt, read_mooncake

# Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023, figure 11:
# ShareGPT has 161.31 prompt tokens and 337.99 output tokens on average. The figure shows densities that fall off with a
# long tail; log-normals have that shape. Their spread is assumed, their location is solved so that the means are the
# published ones after the limits below, which are those of vLLM's own sampling of that dataset.
SHAREGPT_PROMPT = (4.506, 1.5)  # mean and deviation of the logarithm
SHAREGPT_OUTPUT = (5.420, 1.1)
_MAX_FACTOR = 1000  # of lengths; with larger ones they are beyond any memory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOptions:
    """The requests of a dataset.

    Attributes:
      name: one of `DATASET_NAMES`.
      path: of the trace, of the JSONL file, or of ShareGPT's own file.
      num_prompts: of a trace or file the first so many; None takes all.
      input_len, output_len: tokens; of a JSONL file, output_len for lines without their own.
      range_ratio: random: lengths are even in [len x (1 - r), len x (1 + r)].
      length_cv: lognormal: deviation of the lengths over their mean; input_len and output_len are the means.
      num_prefixes, prefix_len: prefix-repetition: how many beginnings, and their tokens; input_len comes after them.
        agent: prefix_len tokens begin every session; input_len and output_len are means of each turn.
      session_rate: agent: sessions that start in a second, a Poisson process.
      turns, think_s, max_session_len: agent: see `SessionOptions`.
      length_scale: sharegpt and traces: every length is multiplied by it, for models of short context.
      speed: traces: how much faster than they were recorded.
    """

    name: str = "random"
    path: Path | None = None
    num_prompts: int | None = 100
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    length_cv: float = 1.0
    num_prefixes: int = 10
    prefix_len: int = 256
    session_rate: float = 0.1
    turns: float = 6.0
    think_s: float = 8.0
    max_session_len: int = 32768
    length_scale: float = 1.0
    speed: float = 1.0
    seed: int = 0

    def as_json(self) -> dict[str, Any]:
        """Every option as a plain value, the name under "dataset"."""
        tree = dataclasses.asdict(self)
        return {"dataset": tree.pop("name"), **tree, "path": None if self.path is None else str(self.path)}


def make_samples(options: DatasetOptions, maker: PromptMaker) -> list[Sample]:
    """The requests of a dataset, in order. Raises ConfigError for options or a file that cannot be used."""
    check_dataset(options)
    if options.name == "custom":
        assert options.path is not None, "checked above"
        samples = read_custom(options.path, options.output_len, options.num_prompts)
        if any(sample.pictures for sample in samples):
            raise ConfigError(
                f"{options.path} has pictures without pixels, which can only be simulated (jaxserve simulate); leave "
                "them out to send its prompts to a server"
            )
    else:
        samples = [make_sample(shape, maker) for shape in make_shapes(options)]
    if not samples:
        raise ConfigError(f"the dataset {options.name} has no requests; look at {options.path or 'num_prompts'}")
    return samples


def make_shapes(options: DatasetOptions) -> list[Shape]:
    """`iter_shapes`, all of them."""
    return list(iter_shapes(options))


def iter_shapes(options: DatasetOptions) -> Iterator[Shape]:
    """The shapes of any dataset but 'custom', in order, one at a time. Raises ConfigError, of options at once."""
    check_dataset(options)
    if options.name in _TRACES:
        assert options.path is not None, "checked above"
        return _sped_up(_TRACES[options.name](options.path, options.num_prompts, options.length_scale), options.speed)
    if options.path is not None:
        return read_sharegpt(options.path, options.num_prompts, options.length_scale)
    assert options.num_prompts is not None, "checked above"
    return _SYNTHETIC[options.name](options, options.num_prompts, np.random.default_rng(options.seed))


def _sped_up(trace: Iterator[Shape], speed: float) -> Iterator[Shape]:
    for shape in trace:
        assert shape.arrival_s is not None, "traces have times"
        yield dataclasses.replace(shape, arrival_s=shape.arrival_s / speed)


def _random(options: DatasetOptions, count: int, rng: np.random.Generator) -> Iterator[Shape]:
    prompt_lens = _around(options.input_len, options.range_ratio, count, rng)
    output_lens = _around(options.output_len, options.range_ratio, count, rng)
    for key, (prompt_len, output_len) in enumerate(zip(prompt_lens, output_lens, strict=True)):
        yield Shape(parts=(Part(key, int(prompt_len)),), output_len=int(output_len))


def _around(length: int, ratio: float, count: int, rng: np.random.Generator) -> np.ndarray:
    low, high = max(1, int(np.floor(length * (1 - ratio)))), int(np.ceil(length * (1 + ratio)))
    return rng.integers(low, high, size=count, endpoint=True)


def _lognormal(options: DatasetOptions, count: int, rng: np.random.Generator) -> Iterator[Shape]:
    """Of mean m and coefficient of variation c: the logarithm has variance s2 = ln(1 + c^2) and mean ln(m) - s2 / 2."""
    variance = math.log1p(options.length_cv**2)
    for number in range(count):
        lengths = [
            max(1, round(float(np.exp(rng.normal(math.log(mean) - variance / 2, math.sqrt(variance))))))
            for mean in (options.input_len, options.output_len)
        ]
        yield Shape(parts=(Part(number, lengths[0]),), output_len=lengths[1])


def _sharegpt(options: DatasetOptions, count: int, rng: np.random.Generator) -> Iterator[Shape]:
    """By the published lengths; `read_sharegpt` has those of the file."""
    number = 0
    while number < count:
        prompt_len = round(float(np.exp(rng.normal(*SHAREGPT_PROMPT))))
        output_len = round(float(np.exp(rng.normal(*SHAREGPT_OUTPUT))))
        if min(prompt_len, output_len) >= MIN_LEN and prompt_len <= MAX_PROMPT and prompt_len + output_len <= MAX_TOTAL:
            scaled = [max(1, round(length * options.length_scale)) for length in (prompt_len, output_len)]
            yield Shape(parts=(Part(number, scaled[0]),), output_len=scaled[1])
            number += 1


def _prefix_repetition(options: DatasetOptions, count: int, rng: np.random.Generator) -> Iterator[Shape]:
    for number in rng.permutation(count):
        yield Shape(
            parts=(
                Part(int(number) % options.num_prefixes, options.prefix_len),
                Part(options.num_prefixes + int(number), options.input_len),
            ),
            output_len=options.output_len,
        )


def _agent(options: DatasetOptions, count: int, rng: np.random.Generator) -> Iterator[Shape]:
    """`count` turns; the last sessions are cut off where they stand."""
    starts_s = itertools.accumulate(float(rng.exponential(1 / options.session_rate)) for _ in itertools.count())
    sessions = SessionOptions(
        system_len=options.prefix_len,
        turns=options.turns,
        input_len=options.input_len,
        output_len=options.output_len,
        think_s=options.think_s,
        max_len=options.max_session_len,
    )
    return itertools.islice(session_turns(sessions, starts_s, options.seed), count)


_SYNTHETIC: Mapping[str, Callable[[DatasetOptions, int, np.random.Generator], Iterator[Shape]]] = {
    "random": _random,
    "lognormal": _lognormal,
    "sharegpt": _sharegpt,
    "prefix-repetition": _prefix_repetition,
    "agent": _agent,
}
_TRACES: Mapping[str, Callable[[Path, int | None, float], Iterator[Shape]]] = {
    "mooncake": read_mooncake,
    "burstgpt": read_burstgpt,
    "azure": read_azure,
}
DATASET_NAMES = (*_SYNTHETIC, *_TRACES, "custom")


def check_dataset(options: DatasetOptions) -> None:
    """Raises ConfigError for impossible options, without reading files."""
    if options.name not in DATASET_NAMES:
        raise ConfigError(f"there is no dataset {options.name!r}; there are {', '.join(DATASET_NAMES)}")
    from_file = options.name not in _SYNTHETIC or (options.name == "sharegpt" and options.path is not None)
    if from_file and options.path is None:
        raise ConfigError(f"the dataset {options.name} is read from a file: give --dataset-path FILE")
    if not from_file and options.path is not None:
        raise ConfigError(f"the dataset {options.name} reads no file, but --dataset-path is {options.path}")
    if not from_file and options.num_prompts is None:
        raise ConfigError(f"the dataset {options.name} has no end: give --num-prompts")
    at_least_one = ("input_len", "output_len", "num_prefixes", "prefix_len", "num_prompts", "max_session_len")
    for name in at_least_one:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, but must be 1 or more")
    if not 0 <= options.range_ratio < 1:
        raise ConfigError(f"--range-ratio is {options.range_ratio}, but must be in [0, 1)")
    if not (1 <= options.turns < math.inf and 0 <= options.think_s < math.inf):
        raise ConfigError(
            f"--turns is {options.turns} and --think {options.think_s}, but must be numbers from 1 and from 0"
        )
    for name in ("speed", "session_rate"):
        if not 0 < getattr(options, name) < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(options, name)}, but must be a number above 0")
    for name in ("length_cv", "length_scale"):
        if not 0 < getattr(options, name) <= _MAX_FACTOR:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {getattr(options, name)}, but must be above 0 and at most {_MAX_FACTOR}"
            )
