"""Words that the server reads as one token each, found by asking its tokenizer.

So prompts of a given length need no vocabulary here, only a server that counts. Small vocabularies cut common words
into many pieces, and a prompt would otherwise be several times as long as asked for, or longer than the model's limit.
"""

import asyncio
import dataclasses

from jaxserve.lab.bench.load import LoadClient
from jaxserve.lab.workloads.prompts import WORDS

_MIN_WORDS = 16  # with fewer, prompts of one run would look much alike


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """The words of prompts, the text before the first word, and the number of tokens that the server adds to each."""

    words: tuple[str, ...] = WORDS
    lead: str = ""
    num_added: int = 0


async def learn_words(client: LoadClient, timeout_s: float) -> Words:
    """The `WORDS` that are one token behind another word; all of them where the server does not count, or knows
    hardly any of them.
    """
    base, with_added = [
        await client.count_tokens(WORDS[0], with_added=added, timeout_s=timeout_s) for added in (False, True)
    ]
    if base is None or with_added is None:
        return Words()
    counts = await asyncio.gather(
        *(client.count_tokens(f"{WORDS[0]} {word}", with_added=False, timeout_s=timeout_s) for word in WORDS)
    )
    single = tuple(word for word, count in zip(WORDS, counts, strict=True) if count == base + 1)
    return Words(
        words=single if len(single) >= _MIN_WORDS else WORDS,
        lead=" " if base > 1 else "",  # in many vocabularies a word of one token has its blank in it
        num_added=with_added - base,
    )
