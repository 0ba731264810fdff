"""Ids and text against what transformers gives (see scripts/make_tokenizer_fixtures.py), and unusable directories."""

import itertools
import json
import shutil
import threading
from pathlib import Path

import pytest

from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.text import load_tokenizer
from jaxserve.text.hf_tokenizer import HfTokenizer
from jaxserve.text.sentencepiece_tokenizer import SentencePieceTokenizer

FIXTURES = Path(__file__).parent.parent / "fixtures" / "tokenizers"
KINDS = ("spm_bpe", "spm_bpe_legacy", "spm_unigram", "llama3", "qwen", "metaspace")


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def tokenizer(kind):
    return load_tokenizer(FIXTURES / kind)


@pytest.fixture
def expected(kind):
    return json.loads((FIXTURES / kind / "expected.json").read_text(encoding="utf-8"))


def test_ids_match_transformers(tokenizer, expected):
    for case in expected["cases"]:
        assert tokenizer.encode(case["text"]) == case["ids"], case
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids_plain"], case


def test_text_matches_transformers(tokenizer, expected):
    for case in expected["cases"]:
        assert tokenizer.decode(case["ids"]) == case["decoded"], case
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["decoded_full"], case


def test_other_threads_run_while_a_long_text_is_encoded():
    tokenizer = load_tokenizer(FIXTURES / "llama3")
    turns, over = itertools.count(), threading.Event()

    def take_turns():
        while not over.wait(0.001):
            next(turns)

    other = threading.Thread(target=take_turns)
    other.start()
    tokenizer.encode("the quick fox " * 100_000)  # half a second
    over.set()
    other.join()
    assert next(turns) > 5


def test_named_ids_and_sizes(tokenizer, expected):
    assert tokenizer.vocab_size == expected["vocab_size"]
    assert tokenizer.bos_token_id == expected["bos_token_id"]
    assert tokenizer.eos_token_id == expected["eos_token_id"]
    assert tokenizer.special_ids == frozenset(expected["special_ids"])
    assert tokenizer.chat_template is None


def test_token_text_keeps_the_leading_space_and_spells_specials(tokenizer, expected):
    ids = tokenizer.encode("the quick fox", add_special_tokens=False)
    shown = "".join(tokenizer.token_text(i) for i in ids)
    assert shown.lstrip(" ") == "the quick fox"
    assert tokenizer.token_text(expected["eos_token_id"]) == expected["tokens"]["EOS"]


def test_ids_beyond_the_vocabulary_have_no_text(tokenizer):
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    padded = [ids[0], tokenizer.vocab_size + 7, *ids[1:], tokenizer.vocab_size]
    assert tokenizer.decode(padded) == "the fox"
    assert tokenizer.token_text(tokenizer.vocab_size + 7) == ""


def test_a_lone_surrogate_is_a_typed_error(tokenizer):
    with pytest.raises(InvalidRequest, match=r"ud800.*character 3"):
        tokenizer.encode("abc\ud800")


@pytest.mark.parametrize("kind", ["spm_bpe", "spm_unigram", "metaspace"])
def test_bytes_that_are_no_utf8_lose_only_themselves(tokenizer):
    whole = tokenizer.encode("é素", add_special_tokens=False)
    prefix = tokenizer.decode(whole[:-1], skip_special_tokens=True)
    assert tokenizer.decode(whole).endswith("é素")
    assert prefix.endswith("é\ufffd")


