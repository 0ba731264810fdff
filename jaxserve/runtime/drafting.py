"""Drafters that are told of tokens alone: `TokenDrafter`, their table, and those of a sequence's own tokens.

The steps know them as `drafter.FromTokens`. Drafters with weights are in modules of their own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxserve.errors import ConfigError
from jaxserve.runtime.row_state import NO_TOKEN
from jaxserve.values.registry import Registry

# The arrays of a drafter on the device: a tree with a line for each device row, and one for padding.
DrafterState = Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftSizes:
    """What a drafter may need to know of the model and the device.

    `window`: the latest tokens of a sequence that are kept for look-ups.
    """

    max_rows: int
    max_model_len: int
    window: int


class Observer(Protocol):
    """The part that all drafters have in common. A frozen value whose `repr` tells it from all others; its methods are
    traced into the steps."""

    def init_state(self, sizes: DraftSizes) -> DrafterState:
        """The arrays before the first step."""
        ...

    def observe(
        self,
        state: DrafterState,
        rows: Int[Array, " M"],
        positions: Int[Array, " M"],
        tokens: Int[Array, " M"],
        known: Bool[Array, " M"],
    ) -> DrafterState:
        """Tokens of device rows became known, those of a row in the order of their positions, and each once. Lines that
        are not `known` mean nothing. A `TokenDrafter` is told all, a `Drafter` those that it sees in no `absorb`."""
        ...


class TokenDrafter(Observer, Protocol):
    """Makes drafts of tokens alone.

    It observes tokens of prompts as they are fed and others as they are drawn, before `propose` is asked for what
    follows them.
    """

    def propose(
        self, state: DrafterState, rows: Int[Array, " R"], lengths: Int[Array, " R"], count: int
    ) -> Int[Array, "R count"]:
        """Guesses of the `count` tokens that follow the first `lengths` tokens of each row; NO_TOKEN for no guess.

        What stands behind a NO_TOKEN is not used, nor are numbers outside the vocabulary.
        """
        ...


@runtime_checkable
class LearnsFromAnswers(Protocol):
    """A drafter that keeps answers for sequences to come."""

    def enter(self, state: DrafterState, rows: Int[Array, " M"], origins: Int[Array, "M 2"]) -> DrafterState:
        """Rows were given to sequences; equal origins may learn from each other. Row max_rows: none."""
        ...

    def leave(
        self, state: DrafterState, rows: Int[Array, " M"], prompt_lens: Int[Array, " M"], lengths: Int[Array, " M"]
    ) -> DrafterState:
        """Rows with sequences of `lengths` tokens were given up. Row max_rows: none."""
        ...


def write_history(
    history: Int[Array, "R+1 W"],
    rows: Int[Array, " M"],
    positions: Int[Array, " M"],
    tokens: Int[Array, " M"],
    known: Bool[Array, " M"],
) -> Int[Array, "R+1 W"]:
    """Token p of a row stands at p modulo W; of more than W tokens of a row, the last ones are kept."""
    num_rows, size = history.shape
    lines = jnp.where(known, rows, num_rows)
    newest = jnp.full(num_rows, -1, jnp.int32).at[lines].max(positions, mode="drop")
    lines = jnp.where(positions > newest[rows] - size, lines, num_rows)
    return history.at[lines, positions % history.shape[1]].set(tokens, mode="drop")


def read_history(history: Int[Array, "R+1 W"], rows: Int[Array, " R"], lengths: Int[Array, " R"]) -> Int[Array, "R W"]:
    """The last W tokens of each row, the newest at the end; NO_TOKEN before its first."""
    size = history.shape[1]
    positions = lengths[:, None] - size + jnp.arange(size)
    return jnp.where(positions >= 0, history[rows[:, None], positions % size], NO_TOKEN)


@dataclasses.dataclass(frozen=True, slots=True)
class NoDrafts:
    """None at all: steps of several rounds are bursts of single tokens."""

    def init_state(self, sizes: DraftSizes) -> DrafterState:
        return ()

    def observe(self, state, rows, positions, tokens, known) -> DrafterState:
        return state

    def propose(self, state, rows, lengths, count) -> Int[Array, "R count"]:
        return jnp.full((rows.shape[0], count), NO_TOKEN, jnp.int32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NgramDrafter:
    """What followed the last time: of the sequence's own tokens, prompt and output (prompt lookup decoding).

    The longest run of last tokens, of `min_len` to `max_len` of them, that stands earlier in the window, and of
    these places the latest; the drafts are the tokens that follow there. Where the run overlaps the end, so do the
    drafts: a sequence that repeats a phrase is drafted on and on.
    """

    min_len: int
    max_len: int

    def __post_init__(self) -> None:
        if not 1 <= self.min_len <= self.max_len:
            raise ConfigError(
                f"speculation.ngram_min is {self.min_len} and speculation.ngram_max {self.max_len}; the first must be "
                "1 or more, and at most the second"
            )

    def init_state(self, sizes: DraftSizes) -> DrafterState:
        return jnp.full((sizes.max_rows + 1, sizes.window), NO_TOKEN, jnp.int32)

    def observe(self, state, rows, positions, tokens, known) -> DrafterState:
        return write_history(state, rows, positions, tokens, known)

    def propose(self, state, rows, lengths, count) -> Int[Array, "R count"]:
        return follow(read_history(state, rows, lengths), self.min_len, self.max_len, count)


def follow(tokens: Int[Array, "R W"], min_len: int, max_len: int, count: int) -> Int[Array, "R count"]:
    """The `count` tokens that follow the latest of the longest earlier places of the last tokens; see `NgramDrafter`.

    `tokens` are right-aligned, with NO_TOKEN before the first.
    """
    size = tokens.shape[1]
    run = run_lengths(tokens, tokens[:, -1 : -max_len - 1 : -1])
    end = jnp.arange(size)
    score = jnp.where((run >= min_len) & (end < size - 1), run * size + end, -1)
    best = jnp.argmax(score, axis=1)  # [R]
    found = jnp.take_along_axis(score, best[:, None], axis=1) >= 0  # [R, 1]
    distance = size - 1 - best[:, None]  # of the repetition, 1 or more
    place = best[:, None] + 1 + jnp.arange(count) % distance
    return jnp.where(found, jnp.take_along_axis(tokens, place, axis=1), NO_TOKEN)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOptions:
    """Settings of `speculation:` that the built-in drafters know."""

    ngram_min: int
    ngram_max: int
    num_answers: int
    answer_len: int
    model: str | None
    replay_errors: float


def run_lengths(tokens: Int[Array, "*B L"], last: Int[Array, "*B n"]) -> Int[Array, "*B L"]:
    """How many tokens that end at each place are those of `last`, which has the newest first; n at most.

    Leading axes broadcast. NO_TOKEN is equal to nothing.
    """
    size, run = tokens.shape[-1], jnp.int32(0)
    alive = jnp.bool_(True)
    front = [(0, 0)] * (tokens.ndim - 1)
    for back in range(last.shape[-1]):
        shifted = jnp.pad(tokens, [*front, (back, 0)], constant_values=NO_TOKEN)[..., :size]
        alive = alive & (shifted == last[..., back, None]) & (shifted != NO_TOKEN)
        run = run + alive
    return run


DRAFTERS: Registry[Callable[[DrafterOptions], TokenDrafter]] = Registry(
    "drafter",
    "jaxserve.drafters",
    {
        "none": "jaxserve.runtime.drafting:make_none",
        "grammar": "jaxserve.runtime.drafting:make_none",
        "ngram": "jaxserve.runtime.drafting:make_ngram",
        "suffix": "jaxserve.runtime.suffix_drafts:make_suffix",
        "replay": "jaxserve.runtime.replay_drafts:make_replay",
    },
)


def make_none(options: DrafterOptions) -> TokenDrafter:
    """`speculation.method: none`, and `grammar`: rows with a grammar have the host's drafts, whatever the method."""
    return NoDrafts()


def make_ngram(options: DrafterOptions) -> TokenDrafter:
    """`speculation.method: ngram`."""
    return NgramDrafter(min_len=options.ngram_min, max_len=options.ngram_max)
