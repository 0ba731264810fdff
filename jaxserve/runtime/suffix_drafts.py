"""Drafts from past answers: what followed the same tokens in this sequence, or in an answer that has ended.

Answers to requests of one kind often have long pieces in common (suffix decoding: arXiv:2411.04975). A sequence is
compared with its own tokens and with the latest answers of the same origin, that is, of requests with the same tenant
and cache salt: an answer never shapes the steps of somebody who could not have asked for it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxserve.errors import ConfigError
from jaxserve.runtime.drafting import (
    DrafterOptions,
    DrafterState,
    DraftSizes,
    TokenDrafter,
    read_history,
    run_lengths,
    write_history,
)
from jaxserve.runtime.row_state import NO_TOKEN


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SuffixState:
    """The arrays of a `SuffixDrafter` on the device.

    Attributes:
      history: latest tokens of each row, as `drafting.write_history` keeps them.
      origins: of the sequence of each row, two halves of a hash.
      answers: past ones, from their first token on; NO_TOKEN behind the last.
      answer_origins: theirs.
      oldest: the answer that the next one replaces.
    """

    history: Int[Array, "R+1 W"]
    origins: Int[Array, "R+1 2"]
    answers: Int[Array, "S C"]
    answer_origins: Int[Array, "S 2"]
    oldest: Int[Array, ""]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SuffixDrafter:
    """The longest run of last tokens that stands in the past, and what followed it there.

    Of equally long runs the sequence's own come first, then the answer that came last in the table; within one, the
    latest place. `num_answers` of up to `answer_len` tokens are kept, the oldest going first.
    """

    min_len: int
    max_len: int
    num_answers: int
    answer_len: int

    def init_state(self, sizes: DraftSizes) -> SuffixState:
        return SuffixState(
            history=jnp.full((sizes.max_rows + 1, sizes.window), NO_TOKEN, jnp.int32),
            origins=jnp.zeros((sizes.max_rows + 1, 2), jnp.int32),
            answers=jnp.full((self.num_answers, self.answer_len), NO_TOKEN, jnp.int32),
            answer_origins=jnp.zeros((self.num_answers, 2), jnp.int32),
            oldest=jnp.int32(0),
        )

    def observe(self, state: SuffixState, rows, positions, tokens, known) -> DrafterState:
        history = write_history(state.history, rows, positions, tokens, known)
        return dataclasses.replace(state, history=history)

    def enter(self, state: SuffixState, rows: Int[Array, " M"], origins: Int[Array, "M 2"]) -> SuffixState:
        """Sequences of these origins got rows; row max_rows for none."""
        return dataclasses.replace(state, origins=state.origins.at[rows].set(origins))

    def leave(
        self,
        state: SuffixState,
        rows: Int[Array, " M"],
        prompt_lens: Int[Array, " M"],
        lengths: Int[Array, " M"],
    ) -> SuffixState:
        """Rows with sequences of `lengths` tokens were given up: their answers join the past ones. Row max_rows: none.

        An answer is kept with the few tokens before it, so that its beginning can be found, too.
        """
        size, window = self.answer_len, state.history.shape[1]
        first = jnp.maximum(jnp.maximum(prompt_lens - self.max_len, lengths - window), 0)
        place = first[:, None] + jnp.arange(size)  # [M, C], positions
        tokens = jnp.where(place < lengths[:, None], state.history[rows[:, None], place % window], NO_TOKEN)
        kept = (rows < state.history.shape[0] - 1) & (lengths > prompt_lens)
        slot = (state.oldest + jnp.cumsum(kept, dtype=jnp.int32) - 1) % self.num_answers
        slot = jnp.where(kept, slot, self.num_answers)
        return dataclasses.replace(
            state,
            answers=state.answers.at[slot].set(tokens, mode="drop"),
            answer_origins=state.answer_origins.at[slot].set(state.origins[rows], mode="drop"),
            oldest=(state.oldest + jnp.sum(kept, dtype=jnp.int32)) % self.num_answers,
        )

    def propose(self, state: SuffixState, rows, lengths, count) -> Int[Array, "R count"]:
        tokens = read_history(state.history, rows, lengths)  # [R, W]
        last = tokens[:, -1 : -self.max_len - 1 : -1]  # [R, max_len], newest first
        num_rows, window = tokens.shape
        own = run_lengths(tokens, last).at[:, -1].set(0)  # what ends at the end is the end itself
        mine = jnp.all(state.answer_origins == state.origins[rows][:, None, :], axis=2)  # [R, S]
        past = run_lengths(state.answers, last[:, None, :])  # [R, S, C]
        past = jnp.where(mine[:, :, None], past, 0).reshape(num_rows, -1)
        # Places of the own tokens stand behind those of the past, so that they win ties.
        runs = jnp.concatenate([past, own], axis=1)
        places = runs.shape[1]
        score = jnp.where(runs >= self.min_len, runs * places + jnp.arange(places), -1)
        best = jnp.argmax(score, axis=1)[:, None]  # [R, 1]
        found = jnp.take_along_axis(score, best, axis=1) >= 0
        num_past = self.num_answers * self.answer_len
        at = best - num_past  # in the own tokens; negative: in the past
        distance = jnp.maximum(window - 1 - at, 1)
        step = jnp.arange(count)
        own_drafts = jnp.take_along_axis(tokens, jnp.clip(at + 1 + step % distance, 0, window - 1), axis=1)
        # Behind the end of an answer stands NO_TOKEN, or the next answer.
        within = best % self.answer_len + 1 + step < self.answer_len
        flat = state.answers.reshape(-1)
        past_drafts = jnp.where(within, flat[jnp.minimum(best + 1 + step, num_past - 1)], NO_TOKEN)
        return jnp.where(found, jnp.where(at >= 0, own_drafts, past_drafts), NO_TOKEN)


def make_suffix(options: DrafterOptions) -> TokenDrafter:
    """`speculation.method: suffix`. Raises ConfigError."""
    if options.answer_len <= options.ngram_max:
        raise ConfigError(
            f"speculation.answer_len is {options.answer_len} and speculation.ngram_max {options.ngram_max}; an answer "
            "is kept with so many tokens before it: make answer_len larger"
        )
    return SuffixDrafter(
        min_len=options.ngram_min,
        max_len=options.ngram_max,
        num_answers=options.num_answers,
        answer_len=options.answer_len,
    )
