"""From shapes to prompts: token ids, text of a tokenizer, or words.

Contents are random and repeatable: a part is a function of the seed and of its key, so that parts that two requests
share have the same tokens. Lengths come from `datasets`. Tokens that a tokenizer adds around a text, such as a
beginning-of-sequence id, are part of the length, since the server counts them, too.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.lab.workloads.samples import Part, Prompt, Sample, Shape
from jaxserve.text import Tokenizer

_MAX_TRIES = 8
_MAX_CANDIDATES = 8192  # ids of a vocabulary that are tried; the largest vocabularies have thirty times as many
_MIN_STABLE = 32

WORDS = tuple(
    "time year people way day man thing woman life child world school state family student group country problem "  # noqa: SIM905
    "hand part place case week company system program question work number night point home water room mother area "
    "money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name team minute idea body back parent face others level "
    "office door health person art war history party result change morning reason research girl guy moment air "
    "teacher force education".split()
)


class PromptMaker(Protocol):
    """Spells the parts of a shape. Returns the prompt and its tokens."""

    def make(self, parts: Sequence[Part]) -> tuple[Prompt, int]: ...


def make_sample(shape: Shape, maker: PromptMaker) -> Sample:
    """One request of a dataset."""
    prompt, prompt_len = maker.make(shape.parts)
    return Sample(prompt=prompt, prompt_len=prompt_len, output_len=shape.output_len, arrival_s=shape.arrival_s)


class IdPrompts:
    """Token ids, drawn evenly from the vocabulary without `special_ids`. Lengths are exact."""

    def __init__(self, vocab_size: int, seed: int, special_ids: frozenset[int] = frozenset()) -> None:
        self._ids = np.array([i for i in range(vocab_size) if i not in special_ids], dtype=np.int64)
        self._seed = seed
        if not len(self._ids):
            raise ConfigError(f"no ids to draw from: the vocabulary has {vocab_size}, all of them special")

    def make(self, parts: Sequence[Part]) -> tuple[tuple[int, ...], int]:
        ids = tuple(i for part in parts for i in self.draw(part))
        return ids, len(ids)

    def draw(self, part: Part) -> list[int]:
        """The ids of one part."""
        numbers = np.random.default_rng((self._seed, part.key)).integers(len(self._ids), size=part.length)
        return self._ids[numbers].tolist()


class TextPrompts:
    """Text that the tokenizer reads as so many tokens.

    Random ids do not always survive decoding and encoding, so the text is made of ids that do when alone, and is then
    cut or lengthened until it fits; `make` returns the number of tokens that it has in the end.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._ids = np.array(_stable_ids(tokenizer, seed), dtype=np.int64)
        self._num_added = len(tokenizer.encode("", add_special_tokens=True))

    def make(self, parts: Sequence[Part]) -> tuple[str, int]:
        wanted = max(1, sum(part.length for part in parts) - self._num_added)
        text = "".join(self._tokenizer.decode(self._draw(part.key, part.length)) for part in parts)
        ids = self._encode(text)
        for attempt in range(_MAX_TRIES):
            if len(ids) == wanted:
                break
            if len(ids) > wanted:
                text = self._tokenizer.decode(ids[:wanted])
            else:
                text += self._tokenizer.decode(self._draw(parts[-1].key + 1 + attempt, wanted - len(ids)))
            ids = self._encode(text)
        return text, len(ids) + self._num_added

    def _draw(self, key: int, length: int) -> list[int]:
        numbers = np.random.default_rng((self._seed, key)).integers(len(self._ids), size=length)
        return self._ids[numbers].tolist()

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


class WordPrompts:
    """Common English words, one for each token asked for: about right for most vocabularies, and needs none.

    It is exact where all of `words` are known to be one token each, the first one behind `lead`, and `num_added` what
    the server adds to a text.
    """

    def __init__(self, seed: int, words: tuple[str, ...] = WORDS, lead: str = "", num_added: int = 0) -> None:
        self._seed = seed
        self._words = words
        self._lead = lead
        self._num_added = num_added

    def make(self, parts: Sequence[Part]) -> tuple[str, int]:
        words = [
            self._words[number]
            for part in parts
            for number in np.random.default_rng((self._seed, part.key)).integers(len(self._words), size=part.length)
        ]
        words = words[: max(1, len(words) - self._num_added)]
        return self._lead + " ".join(words), len(words) + self._num_added


def _stable_ids(tokenizer: Tokenizer, seed: int) -> list[int]:
    """Ids whose text is read as that id again; all that are not special where there are hardly any."""
    ids = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]
    if len(ids) > _MAX_CANDIDATES:
        chosen = np.random.default_rng(seed).choice(len(ids), size=_MAX_CANDIDATES, replace=False)
        ids = [ids[number] for number in sorted(chosen.tolist())]
    texts = [tokenizer.decode([i]) for i in ids]
    stable = [
        i
        for i, text in zip(ids, texts, strict=True)
        if text and "\ufffd" not in text and tokenizer.encode(text, add_special_tokens=False) == [i]
    ]
    return stable if len(stable) >= _MIN_STABLE else ids
