"""Regular expressions from the config of an adapter, matched for a limited time.

A short one can take longer than a server lives: "(a+)+$" has a way to match for each way to cut the text. An adapter is
somebody else's file, so a match that takes too long is given up, and meanwhile other threads go on.
"""

import regex

from jaxserve.errors import AdapterError

MAX_CHARS = 4096
_LIMIT_S = 0.25  # of one match; names of modules take microseconds


def check_expression(pattern: str, what: str) -> None:
    """Raises AdapterError, which begins with `what`, for text that is no regular expression."""
    if len(pattern) > MAX_CHARS:
        raise AdapterError(f"{what} has an expression of {len(pattern)} characters; {MAX_CHARS} are taken at most")
    try:
        regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise AdapterError(f"{what} has {pattern!r:.80}, which is no regular expression: {error}") from error


def matches(pattern: str, text: str) -> bool:
    """Whether a checked expression matches all of the text. Raises AdapterError when that takes too long."""
    try:
        return regex.fullmatch(pattern, text, timeout=_LIMIT_S, concurrent=True) is not None
    except TimeoutError as error:
        raise AdapterError(
            f"the expression {pattern!r:.200} takes more than {_LIMIT_S} s to match {text!r:.200}; write it simpler"
        ) from error
