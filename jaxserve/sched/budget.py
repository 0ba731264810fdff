"""The limits of a step and of the device: the arithmetic of buckets, pages and the longest sequence.

A request that can never run is refused at once, with the reason. A request that `check_fits` lets pass is sure to end,
since each of its sequences fits when it is alone on the device.
"""

from jaxserve.api import Request, shown_id
from jaxserve.errors import CapacityError, InvalidRequest, PromptTooLong, RequestRejected
from jaxserve.sched.plan import Limits


class StepBudget:
    """Immutable; made once from the limits.

    Raises CapacityError when some set of running rows could never be planned: there must be a mixed bucket with room
    for all rows and a token for each.
    """

    __slots__ = ("_limits", "_max_prefill_beside", "_mixed", "_tokens_for_rows")

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

        self._max_prefill_beside = [self._find_max_prefill(rows) for rows in range(limits.max_rows + 1)]

    @property
    def max_prefill_only(self) -> int:
        """Tokens that one prompt can have in a step of its own."""
        return self._tokens_for_rows[1]

    def room(self, num_tokens: int, num_rows: int) -> int:
        """Tokens that one more chunk can have beside `num_tokens` tokens of `num_rows` rows. 0 or less: none."""
        if num_rows >= self._limits.max_rows:
            return 0
        return self._tokens_for_rows[num_rows + 1] - num_tokens

    def max_prefill_beside(self, num_decode: int) -> int | None:
        """Tokens of prompts, 1 or more, that may stand beside so many rows that decode; None: all that fit.

        A quarter of the step at least, even where that takes it beyond `Limits.max_mixed_tokens`.
        """
        return self._max_prefill_beside[num_decode]

    def _find_max_prefill(self, num_decode: int) -> int | None:
        limit = self._limits.max_mixed_tokens
        edges = [b.tokens for b in self._mixed if b.tokens > num_decode and b.rows > num_decode]
        if limit is None or num_decode == 0 or not edges:
            return None
        # With only a token or two in each step, a prompt would hardly ever be finished.
        edges = [edge for edge in edges if 4 * (edge - num_decode) >= edge] or [max(edges)]
        # Up to the edge of a bucket, since padding would cost as much; the smallest bucket when even that is too long.
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


def max_sequence_len(request: Request, limits: Limits) -> int:
    """Tokens that a sequence of the request can reach, prompt and output.

    A prompt to be pooled counts one more, since its last token is fed, too: as if one were generated and dropped.
    """
    if request.pooling:
        return len(request.prompt_token_ids) + 1
    return min(len(request.prompt_token_ids) + request.max_tokens, limits.max_model_len)


def most_pages(request: Request, limits: Limits, budget: StepBudget) -> int:
    """Pages that a sequence of the request can need, in all groups, when it is alone on the device."""
    # The last token is never fed, so it needs no place in a page.
    return limits.pages_of(max_sequence_len(request, limits) - 1, budget.max_prefill_only)


def check_fits(request: Request, limits: Limits, budget: StepBudget, chunked_prefill: bool, num_grantable: int) -> None:
    """Raises InvalidRequest, PromptTooLong or RequestRejected; returns when the request can run.

    `num_grantable`: pages that are given out, of those of the limits.
    """
    who, prompt_len = f"request {shown_id(request.request_id)!r}", len(request.prompt_token_ids)
    if prompt_len == 0:
        raise InvalidRequest(f"{who} has an empty prompt; give at least one token")
    if request.max_tokens < 1 and not request.pooling:
        raise InvalidRequest(f"{who} asks for max_tokens {request.max_tokens}; give 1 or more")
    if request.pooling and prompt_len > limits.max_model_len:
        raise PromptTooLong(
            f"{who} has a prompt of {prompt_len} tokens, but sequences end at {limits.max_model_len} (model.max_len); "
            "shorten the prompt or use truncate_prompt_tokens"
        )
    if prompt_len + 1 > limits.max_model_len and not request.pooling:
        raise PromptTooLong(
            f"{who} has a prompt of {prompt_len} tokens, but sequences end at {limits.max_model_len} (model.max_len), "
            "one generated token included; shorten the prompt or use truncate_prompt_tokens"
        )
    num_pages = most_pages(request, limits, budget)
    if num_pages > num_grantable:
        resized = num_grantable < limits.num_pages
        raise RequestRejected(
            f"{who} can need {num_pages} pages for {prompt_len} prompt tokens and {request.max_tokens} generated ones, "
            f"but the cache {'gives out' if resized else 'has'} {num_grantable} pages of {limits.page_size} tokens"
            f"{f', of {limits.num_pages} that it has' if resized else ''}; lower max_tokens or shorten the prompt, or "
            f"{'make the pool larger again' if resized else 'raise cache.num_pages'}"
        )
    if not chunked_prefill and prompt_len > budget.max_prefill_only:
        raise RequestRejected(
            f"{who} has a prompt of {prompt_len} tokens, but a step holds {budget.max_prefill_only} and "
            "sched.chunked_prefill is false; turn it on or raise sched.max_step_tokens"
        )
