"""Streaming against decoding the whole, and stop strings against a search letter by letter."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.text import Detokenizer, Tokenizer, load_tokenizer

FIXTURES = Path(__file__).parent.parent / "fixtures" / "tokenizers"
KINDS = ("spm_bpe", "spm_unigram", "llama3", "qwen", "metaspace")
REAL = {kind: load_tokenizer(FIXTURES / kind) for kind in KINDS}


class Bytes:
    """Id = byte; 256 and 257 are special, more has no text. Counts the ids it decodes."""

    vocab_size = 258
    bos_token_id, eos_token_id, chat_template = 256, 257, None
    special_ids = frozenset({256, 257})

    def __init__(self) -> None:
        self.num_decoded = 0
        self.longest = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(ids)
        self.longest = max(self.longest, len(ids))
        names = {256: b"" if skip_special_tokens else b"<s>", 257: b"" if skip_special_tokens else b"</s>"}
        parts = [bytes([i]) if i < 256 else names.get(i, b"") for i in ids]
        return b"".join(parts).decode("utf-8", errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        names = {256: b"<s>", 257: b"</s>"}
        return bytes([token_id]) if token_id < 256 else names.get(token_id, b"")


def split(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def whole_text(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], skip: bool) -> str:
    """The text that `ids` add to a prompt. A prompt that ends within a character leaves that character to `ids`."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    after = tokenizer.decode([*prompt, *ids], skip_special_tokens=skip)
    start = len(before)
    if before.endswith("\ufffd") and after[start - 1] != "\ufffd":
        start -= 1
    return after[start:]


def first_stop(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def check_stream(
    tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], cuts: Sequence[int], skip: bool
) -> None:
    expected = whole_text(tokenizer, prompt, ids, skip)
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    shown = ""
    for part in split(ids, cuts):
        shown += detokenizer.push(part)
        assert expected.startswith(shown), (expected, shown)
    assert len(expected) - len(shown) <= 1  # at most one unfinished character waits
    assert shown + detokenizer.flush() == expected
    assert detokenizer.flush() == ""
    assert detokenizer.num_tokens == len(ids)


cut_lists = st.lists(st.integers(0, 200), max_size=60)
texts = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("ab  \n\u2581é素👩\u200d🇫🇷\u0301\ufffd")), max_size=40
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(text=texts, prompt=texts, cuts=cut_lists, skip=st.booleans())
@example(text=" lead", prompt="", cuts=[1, 2, 3], skip=True)
@example(text="👩\u200d👩\u200d👧", prompt="é", cuts=list(range(40)), skip=True)
def test_streamed_text_equals_whole_text(kind, text, prompt, cuts, skip):
    tokenizer = REAL[kind]
    prompt_ids = tokenizer.encode(prompt)
    check_stream(tokenizer, prompt_ids, tokenizer.encode(text, add_special_tokens=False), cuts, skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(data=st.data(), cuts=cut_lists, skip=st.booleans())
def test_any_ids_stream_as_they_decode(kind, data, cuts, skip):
    tokenizer = REAL[kind]
    anything = st.integers(0, tokenizer.vocab_size + 3)
    piecewise = st.sampled_from([i for c in "é素👍 <" for i in tokenizer.encode(c, add_special_tokens=False)])
    ids = st.lists(st.one_of(anything, piecewise, st.sampled_from(sorted(tokenizer.special_ids))), max_size=60)
    check_stream(tokenizer, data.draw(ids), data.draw(ids), cuts, skip)


@settings(max_examples=400)
@given(
    prompt=st.binary(max_size=12),
    data=st.lists(st.one_of(st.integers(0, 260), st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0xC3, 0x61])), max_size=60),
    cuts=cut_lists,
    skip=st.booleans(),
)
@example(prompt=b"\xf0\x9f", data=[0x98, 0x80, 0x61], cuts=[1, 2], skip=True)
@example(prompt="\ufffd".encode(), data=[0x61], cuts=[], skip=True)
@example(prompt=b"", data=[0xF0, 256, 0x9F, 257, 0x98, 259, 0x80], cuts=list(range(7)), skip=True)
def test_any_bytes_stream_as_they_decode(prompt, data, cuts, skip):
    check_stream(Bytes(), list(prompt), data, cuts, skip)


def _wordpiece() -> tokenizers.Tokenizer:
    """A decoder that puts spaces between tokens."""
    vocabulary = {"[UNK]": 0, "a": 1, "b": 2}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[UNK]"])
    return backend


