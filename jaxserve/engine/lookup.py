"""Drafts on the host: what followed the same tokens before, in the same sequence (prompt lookup decoding).

For rows whose drafts a grammar must see before the device does; all others have `runtime.drafting.NgramDrafter`, which
finds the same.
"""

import dataclasses
from array import array
from collections.abc import Sequence

_TOKEN_BYTES = array("i").itemsize


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LookupOptions:
    """Settings of `speculation:`.

    Attributes:
      min_len, max_len: how many last tokens must be the same, and how many are compared.
      window: latest tokens of a sequence that are searched.
    """

    min_len: int = 2
    max_len: int = 4
    window: int = 4096


class History:
    """The tokens of one sequence, prompt and output. Mutated by `extend` alone."""

    __slots__ = ("_options", "_tokens")

    def __init__(self, tokens: Sequence[int], options: LookupOptions) -> None:
        self._options = options
        self._tokens = array("i", tokens[-options.window :])

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that the sequence has drawn."""
        self._tokens.extend(tokens)

    def follow(self, more: Sequence[int], most: int) -> list[int]:
        """Guesses of `most` tokens behind those of the sequence and `more`; none where the last ones are new.

        Of the longest run of last tokens that stands earlier the latest place counts, and what follows there; where
        that reaches the end, it repeats itself. Searches bytes: some microseconds for thousands of tokens.
        """
        options = self._options
        tokens = self._tokens[-options.window :]
        tokens.extend(more)
        whole = tokens.tobytes()
        for length in range(min(options.max_len, len(tokens) - 1), options.min_len - 1, -1):
            last = whole[-length * _TOKEN_BYTES :]
            end = len(whole) - _TOKEN_BYTES  # an earlier place ends before the last token
            while (at := whole.rfind(last, 0, end)) >= 0:
                if at % _TOKEN_BYTES == 0:
                    begin = at // _TOKEN_BYTES + length
                    found = tokens[begin:].tolist()
                    return (found * -(-most // len(found)))[:most]
                end = at + len(last) - 1
        return []
