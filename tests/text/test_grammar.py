"""Grammars against every kind of tokenizer, without a model: what a random walk through the masks can write."""

import json
import random
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from structured_cases import check_text, schema

from jaxserve.api import SamplingParams, StructuredOutput
from jaxserve.errors import InvalidRequest, UnsupportedOption
from jaxserve.models import resolve_model_path
from jaxserve.testing import ByteTokenizer
from jaxserve.text import load_tokenizer
from jaxserve.text.base import Tokenizer
from jaxserve.text.grammar import GrammarCompiler, TextGrammar
from jaxserve.text.json_schema import compact

FIXTURES = Path(__file__).parent.parent / "fixtures" / "tokenizers"
KINDS = ("bytes", "demo", "spm_bpe", "spm_bpe_legacy", "spm_unigram", "llama3", "qwen", "metaspace")
TEXTS = ["the quick fox", '{"a": [1, 2.5e3]}', "naïve 日本語 😀", "a\n\tb", "\u0001\u007f", "<0x41>", "x▁y"]


def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "bytes":
        return ByteTokenizer()
    return load_tokenizer(resolve_model_path("demo") if kind == "demo" else FIXTURES / kind)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return tokenizer_of(request.param)


def compiler_of(tokenizer: Tokenizer, spare: int = 0) -> GrammarCompiler:
    assert tokenizer.eos_token_id is not None
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + spare, (tokenizer.eos_token_id,))


def bits_of(mask: bytes) -> list[int]:
    bits = int.from_bytes(mask, "little")
    return [i for i in range(len(mask) * 8) if bits >> i & 1]


def walk(tokenizer: Tokenizer, grammar: TextGrammar, rng: random.Random, most: int = 400) -> tuple[list[int], bool]:
    """Ids of a random text that the masks allow, and whether it came to its end."""
    matcher, ids = grammar.start(), []
    while len(ids) < most:
        allowed = bits_of(matcher.mask)
        assert allowed and max(allowed) < tokenizer.vocab_size
        # Short texts: whatever may end a string or the whole ends it half of the time.
        ends = [i for i in allowed if i == tokenizer.eos_token_id or tokenizer.token_bytes(i) in (b'"', b"}", b"]")]
        token_id = rng.choice(ends) if ends and rng.random() < 0.5 else rng.choice(allowed)
        if token_id == tokenizer.eos_token_id:
            return ids, True
        ids.append(token_id)
        matcher.accept(token_id)
        assert matcher.tokens == ids
    return ids, False