def test_tokenizer_json_is_preferred(tmp_path):
    shutil.copytree(FIXTURES / "spm_bpe", tmp_path, dirs_exist_ok=True)
    assert isinstance(load_tokenizer(tmp_path), SentencePieceTokenizer)
    shutil.copy(FIXTURES / "metaspace" / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert isinstance(load_tokenizer(str(tmp_path)), HfTokenizer)


def test_named_tokens_become_special(tmp_path):
    shutil.copy(FIXTURES / "qwen" / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"additional_special_tokens": ["<tool_call>"]}')
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("a<tool_call>b")
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.eos_token_id is None


def test_old_special_tokens_map_and_added_tokens_files(tmp_path):
    shutil.copy(FIXTURES / "spm_bpe" / "tokenizer.model", tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|end|>"}, "bos_token": "<s>"}')
    (tmp_path / "added_tokens.json").write_text('{"<|end|>": 490}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_id == 490
    assert tokenizer.vocab_size == 491
    assert tokenizer.encode("a<|end|>")[0] == tokenizer.bos_token_id == 1
    assert tokenizer.encode("a<|end|>")[-1] == 490
    assert tokenizer.decode(tokenizer.encode("a<|end|>")) == "a"


@pytest.mark.parametrize("kind", ["qwen", "llama3", "metaspace"])
def test_an_added_tokens_file_that_tokenizer_json_has_outgrown(tmp_path, caplog, kind):
    """Only what fits behind the vocabulary is added; a list in tokenizer_config.json goes before the whole file."""
    shutil.copy(FIXTURES / kind / "tokenizer.json", tmp_path)
    plain = load_tokenizer(tmp_path)
    size = plain.vocab_size
    for stale in ({"a": 1}, {"<|old|>": 3}, {"<|old|>": size - 1}, {"<|old|>": size + 7}, {"<|old|>": 10**9}):
        (tmp_path / "added_tokens.json").write_text(json.dumps(stale))
        caplog.clear()
        tokenizer = load_tokenizer(tmp_path)
        assert (tokenizer.vocab_size, tokenizer.encode("<|old|>a")) == (size, plain.encode("<|old|>a"))
        assert [str(tmp_path / "added_tokens.json") in line for line in caplog.messages] == [True] * (
            "<|old|>" in stale
        )
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|b|>": size + 1, "<|a|>": size, "<|old|>": 3}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("<|a|><|b|>", add_special_tokens=False) == [size, size + 1]
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {}}')
    assert load_tokenizer(tmp_path).vocab_size == size
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"3": {"content": "<new>"}}}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: '<new>' should have id 3"):
        load_tokenizer(tmp_path)


def test_prefix_space_can_be_forced_both_ways(tmp_path):
    shutil.copy(FIXTURES / "spm_bpe" / "tokenizer.model", tmp_path)
    spaced = load_tokenizer(tmp_path).encode("the", add_special_tokens=False)
    (tmp_path / "tokenizer_config.json").write_text('{"add_prefix_space": false, "add_eos_token": true}')
    bare = load_tokenizer(tmp_path)
    assert bare.token_text(bare.encode("the", add_special_tokens=False)[0]) != " the"
    assert load_tokenizer(FIXTURES / "spm_bpe").token_text(spaced[0]) == " the"
    assert bare.decode(bare.encode(" the")) == " the"
    assert bare.encode("the")[-1] == bare.eos_token_id == 2


def test_many_reserved_tokens_and_long_blanks_are_cut_out(tmp_path):
    shutil.copy(FIXTURES / "spm_bpe" / "tokenizer.model", tmp_path)
    reserved = {str(500 + i): {"content": f"[control_{i}]", "lstrip": i == 8} for i in range(800)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": reserved}))
    tokenizer = load_tokenizer(tmp_path)
    # What makes the search slow are capture groups and white space that may be matched from its middle.
    pattern = tokenizer._pattern
    assert pattern.groups == 0
    blanks = " " * 50 + "[control_8]"
    assert [pattern.match(blanks, i) is not None for i in (0, 1, 25, 50)] == [True, False, False, True]
    ids = tokenizer.encode(" [jumps] over <the lazy dog" * 10 + "[control_7]" + " " * 200 + "[control_8]")
    assert ids[-2:] == [507, 508]


def write_broken(directory: Path, name: str, content: bytes) -> None:
    shutil.copytree(FIXTURES / ("spm_bpe" if name == "tokenizer.model" else "qwen"), directory, dirs_exist_ok=True)
    (directory / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b""),
        ("tokenizer.json", b'{"model": 3}'),
        ("tokenizer.model", b"\x00\x01 not a model"),
        ("tokenizer.model", b""),
        ("tokenizer_config.json", b"[1, 2]"),
        ("tokenizer_config.json", b"\xff\xfe{}"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {}}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"9": {"content": "<new>"}}}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", b'{"chat_template": 7}'),
        ("special_tokens_map.json", b"nul"),
        ("config.json", b"[" * 100_000),
        ("added_tokens.json", b'{"<x>": "one"}'),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_broken_file_is_named_with_the_remedy(tmp_path, name, content):
    write_broken(tmp_path, name, content)
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path / name) in str(caught.value)
    assert "skip_tokenizer" in str(caught.value)


def test_a_truncated_sentencepiece_model_is_a_typed_error(tmp_path):
    content = (FIXTURES / "spm_bpe" / "tokenizer.model").read_bytes()
    write_broken(tmp_path, "tokenizer.model", content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="skip_tokenizer"):
        load_tokenizer(tmp_path)


def test_a_wild_added_id_is_refused(tmp_path):
    shutil.copy(FIXTURES / "spm_bpe" / "tokenizer.model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"4000000000": {"content": "<x>"}}}')
    with pytest.raises(CheckpointError, match="4000000000"):
        load_tokenizer(tmp_path)


def test_an_empty_or_absent_directory_says_what_to_do(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither tokenizer.json nor tokenizer.model.*skip_tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_tokenizer(tmp_path / "absent")
