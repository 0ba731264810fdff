"""The arithmetic from the sum of a prompt's final hidden states, which the device returns, to an embedding.

It is not on the device, since a prompt may take several steps, and only the last one knows the whole sum.
"""

import math

from jaxserve.api import PromptInfo, SamplingParams
from jaxserve.errors import JaxserveError


def pooling_params(truncate_prompt_tokens: int | None = None) -> SamplingParams:
    """The sampling of a request with `pooling`, from which nothing is drawn. Raises InvalidRequest."""
    return SamplingParams(temperature=0.0, truncate_prompt_tokens=truncate_prompt_tokens)


def embedding_of(prompt: PromptInfo | None) -> list[float]:
    """The mean of the prompt's final hidden states, divided by its Euclidean length: [D] numbers of length 1.

    The mean has the direction of the sum, so it need not be taken. Zeros stay zeros. Raises JaxserveError when the
    model computed no finite numbers.
    """
    assert prompt is not None and prompt.hidden_sum is not None, prompt
    total = prompt.hidden_sum
    length = math.hypot(*total)
    if not math.isfinite(length):
        raise JaxserveError("the model's hidden states are not finite for this prompt, so it has no embedding")
    return [value / length for value in total] if length else list(total)
