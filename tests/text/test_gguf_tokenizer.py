"""Tokenizers from the metadata of GGUF give the ids of the tokenizer.json or tokenizer.model they were made of."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxserve.errors import CheckpointError
from jaxserve.models import resolve_model_path
from jaxserve.text import ChatTemplate, Tokenizer, encode_chat, load_tokenizer

FIXTURES = Path(__file__).parent.parent / "fixtures" / "tokenizers"
TEXTS = (
    "",
    " ",
    "   leading, and trailing   ",
    "the quick brown fox can't; HE'LL, I'M, they'd we'Ve",
    "x=1234567890; y=3.14159e-10 // 007",
    "line\n\n\nbreaks\r\n\ttabs\t\t and  two spaces\n ",
    "naïve Å (A + ring), e\u0301 and é; ½ ² Ⅷ ٣٤",
    "日本語のテキスト、素晴らしい 한국어 ไทย हिन्दी",
    "emoji 👩‍👩‍👧‍👦 🇺🇸 \u200b zero width",
    "camelCaseWords SHOUTING mixedUP/path\\to//file\r\n/x",
    "<|im_start|>user\nhi<|im_end|><tool_call>",
    "<|begin|><|header|>text<|end|> </s><s> <unk>",
    "\u2581already\u2581marked \ufffd \x00\x01",
)
# Regular expressions as the published tokenizer.json of one model of each has them.
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = CL100K.replace("{1,3}", "")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")


def from_json(path: Path, directory: Path, pre: str, **more: Any) -> Path:
    """The metadata that llama.cpp's converter writes of a byte-level tokenizer.json."""
    content = json.loads((directory / "tokenizer.json").read_text())
    vocab, added = content["model"]["vocab"], {t["id"]: t for t in content["added_tokens"]}
    tokens = {i: text for text, i in vocab.items()} | {i: t["content"] for i, t in added.items()}
    count = max(tokens) + 1
    kinds = {i: 3 if t["special"] else 4 for i, t in added.items()}
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [tokens.get(i, f"[PAD{i}]") for i in range(count)],
        "tokenizer.ggml.token_type": [kinds.get(i, 1 if i in tokens else 5) for i in range(count)],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]],
    }
    return gguf_files.write(path, metadata | {f"tokenizer.{key}": value for key, value in more.items()}, {})


def from_sentencepiece(path: Path, directory: Path, **more: Any) -> Path:
    metadata = gguf_files.sentencepiece_metadata(directory)
    return gguf_files.write(path, metadata | {f"tokenizer.{key}": value for key, value in more.items()}, {})


def assert_same(found: Tokenizer, wanted: Tokenizer, texts: tuple[str, ...] = TEXTS) -> None:
    for text in texts:
        for special in (True, False):
            ids = wanted.encode(text, add_special_tokens=special)
            assert found.encode(text, add_special_tokens=special) == ids, text
            assert found.decode(ids, skip_special_tokens=special) == wanted.decode(ids, skip_special_tokens=special)
    assert (found.bos_token_id, found.eos_token_id) == (wanted.bos_token_id, wanted.eos_token_id)
    assert found.special_ids == wanted.special_ids
    assert [found.token_bytes(i) for i in range(wanted.vocab_size)] == [
        wanted.token_bytes(i) for i in range(wanted.vocab_size)
    ]