def takes(form: StructuredOutput, text: str) -> bool:
    """Whether the whole text fits the form."""
    tokenizer = ByteTokenizer()
    matcher = compiler_of(tokenizer).compile(form).start()
    for byte in text.encode():
        if byte not in bits_of(matcher.mask):
            return False
        matcher.accept(byte)
    return tokenizer.eos_token_id in bits_of(matcher.mask)


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    """As the detokenizer shows it behind a prompt that has a text."""
    before = tokenizer.encode("a", add_special_tokens=False)
    start = tokenizer.decode(before, skip_special_tokens=False)
    return tokenizer.decode([*before, *ids]).removeprefix(start)


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_are_exact(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(tokenizer.token_bytes(i) for i in ids).decode("utf-8", "replace")
    assert joined.removeprefix(" ") == tokenizer.decode(ids, skip_special_tokens=False).removeprefix(" ")


def test_a_byte_level_piece_that_is_no_bytes_stands_for_itself(tmp_path: Path) -> None:
    written = json.loads((FIXTURES / "qwen" / "tokenizer.json").read_text())
    model = written["model"]
    last = model["merges"].pop()
    token_id = model["vocab"].pop("".join(last.split() if isinstance(last, str) else last))
    model["vocab"]["日本 x"] = token_id
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.token_bytes(token_id).decode() == tokenizer.decode([token_id]) == "日本 x"


def test_a_walk_matches_the_regex(tokenizer: Tokenizer) -> None:
    pattern = r"(é|日本| x){2,4}-[0-9a-f]{3}\."
    grammar = compiler_of(tokenizer, spare=70).compile(StructuredOutput(regex=pattern), prompt_ids=(5,))
    for number in range(20):
        ids, ended = walk(tokenizer, grammar, random.Random(number))
        assert ended and re.fullmatch(pattern, text_of(tokenizer, ids)), (ids, text_of(tokenizer, ids))


LOOKED_AT = {
    "type": "object",
    "properties": {"name": {"enum": ["fox", "foxes"]}, "reason": {"const": "because it is so"}},
    "required": ["name", "reason"],
    "additionalProperties": False,
}


def test_what_is_foreseen_is_what_comes(tokenizer: Tokenizer) -> None:
    """Masks behind drafts are those that the matcher has once the drafts are taken, and looking ahead changes none."""
    compiler, num_foreseen, num_looked_up = compiler_of(tokenizer), 0, 0
    for form in ({"json_schema": LOOKED_AT}, {"regex": "(one|two), (one|two) and three[0-9]{0,3}"}):
        grammar = compiler.compile(StructuredOutput(**form), prompt_ids=(5,))
        for seed in range(6):
            rng = random.Random(seed)
            matcher, alone = grammar.start(), grammar.start()
            while (allowed := bits_of(matcher.mask)) != [tokenizer.eos_token_id]:
                guesses = [rng.choice(allowed), *rng.choices(range(tokenizer.vocab_size), k=2)]
                ahead = matcher.foresee(rng.randint(1, 5), lambda before, g=guesses: [] if before else g)
                behind = matcher.masks_after(ahead)
                num_foreseen += len(ahead)
                num_looked_up += ahead[:1] == guesses[:1]
                assert len(ahead) == len(behind) <= 5 and tokenizer.eos_token_id not in ahead
                assert bits_of(matcher.mask) == allowed and matcher.tokens == alone.tokens
                assert len(matcher.masks_after([*ahead, tokenizer.vocab_size])) == len(ahead)
                token_id = ahead[0] if ahead and rng.random() < 0.8 else rng.choice(allowed)
                if token_id == tokenizer.eos_token_id:
                    break
                matcher.accept(token_id)
                alone.accept(token_id)
                assert matcher.mask == alone.mask
                if ahead[:1] == [token_id]:
                    assert behind == [matcher.mask, *matcher.masks_after(ahead[1:])]
    assert num_foreseen > 60 and num_looked_up > 20, (num_foreseen, num_looked_up)


def test_every_choice_can_come_and_nothing_else(tokenizer: Tokenizer) -> None:
    choices = ("red", "redder", 'quo"te\\', "é☃", "😀", "two\nlines")
    grammar = compiler_of(tokenizer).compile(StructuredOutput(choice=choices), prompt_ids=(5,))
    found = {text_of(tokenizer, walk(tokenizer, grammar, random.Random(number))[0]) for number in range(150)}
    assert found == set(choices)


@pytest.mark.parametrize("grammar", ['root ::= ("a" | "b") "-" [0-9]+ ";"', 'start: ("a" | "b") "-" /[0-9]+/ ";"'])
def test_both_ways_to_write_a_grammar(grammar: str) -> None:
    tokenizer = tokenizer_of("demo")
    compiled = compiler_of(tokenizer).compile(StructuredOutput(grammar=grammar), prompt_ids=(5,))
    ids, ended = walk(tokenizer, compiled, random.Random(1))
    assert ended and re.fullmatch("[ab]-[0-9]+;", text_of(tokenizer, ids))


def test_200_schemas_walked_at_random() -> None:
    tokenizer = tokenizer_of("demo")
    compiler, num_ended = compiler_of(tokenizer), 0
    for number in range(200):
        asked = schema(number)
        grammar = compiler.compile(StructuredOutput(json_schema=json.dumps(asked)), prompt_ids=(5,))
        ids, ended = walk(tokenizer, grammar, random.Random(number))
        if ended:
            num_ended += 1
            check_text(asked, text_of(tokenizer, ids))
    assert num_ended > 150


def test_any_object() -> None:
    tokenizer = tokenizer_of("demo")
    grammar = compiler_of(tokenizer).compile(StructuredOutput(json_object=True), prompt_ids=(5,))
    for number in range(20):
        ids, ended = walk(tokenizer, grammar, random.Random(number))
        assert not ended or isinstance(json.loads(text_of(tokenizer, ids)), dict)


_DENSE, _USUAL = '{"a":1,"b":[2,3]}', '{"a": 1, "b": [2, 3]}'
_SPACED = ('{ "a": 1, "b": [2, 3]}', '{"a" : 1, "b": [2, 3]}', '{"a":  1, "b": [2, 3]}', '{"a": 1,\n"b": [2, 3]}')


@pytest.mark.parametrize(
    ("options", "right"),
    [
        (None, {_DENSE, _USUAL}),
        ({}, {_DENSE, _USUAL}),
        ({"lenient": True}, {_DENSE, _USUAL}),
        ({"whitespace_flexible": False}, {_DENSE}),
        ({"whitespace_flexible": True}, {_DENSE, _USUAL, *_SPACED}),
        ({"whitespace_pattern": " ?"}, {_DENSE, _USUAL, *_SPACED[:2]}),
    ],
)
@pytest.mark.parametrize("within_a_grammar", [False, True])
def test_json_is_compact_unless_the_schema_has_options_of_white_space(
    options: dict[str, Any] | None, right: set[str], within_a_grammar: bool
) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "integer"}}},
        "required": ["a", "b"],
        **({} if options is None else {"x-guidance": options}),
    }
    form = StructuredOutput(json_schema=json.dumps(schema))
    if within_a_grammar:
        form = StructuredOutput(grammar=f"start: %json {json.dumps(compact(schema))}")
    assert {text for text in (_DENSE, _USUAL, *_SPACED) if takes(form, text)} == right


