"""Encodings that are remembered are right, bounded and shared by threads."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequest
from jaxserve.testing import ByteTokenizer
from jaxserve.text import CachingTokenizer
from jaxserve.text.base import check_text


class Counting(ByteTokenizer):
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.asked.append(text)
        check_text(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


def test_the_second_time_costs_nothing() -> None:
    inner = Counting()
    cached = CachingTokenizer(inner, 10_000)
    first = cached.encode("abc")
    first.append(99)  # a caller's own list
    assert cached.encode("abc") == [256, 97, 98, 99]
    assert cached.encode("abc", add_special_tokens=False) == [97, 98, 99]
    assert inner.asked == ["abc", "abc"], "with and without special tokens are two texts"
    assert (cached.hits, cached.misses) == (1, 2)


@given(st.lists(st.text(max_size=30), max_size=60))
def test_it_is_bounded_and_right(texts: list[str]) -> None:
    cached, plain = CachingTokenizer(Counting(), 2_000), ByteTokenizer()
    for text in texts:
        assert cached.encode(text) == plain.encode(text)
        assert cached.num_bytes <= 2_000


def test_the_least_used_goes_first_and_giants_stay_out() -> None:
    inner = Counting()
    cached = CachingTokenizer(inner, 1_000)  # four entries
    for text in ("a", "b", "c", "d", "a", "e", "f" * 500):
        cached.encode(text)
    inner.asked.clear()
    for text in ("a", "e", "d", "b"):
        cached.encode(text)
    assert inner.asked == ["b"]


def test_what_is_refused_is_refused_each_time() -> None:
    cached = CachingTokenizer(Counting(), 10_000)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="surrogate"):
            cached.encode("a\ud800")


def test_the_rest_is_the_inner_tokenizers() -> None:
    inner = ByteTokenizer()
    cached = CachingTokenizer(inner, 100)
    for name in ("vocab_size", "eos_token_id", "bos_token_id", "special_ids", "chat_template"):
        assert getattr(cached, name) == getattr(inner, name)
    assert cached.decode([97, 256], skip_special_tokens=False) == "a<s>"
    assert cached.token_text(98) == "b"
    assert cached.token_bytes(98) == b"b"


def test_threads_share_it() -> None:
    cached, plain, wrong = CachingTokenizer(Counting(), 3_000), ByteTokenizer(), []

    def work(seed: int) -> None:
        for i in range(500):
            text = f"text {(seed * 7 + i) % 23}"
            if cached.encode(text) != plain.encode(text):
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert cached.num_bytes <= 3_000
    assert cached.hits + cached.misses == 2_000
