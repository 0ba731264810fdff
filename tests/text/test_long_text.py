"""A text that cannot fit is refused by its beginning, and never one that fits."""

import random
from pathlib import Path

import pytest

from jaxserve.errors import PromptTooLong
from jaxserve.testing import ByteTokenizer
from jaxserve.text import ChatTemplate, check_text_fits, encode_chat, load_tokenizer

FIXTURES = Path(__file__).parent.parent / "fixtures" / "tokenizers"
KINDS = ("spm_bpe", "spm_bpe_legacy", "spm_unigram", "llama3", "qwen", "metaspace")
WORDS = ("ab ", "a", " ", "\n", "the quick brown fox", "\u00e9\u4e00", "<|im_end|>", "</s>", "1234", "..!?", "e\u0301")


class Recording(ByteTokenizer):
    """Remembers how much it was asked to encode."""

    def __init__(self) -> None:
        self.longest = self.total = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.longest, self.total = max(self.longest, len(text)), self.total + len(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused_has_more_tokens(kind: str) -> None:
    tokenizer, rng, refused = load_tokenizer(FIXTURES / kind), random.Random(0), 0
    for word in (*WORDS, None):
        drawn = "".join(rng.choice(WORDS) for _ in range(15_000))
        text = drawn if word is None else word * (40_000 // len(word))
        count = len(tokenizer.encode(text))
        for most in (100, count // 3, count - 1, count):
            try:
                check_text_fits(tokenizer, text, most)
            except PromptTooLong:
                refused += 1
                assert count > most
    assert refused


def test_the_rest_of_a_refused_text_is_not_encoded() -> None:
    tokenizer = Recording()
    with pytest.raises(PromptTooLong, match="has 4000000 characters, of which the first 16384 are 16384 tokens"):
        check_text_fits(tokenizer, "a" * 4_000_000, 1000)
    assert tokenizer.longest == 2**14


def test_a_text_whose_beginning_may_fit_is_left_to_its_count() -> None:
    tokenizer = Recording()
    check_text_fits(tokenizer, "a" * 19_000, 10_000)
    check_text_fits(tokenizer, "a" * 16_384, 10)
    assert tokenizer.total == 0  # short enough to be encoded at once


def test_special_tokens_as_text_are_counted_as_they_come() -> None:
    """Each is a piece of its own, and costs as much as a short text."""
    tokenizer = Recording()
    template = ChatTemplate.of(tokenizer)
    messages = [{"role": "user", "content": "x<s>" * 50_000}]
    with pytest.raises(PromptTooLong, match="pieces of the prompt"):
        encode_chat(tokenizer, template, messages, max_tokens=100)
    assert tokenizer.total < 2000
    short = [{"role": "user", "content": "x<s>" * 3}]
    assert encode_chat(tokenizer, template, short, max_tokens=100) == encode_chat(tokenizer, template, short)
