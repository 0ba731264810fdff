"""How many parts JSON text has, before it is read.

A list without anything in it has three characters in the text, comma included, and sixty bytes in memory; text of
some megabytes becomes a hundred of them, and several hundreds in the copies that are made on its way. Time goes by
parts, too. Brackets and colons are counted, which takes milliseconds for megabytes.
"""

import re

# A text that does not end has no part behind it either.
_TEXT = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_TEXT_BYTES = re.compile(_TEXT.pattern.encode(), re.DOTALL)


def has_more_parts(most: int, *json_texts: str | bytes) -> bool:
    """Whether all texts together have more than `most` objects, lists and named fields. Bytes are UTF-8. Any thread."""
    # Texts within are taken out only where they may matter: what is quoted, such as a program, has brackets, too.
    return sum(map(_count, json_texts)) > most and sum(_count(_without_texts(text)) for text in json_texts) > most


def _count(json_text: str | bytes) -> int:
    if isinstance(json_text, str):
        return sum(map(json_text.count, "[{:"))
    return sum(map(json_text.count, (b"[", b"{", b":")))


def _without_texts(json_text: str | bytes) -> str | bytes:
    return _TEXT.sub('""', json_text) if isinstance(json_text, str) else _TEXT_BYTES.sub(b'""', json_text)
