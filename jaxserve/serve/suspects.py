"""Requests that may be what ends their servers: `Deaths` that one request has met, by which it is convicted or cleared.

A request that was in flight at two deaths is a suspect, and no more: when servers are killed from outside, every long
stream meets two deaths. So a suspect runs next on a server that runs nothing else (`Pool.reserve`). Even then a kill
from outside looks like its work, but such a kill would have to come twice while the same request is alone, and at the
same place of its answer: a request and its tokens are the whole state, so a guilty one ends each server there again.
One death alone is therefore no proof, and two are. A suspect that gets beyond that place is cleared. What is convicted
is refused by its content, see `quarantine`.
"""

_SUSPICION = 2  # deaths at one place of the answer, after which a request runs alone
_PROOF = 2  # deaths at one place while it ran alone

# Two deaths are at one place when the request got at most so many tokens between them. It is more than none, since the
# last tokens of a dying server, those of a burst of steps for instance, may or may not arrive.
PLACE_TOKENS = 16


class Deaths:
    """The servers that one request has lost. Mutated by the handler of its call.

    Attributes:
      losses: address and reason of each server since the last token, those that drained or were not reached included.
    """

    def __init__(self, num_tokens: int) -> None:
        """`num_tokens`: that the client of the request has."""
        self.losses: list[str] = []
        self._innocent: set[str] = set()  # lost without the request's doing; a second time no server behaves so
        self._num_tokens = num_tokens  # at the last death
        self._num_here = 0
        self._num_alone = 0

    def note(self, address: str, reason: str, num_tokens: int, *, alone: bool, innocent: bool) -> None:
        """The server at `address` is gone, which ran the request. It has `num_tokens` tokens now.

        Args:
          alone: the server ran nothing else.
          innocent: the request cannot be why: the server ended in order, as it was told to, or was gone before the
            request could be sent.
        """
        if num_tokens > self._num_tokens:
            self.losses.clear()
            self._innocent.clear()
        self.clear_beyond(num_tokens)
        self._num_tokens = num_tokens
        self.losses.append(f"{address}: {reason}")
        if innocent and address not in self._innocent:
            self._innocent.add(address)
            return
        self._num_here += 1
        self._num_alone += alone

    @property
    def num_recent(self) -> int:
        """Deaths since the last token; a server that drained, or was never reached, has not died with the request."""
        return len(self.losses) - len(self._innocent)

    def clear_beyond(self, num_tokens: int) -> bool:
        """Clears the request if `num_tokens` are beyond the place of the last death; returns whether they are."""
        beyond = num_tokens > self._num_tokens + PLACE_TOKENS
        if beyond:
            self._num_here = self._num_alone = 0
        return beyond

    @property
    def suspected(self) -> bool:
        """The request is to run alone."""
        return self._num_here >= _SUSPICION

    @property
    def convicted(self) -> bool:
        """The request is what ends servers."""
        return self._num_alone >= _PROOF