def with_pattern(source: Path, target: Path, pattern: str, **model: Any) -> Path:
    """A fixture that cuts text by another regular expression."""
    shutil.copytree(source, target)
    content = json.loads((target / "tokenizer.json").read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    content["model"] |= model
    (target / "tokenizer.json").write_text(json.dumps(content))
    return target


@pytest.mark.parametrize(
    ("pre", "pattern", "model"),
    [
        ("llama-bpe", CL100K, {"ignore_merges": True}),
        ("dbrx", CL100K, {}),
        ("gpt-4o", O200K, {}),
        ("tekken", TEKKEN, {"ignore_merges": True}),
    ],
)
def test_byte_level_with_a_pattern(pre: str, pattern: str, model: dict[str, Any], tmp_path: Path) -> None:
    source = with_pattern(FIXTURES / "llama3", tmp_path / "source", pattern, **model)
    ids = {"ggml.bos_token_id": 560, "ggml.eos_token_id": 563, "ggml.add_bos_token": True}
    assert_same(load_tokenizer(from_json(tmp_path / "a.gguf", source, pre, **ids)), load_tokenizer(source))


def test_byte_level_of_qwen(tmp_path: Path) -> None:
    """Normalised to NFC; no token is added in front; a token to be cut out that is not special."""
    source = with_pattern(FIXTURES / "qwen", tmp_path / "source", QWEN2)
    original = load_tokenizer(source)
    path = from_json(tmp_path / "a.gguf", source, "qwen2", **{"ggml.eos_token_id": original.eos_token_id})
    assert_same(load_tokenizer(path), original)


@pytest.mark.parametrize(("pre", "digits"), [("gpt-2", False), ("starcoder", True)])
def test_byte_level_by_the_pattern_of_gpt2(pre: str, digits: bool, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|endoftext|>"],
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator([*TEXTS, "they're 1234 12 123 cats' can't"] * 3, trainer)
    (tmp_path / "source").mkdir()
    backend.save(str(tmp_path / "source" / "tokenizer.json"))
    (tmp_path / "source" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    path = from_json(tmp_path / "a.gguf", tmp_path / "source", pre, **{"ggml.eos_token_id": 0})
    assert_same(load_tokenizer(path), load_tokenizer(tmp_path / "source"))


@pytest.mark.parametrize("kind", ["spm_bpe", "spm_unigram"])
def test_sentencepiece(kind: str, tmp_path: Path) -> None:
    """Against transformers' ids, for texts without the tokens that only tokenizer_config.json adds."""
    expected = json.loads((FIXTURES / kind / "expected.json").read_text())
    options = json.loads((FIXTURES / kind / "tokenizer_config.json").read_text())
    added = {f"ggml.add_{role}_token": bool(options.get(f"add_{role}_token", role == "bos")) for role in ("bos", "eos")}
    path = from_sentencepiece(tmp_path / "a.gguf", FIXTURES / kind, **added)
    found, beyond = load_tokenizer(path), load_tokenizer(path).vocab_size
    cases = [case for case in expected["cases"] if max(case["ids"], default=0) < beyond]
    assert len(cases) > 10
    for case in cases:
        assert found.encode(case["text"]) == case["ids"], case
        assert found.decode(case["ids"]) == case["decoded"], case


def test_a_token_of_spaces_is_cut_out(tmp_path: Path) -> None:
    """Gemma has such tokens; converters write them with spaces, sentencepiece with its mark."""
    metadata = gguf_files.sentencepiece_metadata(FIXTURES / "spm_bpe")
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    metadata["tokenizer.ggml.tokens"][last], metadata["tokenizer.ggml.token_type"][last] = "   ", 4
    tokenizer = load_tokenizer(gguf_files.write(tmp_path / "a.gguf", metadata, {}))
    ids = tokenizer.encode("a   b", add_special_tokens=False)
    assert last in ids and tokenizer.token_bytes(last) == b"   " and tokenizer.decode(ids) == "a   b"


def test_the_demo_model(tmp_path: Path) -> None:
    """Its tokenizer.json is the original, its tokenizer.model what a converter reads; it has a chat template."""
    directory = resolve_model_path("demo")
    original = load_tokenizer(directory)
    more = {"ggml.eos_token_id": 6, "chat_template": original.chat_template, "chat_template.tools": "{{ tools }}"}
    found = load_tokenizer(from_sentencepiece(tmp_path / "a.gguf", directory, **more))
    assert_same(found, original, tuple(text for text in TEXTS if "\u2581" not in text and "\x00" not in text))
    messages = [{"role": "user", "content": "hello"}]
    assert encode_chat(found, ChatTemplate.of(found), messages) == encode_chat(
        original, ChatTemplate.of(original), messages
    )


def test_what_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    remedy = "point model.tokenizer at a directory with the tokenizer.json of the original model"
    for pre in ("default", "chameleon"):
        with pytest.raises(CheckpointError, match=rf"pre: it is '{pre}', .* known: dbrx.*qwen2.*tekken; {remedy}"):
            load_tokenizer(from_json(path, FIXTURES / "qwen", pre))
    for changes, said in (
        ({"ggml.model": "bert"}, "model: it is 'bert', which is not supported; known: gpt2, llama, t5"),
        ({"ggml.merges": ["h e", "he"]}, "merges: 'he' are not two tokens with a space between"),
        ({"ggml.merges": ["nothing such"]}, "ggml.merges: .*nothing"),
        (
            {"ggml.token_type": [1, 1]},
            r"token_type: it is <2 values of type INT32>, but must be an array of \d+ values",
        ),
        ({"ggml.bos_token_id": 9999, "ggml.add_bos_token": True}, "bos_token_id: it is 9999, but there are"),
    ):
        with pytest.raises(CheckpointError, match=said):
            load_tokenizer(from_json(path, FIXTURES / "qwen", "qwen2", **changes))
    with pytest.raises(CheckpointError, match="scores: all tokens have the same, or none"):
        load_tokenizer(from_sentencepiece(path, FIXTURES / "spm_bpe", **{"ggml.scores": [-1000.0] * 480}))
    with pytest.raises(CheckpointError, match=rf"has no tokenizer \(tokenizer.ggml.tokens is missing\); {remedy}"):
        load_tokenizer(gguf_files.write(path, {}, {}))


def test_a_tokenizer_beside_the_file_comes_first(tmp_path: Path) -> None:
    """A directory with one GGUF file and a tokenizer.json: the file that somebody has put there counts."""
    from_json(tmp_path / "a.gguf", FIXTURES / "qwen", "unheard-of")
    with pytest.raises(CheckpointError, match="it is 'unheard-of'"):
        load_tokenizer(tmp_path)
    shutil.copy(FIXTURES / "qwen" / "tokenizer.json", tmp_path)
    assert load_tokenizer(tmp_path).encode("the fox") == load_tokenizer(FIXTURES / "qwen").encode("the fox")
