"""The demo model's two tokenizer files are one vocabulary, other software reads it alike, and its chats are what it was
trained on."""

import json
import random
from pathlib import Path

import pytest
from build_demo_tokenizer import build, convert

from jaxserve.errors import InvalidRequest
from jaxserve.text import ChatTemplate, encode_chat, load_tokenizer
from jaxserve.text.hf_tokenizer import HfTokenizer
from jaxserve.text.sentencepiece_tokenizer import SentencePieceTokenizer
from jaxserve.text.tokenizer_files import read_tokenizer_files

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "jaxserve" / "demo_model"
EXPECTED = json.loads((ROOT / "tests" / "fixtures" / "tokenizers" / "demo.json").read_text(encoding="utf-8"))
CHARACTERS = 'abcXYZ 0123 {}":,.<>|_\u2581\n\t\x00é日本👍\u200d\ufffd\u00a0\u3000e\u0301\ufeff'
ODD = ["<0x0A>", "<unk>", "<|us", " ", "  ", "<spare1>", "<|user|>", "What is 1+2?"]


@pytest.fixture(scope="module")
def tokenizer() -> HfTokenizer:
    loaded = load_tokenizer(DEMO)
    assert isinstance(loaded, HfTokenizer), "what others read is what is served"
    return loaded


def test_ids_are_those_of_transformers(tokenizer: HfTokenizer) -> None:
    assert len(EXPECTED["cases"]) > 60
    for case in EXPECTED["cases"]:
        assert tokenizer.encode(case["text"]) == case["ids"], case
        assert tokenizer.decode(case["ids"]) == case["decoded"], case
    assert len(tokenizer.encode("What is 1+2?")) == 8


def test_chats_are_those_of_transformers(tokenizer: HfTokenizer) -> None:
    template = ChatTemplate.of(tokenizer)
    for case in EXPECTED["chats"]:
        options = {"tools": case["tools"], "add_generation_prompt": case["add_generation_prompt"]}
        assert template.render(case["messages"], **options) == case["text"]
        assert encode_chat(tokenizer, template, case["messages"], **options) == case["ids"]


def test_both_files_give_the_same_ids(tokenizer: HfTokenizer) -> None:
    """The model was trained with sentencepiece."""
    other = SentencePieceTokenizer(read_tokenizer_files(DEMO))
    for name in ("vocab_size", "bos_token_id", "eos_token_id", "special_ids", "chat_template"):
        assert getattr(tokenizer, name) == getattr(other, name), name
    size = tokenizer.vocab_size
    pieces = [other.token_text(i) for i in range(size)]
    assert [tokenizer.token_text(i) for i in range(size + 9)] == [*pieces, *[""] * 9]
    assert [tokenizer.token_bytes(i) for i in range(size + 9)] == [other.token_bytes(i) for i in range(size + 9)]
    rng = random.Random(1)
    for number in range(4000):
        source = (pieces, CHARACTERS, [*pieces, *CHARACTERS, *ODD])[number % 3]
        text = "".join(rng.choice(source) for _ in range(rng.randrange(30)))
        text += "".join(
            chr(c) for c in (rng.randrange(0x110000) for _ in range(number % 4)) if not 0xD800 <= c < 0xE000
        )
        ids = other.encode(text)
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == other.decode(ids)


def test_the_script_makes_these_very_files(tmp_path: Path) -> None:
    build(tmp_path / "tokenizer.model")
    assert (tmp_path / "tokenizer.model").read_bytes() == (DEMO / "tokenizer.model").read_bytes()
    convert(tmp_path / "tokenizer.model", tmp_path / "tokenizer.json")
    made, kept = (json.loads((path / "tokenizer.json").read_text(encoding="utf-8")) for path in (tmp_path, DEMO))
    assert made == kept


def test_plain_chats_are_what_the_model_was_trained_on(tokenizer: HfTokenizer) -> None:
    template, rng = ChatTemplate.of(tokenizer), random.Random(2)
    for _ in range(300):
        roles = rng.choices(["system", "user", "assistant"], k=rng.randrange(1, 6))
        turns = [(role, "".join(rng.choices(" a\n<|é{}%\t", k=rng.randrange(9)))) for role in roles]
        messages = [{"role": role, "content": text} for role, text in turns]
        trained = "<s>" + "".join(f"<|{role}|>{text.strip()}<|end|>" for role, text in turns)
        assert template.render(messages, add_generation_prompt=False) == trained
        assert template.render(messages, tools=[]) == trained + "<|assistant|>"
    with pytest.raises(InvalidRequest, match="a role must be system, developer"):
        template.render([{"role": "critic", "content": "x"}])


def test_a_cut_call_is_written_as_it_is(tokenizer: HfTokenizer) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": "R'}}
    text = ChatTemplate.of(tokenizer).render([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert '<tool_call>{"name": "f", "arguments": {"city": "R}</tool_call><|end|>' in text
