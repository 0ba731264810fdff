"""How much fits into a step, and when less is cheaper: the arithmetic of buckets.

Owns what a list of buckets implies for a plan. Refuses to know sequences: it deals in tokens and rows.
"""

from jaxserve.errors import CapacityError
from jaxserve.sched.plan import Limits


class StepBudget:
    """Immutable; made once from the limits.

    Raises CapacityError when some set of running rows could never be planned: there must be a mixed bucket with room
    for all rows and a token for each.
    """

    __slots__ = ("_beside", "_limits", "_mixed", "_tokens_for_rows")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._mixed = [b for b in limits.buckets if not b.decode_only]
        self._tokens_for_rows = [
            max((b.tokens for b in self._mixed if b.rows >= rows), default=0) for rows in range(limits.max_rows + 1)
        ]
        if self._tokens_for_rows[limits.max_rows] < limits.max_rows:
            raise CapacityError(
                f"{limits.max_rows} rows (sched.max_rows) may run at once, but no mixed bucket has that many rows and "
                f"tokens; raise sched.max_step_tokens to {limits.max_rows} at least, or lower sched.max_rows; buckets "
                f"are {', '.join(f'{b.tokens}x{b.rows}' for b in self._mixed) or 'all decode-only'}"
            )

        self._beside = [self._find_beside(rows) for rows in range(limits.max_rows + 1)]

    @property
    def max_alone(self) -> int:
        """Tokens that one prompt can have in a step of its own."""
        return self._tokens_for_rows[1]

    def room(self, num_tokens: int, num_rows: int) -> int:
        """Tokens that one more chunk can have beside `num_tokens` of `num_rows` rows. 0 or less: none."""
        if num_rows >= self._limits.max_rows:
            return 0
        return self._tokens_for_rows[num_rows + 1] - num_tokens

    def beside(self, num_decode: int) -> int | None:
        """Tokens of prompts, 1 or more, that may stand beside so many rows that decode; None: all that fit.

        A quarter of the step at least, even where that takes it beyond `Limits.max_mixed_tokens`.
        """
        return self._beside[num_decode]

    def _find_beside(self, num_decode: int) -> int | None:
        limit = self._limits.max_mixed_tokens
        edges = [b.tokens for b in self._mixed if b.tokens > num_decode and b.rows > num_decode]
        if limit is None or num_decode == 0 or not edges:
            return None
        # A prompt that gets a token or two of each step would take for ever.
        edges = [edge for edge in edges if 4 * (edge - num_decode) >= edge] or [max(edges)]
        # To the edge of a bucket: the padding behind would cost as much. The smallest one when even that is too long.
        return max((edge for edge in edges if edge <= limit), default=min(edges)) - num_decode

    def trim(self, num_tokens: int, num_rows: int, last_chunk_len: int) -> int:
        """Tokens to cut off the last chunk of a mixed step so that it ends at the edge of a smaller bucket.

        Cuts when more than a quarter of the bucket would be padding, and only if at least half of the chunk stays:
        a prompt then reaches its end in a number of steps that grows with the logarithm of its length at worst.
        """
        bucket = self._limits.find_bucket(num_tokens, num_rows, False)
        assert bucket is not None, (num_tokens, num_rows, self._limits.buckets)
        if (bucket.tokens - num_tokens) * 4 <= bucket.tokens:
            return 0
        edge = max((b.tokens for b in self._mixed if b.tokens < num_tokens and b.rows >= num_rows), default=0)
        cut = num_tokens - edge
        return cut if 2 * cut <= last_chunk_len else 0
