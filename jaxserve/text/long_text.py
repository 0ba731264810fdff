"""Texts that are too long, refused before all of them is encoded.

A text of megabytes takes seconds of a thread and hundreds of megabytes of memory, and a sequence of some thousand
tokens has no room for it anyway. How many tokens a text has is known exactly only when it is encoded as a whole, since
what follows may change how a beginning is cut. But it changes that for a few tokens near the end: a beginning that
alone has twice as many tokens as fit is proof enough.
"""

from jaxserve.errors import PromptTooLong
from jaxserve.text.base import Tokenizer

# Characters of a text, for each token that fits, that are encoded at once: nearly all texts that fit have fewer.
_AT_ONCE = 8
_LEAST_AT_ONCE = 2**14
_TIMES = 2  # as many tokens of a beginning as fit


def check_text_fits(tokenizer: Tokenizer, text: str, max_tokens: int) -> None:
    """Raises PromptTooLong for a text that has clearly more than `max_tokens`, in about the time that it takes to
    encode as many. Others are for the caller to count. Raises what `Tokenizer.encode` raises."""
    size = max(_LEAST_AT_ONCE, _AT_ONCE * max_tokens)
    while size < len(text):
        count = len(tokenizer.encode(text[:size], add_special_tokens=False))
        if count > _TIMES * max_tokens:
            raise PromptTooLong(
                f"a text has {len(text)} characters, of which the first {size} are {count} tokens, and a sequence "
                f"holds {max_tokens}, prompt and output together; shorten it"
            )
        size *= _TIMES


def encode_within(tokenizer: Tokenizer, text: str, max_tokens: int, *, add_special_tokens: bool = True) -> list[int]:
    """`Tokenizer.encode`, of a text that is to have `max_tokens` at most. Raises as `check_text_fits`."""
    check_text_fits(tokenizer, text, max_tokens)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)