def test_any_object_is_compact() -> None:
    form = StructuredOutput(json_object=True)
    assert [takes(form, text) for text in (_DENSE, _USUAL, *_SPACED)] == [True, True, False, False, False, False]


def test_options_that_are_no_object_are_left_to_llguidance() -> None:
    schema = {"type": "object", "x-guidance": 5}
    assert compact(schema) == schema


@pytest.mark.parametrize("kind", ["demo", "spm_bpe", "llama3"])
def test_what_is_long_or_looks_special_is_spelled_in_plain_tokens(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    special = [tokenizer.token_text(i) for i in sorted(tokenizer.special_ids)]
    for text in ("word " * 400, "".join(special), "+".join([".*(a|b)[c]{2}^$#&-~/\\?", *special])):
        for form in (StructuredOutput(choice=(text,)), StructuredOutput(json_schema=json.dumps({"const": text}))):
            grammar = compiler_of(tokenizer).compile(form, prompt_ids=(30,))
            ids, ended = walk(tokenizer, grammar, random.Random(1), most=3000)
            written = text_of(tokenizer, ids)
            assert ended and (written if form.choice else json.loads(written)) == text
            assert not tokenizer.special_ids.intersection(ids)


def test_an_object_of_a_thousand_optional_members() -> None:
    members = {f"p{i}": {"type": "integer"} for i in range(1000)}
    asked = {"type": "object", "properties": members, "additionalProperties": False}
    matcher = compiler_of(ByteTokenizer()).compile(StructuredOutput(json_schema=json.dumps(asked))).start()
    for byte in b'{"p7": 1, "p500": -2, "p999": 3}':
        matcher.accept(byte)
    assert bits_of(matcher.mask) == [257]


def test_thousands_of_choices() -> None:
    tokenizer = tokenizer_of("demo")
    choices = tuple(f"number {i}!" for i in range(3000))
    grammar = compiler_of(tokenizer).compile(StructuredOutput(choice=choices), prompt_ids=(30,))
    found = {text_of(tokenizer, walk(tokenizer, grammar, random.Random(i))[0]) for i in range(30)}
    assert len(found) > 15 and found <= set(choices)


@pytest.mark.parametrize("vocab_size", [258, 259, 287, 288, 289, 320, 32000])
def test_masks_have_a_bit_for_each_token_of_the_model(vocab_size: int) -> None:
    compiler = GrammarCompiler(ByteTokenizer(), vocab_size, (257, vocab_size - 1))
    matcher = compiler.compile(StructuredOutput(regex="[ab]")).start()
    for allowed in ([97, 98], sorted({257, vocab_size - 1})):
        assert len(matcher.mask) == -(-vocab_size // 32) * 4
        assert bits_of(matcher.mask) == allowed
        matcher.accept(97) if 97 in allowed else None


def test_a_complete_text_can_only_end() -> None:
    tokenizer = ByteTokenizer()
    matcher = compiler_of(tokenizer).compile(StructuredOutput(choice=("a",))).start()
    assert bits_of(matcher.mask) == [ord("a")]
    matcher.accept(ord("a"))
    assert bits_of(matcher.mask) == [tokenizer.eos_token_id]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"json_schema": '{"type":"objec"}'}, "json_schema cannot be compiled.*objec"),
        ({"json_schema": '{"type":'}, "json_schema cannot be"),
        ({"json_schema": "[]"}, "json_schema cannot be read"),
        ({"json_schema": '{"$ref":"#/nowhere"}'}, "nowhere"),
        ({"json_schema": '{"not":{}}'}, "not"),
        ({"json_schema": '{"$ref":"#"}'}, "no text fits it; look for a reference to itself$"),
        ({"json_schema": '{"uniqueItems":'}, "json_schema cannot be read"),
        ({"json_schema": '{"items":' * 300 + "{}" + "}" * 300}, "recursion"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"grammar": "start: nowhere"}, "nowhere"),
        ({"grammar": 'root ::= "a'}, "grammar cannot be"),
        ({"json_schema": "false"}, "json_schema"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_words(given: dict[str, str], words: str) -> None:
    compiler = compiler_of(ByteTokenizer())
    for _ in range(2):  # an error is not remembered as a grammar
        with pytest.raises(InvalidRequest, match=words):
            compiler.compile(StructuredOutput(**given))


def test_unique_items_are_asked_for_and_not_seen_to() -> None:
    """pydantic writes a set so; the word may also be a property, and data."""
    properties = {
        "set": {"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "minItems": 2, "maxItems": 2},
        "uniqueItems": {"const": {"uniqueItems": True}},
    }
    wanted = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    matcher = compiler_of(ByteTokenizer()).compile(StructuredOutput(json_schema=json.dumps(wanted))).start()
    for byte in b'{"set":[1,1],"uniqueItems":{"uniqueItems":true}}':
        matcher.accept(byte)
    assert bits_of(matcher.mask) == [257]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"regex": "a", "choice": ("b",)},
        {"json_object": True, "grammar": "x"},
        {"regex": ""},
        {"choice": "ab"},
        {"choice": ("a", "a")},
        {"choice": ("", "b")},
        {"json_object": 1},
        {"json_schema": 5},
        {"regex": "\ud800"},
        {"json_schema": {"a": {1, 2}}},
    ],
)
def test_exactly_one_form_is_given(given: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="structured"):
        SamplingParams(structured=given)


