"""Pictures in a step: what the packed buffer says of them, on the host and inside the compiled step.

Models that take pictures have these sections beside those of `pack`:

    slots [T]       the line of the encoder's pool of each token; NO_SLOT where a token has the embedding of its id. In
                    mixed buckets alone: a decode step feeds drawn tokens
    turns [3, T]    what turns the queries and keys of each token: frame, row and column; FROM_DEVICE for the token of a
                    decode row. In mixed buckets alone
    deltas [R]      what to add to the position of a later token of each row to have what turns it

The last two are there for families alone whose tokens have three positions (`DecoderConfig.has_sections`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.models.decoder import PictureInputs
from jaxserve.runtime.row_state import FROM_DEVICE
from jaxserve.sched.plan import Bucket, EncoderPool, RowSetup, StepPlan
from jaxserve.values.content import PlacedPicture

NO_SLOT = -1

# Of a prompt's length and its pictures: three positions of each token [3, S], and the delta (`vision.Positions`).
PromptPositions = Callable[[int, Sequence[PlacedPicture]], tuple[np.ndarray, int]]


class PictureSizes(NamedTuple):
    """Sizes of a model that takes pictures.

    Attributes:
      pool: of embeddings.
      has_sections: tokens of a picture have three positions.
      num_lines: of what the tower returns for a picture, one for each of its buckets.
    """

    pool: EncoderPool
    has_sections: bool
    num_lines: tuple[int, ...]

    @property
    def pool_lines(self) -> int:
        """Of the array, the dummy page included."""
        return (self.pool.num_pages + 1) * self.pool.page_size

    def sections(self, bucket: Bucket) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the sections in the buffer of a bucket."""
        mixed = bucket.plain and not bucket.decode_only
        shapes: dict[str, tuple[int, ...]] = {"slots": (bucket.tokens,)} if mixed else {}
        if self.has_sections:
            shapes["deltas"] = (bucket.rows,)
            if mixed:
                shapes["turns"] = (3, bucket.tokens)
        return shapes


class PictureRows:
    """What the rows of the device have of pictures. Mutated by the runner.

    `positions` is None in families whose tokens are simply counted.
    """

    def __init__(self, sizes: PictureSizes, max_rows: int, positions: PromptPositions | None) -> None:
        assert sizes.has_sections == (positions is not None), sizes
        self._sizes = sizes
        self._positions = positions
        self._turns: dict[int, np.ndarray] = {}  # of prompts with pictures
        self._deltas = np.zeros(max_rows + 1, np.int32)

    def set_up(self, setup: RowSetup) -> None:
        """A row is given to a sequence."""
        if self._positions is not None and setup.pictures:
            placed = [picture.placed for picture in setup.pictures]
            self._turns[setup.row], self._deltas[setup.row] = self._positions(setup.prompt_len, placed)

    def forget(self, row: int) -> None:
        """The row has no sequence any more."""
        self._turns.pop(row, None)
        self._deltas[row] = 0

    def write(self, plan: StepPlan, view: Mapping[str, np.ndarray]) -> None:
        """Fills the sections; all others have been."""
        if "deltas" in view:
            view["deltas"][:] = self._deltas[view["rows"]]
        if "slots" not in view:
            return
        view["slots"][:] = NO_SLOT
        if "turns" in view:
            view["turns"][:] = view["positions"]  # three times, also where the device knows it
        at = len(plan.decode_rows)
        for chunk in plan.chunks:
            end, stop = at + len(chunk.token_ids), chunk.start + len(chunk.token_ids)
            if (turns := self._turns.get(chunk.row)) is not None:
                known = turns[:, chunk.start : stop]  # the others are of an answer that is computed again
                view["turns"][:, at : at + known.shape[1]] = known
                view["turns"][:, at + known.shape[1] : end] += self._deltas[chunk.row]
            for place in plan.pictures:
                begin, last = max(chunk.start, place.start), min(stop, place.start + place.length)
                if place.row == chunk.row and begin < last:  # not in another part of a pipeline
                    lines = self.lines(place.page_ids, place.length)[begin - place.start : last - place.start]
                    view["slots"][at + begin - chunk.start : at + last - chunk.start] = lines
            at = end

    def lines(self, page_ids: Sequence[int], count: int) -> np.ndarray:
        """The lines of the pool, int32 [count], of embeddings in these pages."""
        size = self._sizes.pool.page_size
        lines = np.asarray(page_ids, np.int32)[:, None] * size + np.arange(size, dtype=np.int32)
        return lines.reshape(-1)[:count]


def picture_inputs(
    pool: Float[Array, "S D"],
    slots: Int[Array, " T"] | None,
    turns: Int[Array, "3 T"] | None,
    deltas: Int[Array, " R"] | None,
    positions: Int[Array, " T"],
    token_rows: Int[Array, " T"],
) -> PictureInputs:
    """What the decoder takes of the sections of a step. `token_rows` is R for padding."""
    if deltas is None:
        return PictureInputs(pool, slots)
    later = positions + jnp.append(deltas, 0)[token_rows]  # [T]
    return PictureInputs(pool, slots, later if turns is None else jnp.where(turns == FROM_DEVICE, later, turns))
