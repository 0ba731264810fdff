"""How many parts JSON text has, before it is read.

A list without anything in it has three characters in the text, comma included, and sixty bytes in memory; text of
some megabytes becomes a hundred of them, and several hundreds in the copies that are made on its way. Time goes by
parts, too. Brackets and colons are counted, which takes milliseconds for megabytes.
"""

import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any

# Between two runs of so many texts other threads have their turn.
_TEXTS_AT_ONCE = 2000
# A text that does not end has no part behind it either.
_TEXT = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?'
_RUN = rf'(?:[^"]++|{_TEXT}){{1,{_TEXTS_AT_ONCE}}}+'


@functools.cache
def _patterns(of_bytes: bool) -> tuple[re.Pattern[Any], re.Pattern[Any]]:
    """Of a text, and of a run of texts and what is between them."""
    first, second = ((re.compile(p.encode() if of_bytes else p, re.DOTALL)) for p in (_TEXT, _RUN))
    return first, second


def has_more_parts(most: int, *json_texts: str | bytes) -> bool:
    """Whether all texts together have more than `most` objects, lists and named fields. Bytes are UTF-8. Any thread."""
    # Texts within are taken out only where they may matter: what is quoted, such as a program, has brackets, too.
    if sum(map(_count, json_texts)) <= most:
        return False
    count = 0
    for run in itertools.chain.from_iterable(map(_runs_without_texts, json_texts)):
        count += _count(run)
        if count > most:
            return True
    return False


def _count(json_text: str | bytes) -> int:
    if isinstance(json_text, str):
        return sum(map(json_text.count, "[{:"))
    return sum(map(json_text.count, (b"[", b"{", b":")))


def _runs_without_texts(json_text: str | bytes) -> Iterator[str | bytes]:
    is_bytes = isinstance(json_text, bytes)
    text, run = _patterns(is_bytes)
    empty: Any = b"" if is_bytes else ""
    start = 0
    while (found := run.match(json_text, start)) is not None:
        yield text.sub(empty, found[0])
        start = found.end()