def _byte_level() -> tokenizers.Tokenizer:
    """An added token with a letter that stands for another byte in byte-level pieces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["été"])
    return backend


@pytest.mark.parametrize(
    ("backend", "ids"), [(_wordpiece(), [1, 0, 2, 0, 0, 1]), (_byte_level(), [64, 256, 64, 64, 256])]
)
@pytest.mark.parametrize("cuts", [[], [1, 2, 3, 4, 5], [2, 3]])
def test_added_tokens_stream_as_the_library_decodes_them(tmp_path, backend, ids, cuts):
    backend.save(str(tmp_path / "tokenizer.json"))
    check_stream(load_tokenizer(tmp_path), [], ids, cuts, False)


def test_no_half_character_is_shown():
    detokenizer = Detokenizer(Bytes())
    assert [detokenizer.push([byte]) for byte in "é👍".encode()] == ["", "é", "", "", "", "👍"]
    assert detokenizer.flush() == ""


def test_the_first_word_has_a_space_only_behind_a_prompt():
    tokenizer = REAL["spm_bpe"]
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    assert Detokenizer(tokenizer, tokenizer.encode("")).push(ids) == "the fox"
    assert Detokenizer(tokenizer, tokenizer.encode("Hello")).push(ids) == " the fox"


def test_specials_vanish_in_the_middle_or_are_spelled_out():
    tokenizer = REAL["llama3"]
    ids = tokenizer.encode("a<|eot|>b<|header|>", add_special_tokens=False)
    assert "".join(map(Detokenizer(tokenizer).push, ([i] for i in ids))) == "ab"
    assert "".join(map(Detokenizer(tokenizer, (), False).push, ([i] for i in ids))) == "a<|eot|>b<|header|>"


@pytest.mark.parametrize(
    "ids",
    [
        list("plain text, then 素早い茶色の狐 and 👍🏽. ".encode()) * 60,
        [0xFF] * 3000,
        [0x80] * 3000,
        [0xF0, 0x9F] * 1500,
        list("😀".encode() + b"\x80") * 600,
        [256] * 3000,
        [0x61] + [300] * 3000,
    ],
    ids=["text", "invalid", "continuation", "unfinished", "valid and invalid", "special", "padding"],
)
def test_the_cost_of_a_token_does_not_grow(ids):
    tokenizer = Bytes()
    detokenizer = Detokenizer(tokenizer, list(b"A prompt. " * 1000))
    for token_id in ids:
        detokenizer.push([token_id])
    assert tokenizer.longest <= 24
    assert tokenizer.num_decoded <= 20 * len(ids) + 24


stop_texts = st.lists(st.text("ab👍", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=500)
@given(text=st.text("ab👍\n", max_size=40), stops=stop_texts, cuts=cut_lists, include=st.booleans())
@example(text="xxabcab", stops=["abcd", "bc", "c"], cuts=list(range(8)), include=False)
@example(text="aaab", stops=["aab"], cuts=[3], include=True)
def test_stop_strings_at_any_split(text, stops, cuts, include):
    ids = list(text.encode())
    expected, stop = first_stop(text, stops, include)
    detokenizer = Detokenizer(Bytes(), (), True, tuple(stops), include)
    shown = ""
    for part in split(ids, cuts):
        shown += detokenizer.push(part)
        assert expected.startswith(shown), (expected, shown)
    assert shown + detokenizer.flush() == expected
    assert detokenizer.stopped == stop
    consumed = len(text.encode()) if stop is None else len((expected + ("" if include else stop)).encode())
    assert detokenizer.num_tokens == consumed
    if stop is not None:
        assert detokenizer.push(ids) == ""
    assert detokenizer.flush() == ""


@settings(max_examples=300)
@given(text=st.text("ab", max_size=30), stops=stop_texts)
def test_nothing_is_held_longer_than_a_stop_string_needs(text, stops):
    detokenizer = Detokenizer(Bytes(), (), True, tuple(stops))
    shown = ""
    for end in range(1, len(text) + 1):
        shown += detokenizer.push([ord(text[end - 1])])
        if detokenizer.stopped is not None:
            return
        beginnings = [k for stop in stops for k in range(1, len(stop)) if text[:end].endswith(stop[:k])]
        assert shown == text[: end - max(beginnings, default=0)]


@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings_across_real_tokens(kind):
    tokenizer = REAL[kind]
    ids = tokenizer.encode("the quick brown fox\n\nUser: and more", add_special_tokens=False)
    for size in (1, 2, 3, len(ids)):
        detokenizer = Detokenizer(tokenizer, (), True, ("\n\nUser:", "zzz"))
        shown = "".join(detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size))
        assert (shown + detokenizer.flush(), detokenizer.stopped) == ("the quick brown fox", "\n\nUser:")
        assert detokenizer.num_tokens < len(ids)


def test_a_stop_string_within_min_tokens_does_not_count():
    def run(min_tokens: int) -> tuple[str, str | None, int]:
        detokenizer = Detokenizer(Bytes(), (), True, ("ab",), min_tokens=min_tokens)
        text = detokenizer.push(list(b"xabxabx")) + detokenizer.flush()
        return text, detokenizer.stopped, detokenizer.num_tokens

    assert run(0) == run(2) == ("x", "ab", 3)
    assert run(3) == run(5) == ("xabx", "ab", 6)
    assert run(6) == ("xabxabx", None, 7)


def test_an_unfinished_character_can_complete_a_stop_string_at_the_end():
    detokenizer = Detokenizer(Bytes(), (), True, ("a\ufffd",))
    assert detokenizer.push(b"xa\xf0") == "x"
    assert detokenizer.flush() == ""
    assert detokenizer.stopped == "a\ufffd"
