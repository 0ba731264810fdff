"""What the answer to a call can come to at most, reckoned before any of it is queued.

The queue bounds sequences and the tokens of prompts. It does not bound answers, which can be thousands of times as
large as what asks for them: each token of a prompt may come back with its alternatives, once for each sequence.
"""

from collections.abc import Sequence

from jaxserve.api import Request
from jaxserve.errors import InvalidRequest

# Of JSON, about what the longest form has. Text: most tokens are of four letters. A token beside its log-probability:
# its text, its number in 20 digits, and in chats its bytes one by one.
_TOKEN_BYTES = 8
_ENTRY_BYTES = 64


def answer_bytes(request: Request, *, repeats_prompt: bool = False) -> int:
    """Bytes of the answer to a prepared request, at most. Vectors and pictures are not counted.

    `repeats_prompt`: the log-probabilities of the prompt come with each sequence; else with the first one.
    """
    sampling, num_prompt_tokens = request.sampling, len(request.prompt_token_ids)
    entries = 0
    if sampling.prompt_logprobs is not None:
        entries += num_prompt_tokens * (1 + sampling.prompt_logprobs) * (sampling.n if repeats_prompt else 1)
    if sampling.logprobs is not None:
        entries += request.max_tokens * (1 + sampling.logprobs) * sampling.n
    text = (len(request.echo_text) + request.max_tokens * _TOKEN_BYTES) * sampling.n
    return text + entries * _ENTRY_BYTES


def check_answer(requests: Sequence[Request], most: int, *, repeats_prompt: bool = False) -> None:
    """Raises InvalidRequest when the answers to all requests of a call can come to more than `most` bytes."""
    size = sum(answer_bytes(request, repeats_prompt=repeats_prompt) for request in requests)
    if size <= most:
        return
    largest = max(requests, key=lambda request: answer_bytes(request, repeats_prompt=repeats_prompt))
    sampling = largest.sampling
    asked = [f"{len(largest.prompt_token_ids)} tokens of the prompt", f"max_tokens {largest.max_tokens}"]
    asked.append(f"n {sampling.n}")
    counts = {"logprobs": sampling.logprobs, "prompt_logprobs": sampling.prompt_logprobs}
    asked += [f"{name} {count}" for name, count in counts.items() if count is not None]
    asked += ["echo"] if largest.echo_text else []
    prompts = "the prompt" if len(requests) == 1 else f"{len(requests)} prompts, the largest of them"
    raise InvalidRequest(
        f"the answer for {prompts} with {', '.join(asked)} can come to {size} bytes, and at most {most} are made for "
        "a call (serve.max_answer_bytes); ask for fewer log-probabilities, max_tokens, sequences (n) or prompts, or "
        "leave echo out"
    )
