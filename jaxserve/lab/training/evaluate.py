"""How many tokens a step would give with a head, counted without an engine.

A chain of guesses depends on the right tokens before it alone, so one forward pass over an answer says for every place
how long a draft that begins there would be taken. Steps then walk over the answer: each gives the guesses that were
taken and the target's own token behind them.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.lab.training.answers import Example
from jaxserve.lab.training.batches import Rows, fitting, pack_rows
from jaxserve.lab.training.losses import LossOptions, first_matches
from jaxserve.models.loading import LoadedModel
from jaxserve.models.trainable import whole_graphdef

_ROWS = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Counts over some answers.

    Attributes:
      tokens: of the answers, the first of each left out: the end of the prompt gives it.
      steps: that they took.
      taken: drafts whose guesses were taken up to each place.
      possible: drafts that had a token at each place: an answer may end before.
    """

    tokens: int
    steps: int
    taken: tuple[int, ...]
    possible: tuple[int, ...]

    @property
    def tokens_per_step(self) -> float:
        """1 without drafts."""
        return self.tokens / max(1, self.steps)

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the drafts that had a token at each place, those taken up to it."""
        return tuple(t / max(1, p) for t, p in zip(self.taken, self.possible, strict=True))

    def describe(self) -> str:
        """In words."""
        shares = ", ".join(f"{100 * share:.1f} %" for share in self.shares)
        return f"{self.tokens_per_step:.2f} tokens a step, taken by place {shares}"

    def __add__(self, other: "Accepted") -> "Accepted":
        """Of both."""
        return Accepted(
            tokens=self.tokens + other.tokens,
            steps=self.steps + other.steps,
            taken=tuple(a + b for a, b in zip(self.taken, other.taken, strict=True)),
            possible=tuple(a + b for a, b in zip(self.possible, other.possible, strict=True)),
        )


def measure(
    model: LoadedModel,
    head: nnx.GraphDef,
    state: nnx.State,
    examples: Sequence[Example],
    options: LossOptions,
    row_len: int,
) -> Accepted:
    """Walks over the answers of `examples`, each cut to a row."""
    matches = jax.jit(functools.partial(_matches, head, whole_graphdef(model), options))
    total = Accepted(tokens=0, steps=0, taken=(0,) * options.num_places, possible=(0,) * options.num_places)
    waiting = fitting([dataclasses.replace(e, weight=1.0) for e in examples], row_len)
    while waiting:
        rows, left = pack_rows(waiting, _ROWS, row_len)
        found = np.asarray(matches(state, model.state, rows))
        for segment in range(int(rows.segments[rows.segments < rows.num_segments].max()) + 1):
            (where,) = np.nonzero((rows.segments == segment) & (rows.weights > 0))
            total = total + walk(found[where - 1], options.num_places)
        waiting = [waiting[number] for number in left]
    return total


def _matches(
    head: nnx.GraphDef, target: nnx.GraphDef, options: LossOptions, state: nnx.State, weights: nnx.State, rows: Rows
) -> jax.Array:
    starts = jnp.arange(rows.tokens.shape[0]).reshape(-1, rows.row_len)
    return first_matches(nnx.merge(head, state), nnx.merge(target, weights), rows, starts, options)


def walk(lengths: Sequence[int] | np.ndarray, num_places: int) -> Accepted:
    """Steps over the tokens of an answer: `lengths[i]` guesses are taken of a draft that begins before token i."""
    at = steps = 0
    taken, possible = [0] * num_places, [0] * num_places
    while at < len(lengths):
        length = int(lengths[at])
        for place in range(num_places):
            taken[place] += length > place
            possible[place] += at + place < len(lengths)
        steps += 1
        at += length + 1
    return Accepted(tokens=len(lengths), steps=steps, taken=tuple(taken), possible=tuple(possible))
