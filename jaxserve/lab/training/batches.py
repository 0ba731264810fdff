"""Rows of tokens for training: several sequences behind each other in a row, so that little of a step is padding."""

import dataclasses
import random
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.lab.training.answers import Example

_SHORT = 4  # rows of a quarter of the length, four times as many, for sequences that fit: attention costs less there
_PATIENCE = 30  # sequences that found no room in a row before a batch counts as full


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """T = rows * row_len tokens of sequences numbered from 0.

    Attributes:
      tokens, positions: [T].
      segments: [T], number of the sequence of each token; `num_segments` for padding.
      weights: [T], of a token as one that is to be guessed; 0 for prompts and for the first token of an answer, which
        is never drafted: the target draws it at the end of the prompt.
      row_len, num_segments: static.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    weights: np.ndarray
    row_len: int = dataclasses.field(metadata={"static": True})
    num_segments: int = dataclasses.field(metadata={"static": True})


def pack_rows(examples: Sequence[Example], num_rows: int, row_len: int) -> tuple[Rows, list[int]]:
    """Puts examples into rows, first fit; returns the numbers of those that found no room, too."""
    shape = (num_rows, row_len)
    tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    weights = np.zeros(shape, np.float32)
    most = num_rows * row_len // 4  # segments, a static size: none has fewer than four tokens
    segments = np.full(shape, most, np.int32)
    used, left, count = [0] * num_rows, [], 0
    for number, example in enumerate(examples):
        size = len(example.prompt) + len(example.answer)
        row = next((r for r in range(num_rows) if used[r] + size <= row_len), None)
        if row is None or count == most:
            left.append(number)
            if len(left) > _PATIENCE:
                left += range(number + 1, len(examples))
                break
            continue
        place = slice(used[row], used[row] + size)
        tokens[row, place] = (*example.prompt, *example.answer)
        positions[row, place] = np.arange(size)
        segments[row, place] = count
        weights[row, used[row] + len(example.prompt) + 1 : used[row] + size] = example.weight
        used[row] += size
        count += 1
    rows = Rows(
        tokens=tokens.reshape(-1),
        positions=positions.reshape(-1),
        segments=segments.reshape(-1),
        weights=weights.reshape(-1),
        row_len=row_len,
        num_segments=most,
    )
    return rows, left


def fitting(examples: Sequence[Example], row_len: int) -> list[Example]:
    """Examples cut to a row: the end of a long answer is left out, and a prompt that fills a row with it.

    Raises ConfigError when nothing is left.
    """
    found = [
        dataclasses.replace(e, answer=e.answer[: row_len - len(e.prompt)])
        for e in examples
        if len(e.prompt) + 3 <= row_len and len(e.answer) >= 3
    ]
    if not found:
        raise ConfigError(
            f"none of {len(examples)} answers has three tokens and a prompt that leaves room for them in a row of "
            f"{row_len}; give other prompts, or longer rows"
        )
    return found


def batches(examples: Sequence[Example], num_rows: int, row_len: int, seed: int, first_step: int) -> Iterator[Rows]:
    """Batches without end, from step `first_step` on: each is a function of (examples, sizes, seed, step).

    A batch has rows of full length, or four times as many of a quarter of it, as often as there are tokens for either.
    """
    short_len = row_len // _SHORT
    short = [e for e in examples if len(e.prompt) + len(e.answer) <= short_len]
    long = [e for e in examples if len(e.prompt) + len(e.answer) > short_len]
    tokens = [sum(len(e.prompt) + len(e.answer) for e in group) for group in (short, long)]
    step = first_step
    while True:
        rng = random.Random(f"{seed} {step}")
        is_short = rng.random() * sum(tokens) < tokens[0]
        group, rows, length = (short, num_rows * _SHORT, short_len) if is_short else (long, num_rows, row_len)
        drawn = rng.choices(group, k=4 * rows * length // max(1, sum(tokens) // len(examples)) + _PATIENCE)
        yield pack_rows(drawn, rows, length)[0]
        step += 1