def test_a_form_that_is_too_long_or_unknown_is_refused() -> None:
    with pytest.raises(UnsupportedOption, match="at most 131072"):
        StructuredOutput(regex="a" * 2**17 + "b")
    with pytest.raises(UnsupportedOption, match="json_shema is not supported"):
        SamplingParams(structured={"json_shema": "{}"})
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        SamplingParams(structured={"regex": "a"}, ignore_eos=True)
    assert SamplingParams(structured={"json_schema": {"type": "null"}}).structured == StructuredOutput(
        json_schema='{"type": "null"}'
    )


def test_both_masks_hold() -> None:
    compiler, asked = compiler_of(ByteTokenizer()), StructuredOutput(regex="[a-e]b")
    matcher = compiler.compile(asked, allowed_token_ids=[ord("a"), ord("b"), ord("z")]).start()
    assert bits_of(matcher.mask) == [ord("a"), ord("b")]
    matcher.accept(ord("a"))
    matcher.accept(ord("b"))
    assert bits_of(matcher.mask) == [257], "the end is always allowed"
    with pytest.raises(InvalidRequest, match="after 0 tokens"):
        compiler.compile(asked, allowed_token_ids=[ord("z")])
    matcher = compiler.compile(asked, allowed_token_ids=[ord("a")]).start()
    with pytest.raises(InvalidRequest, match="after 1 tokens"):
        matcher.accept(ord("a"))


def test_no_space_is_lost_at_the_beginning_of_a_text() -> None:
    """This tokenizer drops a space that begins a text, so none may be drawn where it would be dropped."""
    tokenizer = tokenizer_of("spm_bpe")
    bos = tokenizer.bos_token_id
    assert bos is not None
    assert tokenizer.decode(tokenizer.encode("the")) == "the"
    compiler, asked = compiler_of(tokenizer), StructuredOutput(regex=" ?the end")
    for number in range(40):
        ids, ended = walk(tokenizer, compiler.compile(asked, prompt_ids=(bos,)), random.Random(number))
        assert ended and tokenizer.decode([bos, *ids]) == "the end"
    shown = set()
    for number in range(40):
        ids, ended = walk(tokenizer, compiler.compile(asked, prompt_ids=(bos, 30)), random.Random(number))
        shown.add(text_of(tokenizer, ids))
    assert shown == {"the end", " the end"}


def test_matchers_are_independent_and_the_cache_is_bounded() -> None:
    compiler = compiler_of(ByteTokenizer())
    grammar = compiler.compile(StructuredOutput(choice=("ab", "cd")))
    one, other = grammar.start(), grammar.start()
    one.accept(ord("a"))
    other.accept(ord("c"))
    assert (bits_of(one.mask), bits_of(other.mask)) == ([ord("b")], [ord("d")])
    assert compiler.compile(StructuredOutput(choice=("ab", "cd"))).backend is grammar.backend
    for number in range(200):
        compiler.compile(StructuredOutput(regex=f"x{number}"))
    assert len(compiler._cache) <= 64
    assert compiler.compile(StructuredOutput(choice=("ab", "cd"))).backend is not grammar.backend


def test_many_threads_compile_and_match() -> None:
    compiler, errors = compiler_of(tokenizer_of("demo")), []

    def work(seed: int) -> None:
        try:
            for number in range(seed, seed + 12):
                grammar = compiler.compile(StructuredOutput(json_schema=json.dumps(schema(number))), prompt_ids=(5,))
                walk(compiler.tokenizer, grammar, random.Random(number), most=30)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads)
