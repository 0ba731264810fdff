"""What can never run is refused at once, with the reason.

Owns the checks of a request against the limits of the device. Refuses to queue or to clamp anything: a request is
taken as it is, or not at all. What passes here is sure to end: alone on the device, each of its sequences fits.
"""

from jaxserve.api import Request
from jaxserve.errors import InvalidRequest, PromptTooLong, RequestRejected
from jaxserve.sched.budget import StepBudget
from jaxserve.sched.plan import Limits


def max_sequence_len(request: Request, limits: Limits) -> int:
    """Tokens that a sequence of the request can reach, prompt and output.

    A prompt to be pooled counts one more, since its last token is fed, too: as if one were generated and dropped.
    """
    if request.pooling:
        return len(request.prompt_token_ids) + 1
    return min(len(request.prompt_token_ids) + request.max_tokens, limits.max_model_len)


def check_fits(request: Request, limits: Limits, budget: StepBudget, chunked_prefill: bool) -> None:
    """Raises InvalidRequest, PromptTooLong or RequestRejected; returns when the request can run."""
    who, prompt_len = f"request {request.request_id!r}", len(request.prompt_token_ids)
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
    # The last token is never fed, so it needs no place in a page.
    num_pages = -(-(max_sequence_len(request, limits) - 1) // limits.page_size)
    if num_pages > limits.num_pages:
        raise RequestRejected(
            f"{who} can need {num_pages} pages for {prompt_len} prompt tokens and {request.max_tokens} generated ones, "
            f"but the cache has {limits.num_pages} pages of {limits.page_size} tokens; lower max_tokens or shorten the "
            "prompt, or raise cache.num_pages"
        )
    if not chunked_prefill and prompt_len > budget.max_alone:
        raise RequestRejected(
            f"{who} has a prompt of {prompt_len} tokens, but a step holds {budget.max_alone} and "
            "sched.chunked_prefill is false; turn it on or raise sched.max_step_tokens"
        )
