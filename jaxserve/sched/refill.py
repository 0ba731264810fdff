"""Two ways to refill pages: the time to load one from a host slot, and the time to compute its tokens again.

Both are learned from the times of steps with tokens of prompts. Such a step that loads nothing says what a token costs;
one that loads says, by what it took beyond its tokens, what a page costs. However few its tokens, a step takes no less
than one that decodes alone, since both read all weights: that time is not the pages' either. Each estimate is a ratio
of two sums (seconds over tokens, or over pages) that forget with time, so a long step weighs more than a short one.

Loading is linear in pages, and so is computing but for attention over long contexts, which makes it dearer than what is
counted here. Other requests also pay for a computed token, and not for a loaded page. Both errors prefer computing,
so where loading is chosen it is the better way.
"""

from typing import NamedTuple

_KEEP = 0.95  # of the sums, at each sample
_FIRST_PAGES = 16.0  # that the measurement before the first step counts for
_FORGIVE = 0.98  # of the estimate's distance from the first measurement, at each refusal: one slow load is no verdict
_KEEP_FILLS = 0.8  # a fill has many pages, so a few of them say how fast the store is now
_PART_OF_PAGE = 0.5  # that a late fill had under way


class Estimates(NamedTuple):
    """Seconds by which a choice was made: to load the pages, and to compute their tokens."""

    load_s: float
    compute_s: float


class RefillCosts:
    """Mutated by the scheduler that made it."""

    def __init__(self, load_ms: float) -> None:
        """`load_ms`: of a page, measured before the first step; 0 where nobody has."""
        self._first_s = load_ms / 1000
        self._page_s, self._pages = self._first_s * _FIRST_PAGES, _FIRST_PAGES if load_ms else 0.0
        self._token_s, self._tokens = 0.0, 0.0
        self._decode_s, self._decodes = 0.0, 0.0  # rounds that decode alone
        self._committed_s = 0.0
        self._steady = False

    @property
    def page_s(self) -> float:
        """Seconds to load a page; 0 while nothing is known."""
        return self._page_s / self._pages if self._pages else 0.0

    @property
    def token_s(self) -> float:
        """Seconds to compute a token of a prompt; 0 while nothing is known."""
        return self._token_s / self._tokens if self._tokens else 0.0

    def tokens_of_page(self, page_size: int) -> float:
        """What refilling a page that is in a slot costs, in tokens to compute: its tokens at most."""
        return min(float(page_size), self.page_s / self.token_s) if self._tokens else 0.0

    def estimate(self, num_pages: int, num_tokens: int) -> Estimates:
        """Of loading so many pages, and of computing so many tokens."""
        return Estimates(num_pages * self.page_s, num_tokens * self.token_s)

    def note_refusal(self) -> None:
        """Pages were computed that could have been loaded, so the estimate of a load gets no sample."""
        if self._pages:
            self._page_s = self._pages * (self._first_s + (self.page_s - self._first_s) * _FORGIVE)

    def note_commit(
        self, now_s: float, num_prompt_tokens: int, num_tokens: int, num_loads: int, has_next: bool, rounds: int = 1
    ) -> None:
        """A step of so many rounds has been committed. `has_next`: the device has the next step already, so that the
        time until that one is committed is what it costs."""
        elapsed_s, steady = now_s - self._committed_s, self._steady
        self._committed_s, self._steady = now_s, has_next
        if not steady or num_tokens == 0 or elapsed_s <= 0:  # 0: a clock that stood still
            return
        if num_prompt_tokens == 0:
            if num_loads == 0:
                self._decode_s = self._decode_s * _KEEP + elapsed_s
                self._decodes = self._decodes * _KEEP + rounds
        elif num_loads == 0:
            self._token_s = self._token_s * _KEEP + elapsed_s
            self._tokens = self._tokens * _KEEP + num_tokens
        elif self._tokens:
            decode_s = self._decode_s / self._decodes if self._decodes else 0.0
            step_s = max(decode_s, num_tokens * self.token_s)
            self._page_s = self._page_s * _KEEP + max(0.0, elapsed_s - step_s)
            self._pages = self._pages * _KEEP + num_loads


class FillCosts:
    """What a page from a store costs, learned from fills: the time from asking to the end of the fill, threads that are
    busy with others included. Mutated by the loader that made it."""

    def __init__(self) -> None:
        self._seconds = self._pages = 0.0

    @property
    def page_s(self) -> float:
        """Seconds for a page; 0 while nothing is known."""
        return self._seconds / self._pages if self._pages else 0.0

    def note_fill(self, elapsed_s: float, num_filled: int, *, late: bool) -> None:
        """A fill has ended with so many pages. `late`: at its deadline, with others on their way still. A fill that
        only missed says nothing of pages."""
        if num_filled or late:
            self._seconds = self._seconds * _KEEP_FILLS + elapsed_s
            self._pages = self._pages * _KEEP_FILLS + num_filled + _PART_OF_PAGE * late

    def note_refusal(self) -> None:
        """Nothing was asked, since computing is faster. The estimate gets no sample, so it falls until one more fill
        shows whether it still holds."""
        self._seconds *= _FORGIVE
