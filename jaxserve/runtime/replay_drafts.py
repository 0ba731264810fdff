"""Drafts from a recording, with a chosen share of errors: what speculation costs and gains at a known acceptance.

For tests and benchmarks. The recording has whole sequences; a row is recognised by its prompt.
"""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxserve.errors import ConfigError
from jaxserve.runtime.drafting import DrafterOptions, DrafterState, DraftSizes, TokenDrafter, write_history
from jaxserve.runtime.row_state import NO_TOKEN


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayDrafter:
    """Proposes what the recording has, and of a share `errors` of all positions another token.

    `sequences` are token ids of a prompt and its answer, with the number of those that are the prompt.
    """

    sequences: tuple[tuple[int, tuple[int, ...]], ...] = dataclasses.field(repr=False)
    digest: str
    errors: float

    def init_state(self, sizes: DraftSizes) -> DrafterState:
        longest = max(len(tokens) for _, tokens in self.sequences)
        if longest > sizes.window:
            raise ConfigError(
                f"speculation.model has a sequence of {longest} tokens, but {sizes.window} are kept to recognise it; "
                "raise speculation.window, or record shorter ones"
            )
        return jnp.full((sizes.max_rows + 1, sizes.window), NO_TOKEN, jnp.int32)

    def observe(self, state, rows, positions, tokens, known) -> DrafterState:
        return write_history(state, rows, positions, tokens, known)

    def propose(self, state, rows, lengths, count) -> Int[Array, "R count"]:
        tokens, prompt_lens = (jnp.asarray(array) for array in _tables(self.sequences))
        size = tokens.shape[1]
        prompt = jnp.arange(size) < prompt_lens[:, None]  # [N, L]
        equal = (state[rows][:, None, :size] == tokens) | ~prompt  # [R, N, L]
        same = jnp.all(equal, axis=2) & (prompt_lens <= lengths[:, None])
        best, found = jnp.argmax(same, axis=1), jnp.any(same, axis=1)[:, None]
        place = lengths[:, None] + jnp.arange(count)  # [R, count]
        drafts = jnp.where(place < size, tokens[best[:, None], jnp.minimum(place, size - 1)], NO_TOKEN)
        # A hash of the sequence and the position decides where the recording is wrong.
        mixed = (place.astype(jnp.uint32) + 1) * jnp.uint32(2654435761) ^ (best[:, None].astype(jnp.uint32) * 40503)
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(2246822519)
        wrong = ((mixed >> 8) & 0xFFFF) < int(self.errors * 0x10000)
        drafts = jnp.where(wrong & (drafts != NO_TOKEN), drafts ^ 1, drafts)
        return jnp.where(found, drafts, NO_TOKEN)


@functools.cache
def _tables(sequences: tuple[tuple[int, tuple[int, ...]], ...]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [N, L] of the sequences, NO_TOKEN behind their ends, and the lengths [N] of their prompts."""
    tokens = np.full((len(sequences), max(len(ids) for _, ids in sequences)), NO_TOKEN, np.int32)
    for line, (_, ids) in enumerate(sequences):
        tokens[line, : len(ids)] = ids
    return tokens, np.array([prompt_len for prompt_len, _ in sequences], np.int32)


def make_replay(options: DrafterOptions) -> TokenDrafter:
    """`speculation.method: replay`, from the lines {"prompt_token_ids", "token_ids"} of `speculation.model`.

    Raises ConfigError.
    """
    if options.model is None:
        raise ConfigError("speculation.method is replay, but speculation.model names no recording; give a JSONL file")
    try:
        raw = Path(options.model).read_bytes()
        lines = [json.loads(line) for line in raw.splitlines() if line.strip()]
        sequences = tuple(
            (len(line["prompt_token_ids"]), (*line["prompt_token_ids"], *line["token_ids"])) for line in lines
        )
        _tables(sequences)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"speculation.model {options.model!r} is no recording ({error!r:.200}); each line is an object with "
            "prompt_token_ids and token_ids"
        ) from error
    return ReplayDrafter(
        sequences=sequences, digest=hashlib.blake2b(raw, digest_size=16).hexdigest(), errors=options.replay_errors
    )
