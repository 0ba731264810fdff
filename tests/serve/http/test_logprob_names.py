"""How completions call tokens, with the demo model's vocabulary: pieces, and a token for each byte."""

from jaxserve.api import TokenLogprobs
from jaxserve.models import resolve_model_path
from jaxserve.serve.http.logprobs import CompletionLogprobsBuilder
from jaxserve.text import load_tokenizer

TOKENIZER = load_tokenizer(resolve_model_path("demo"))
LETTER = TOKENIZER.encode("A", add_special_tokens=False)[0]
FIRST_BYTE = TOKENIZER.encode("\x00", add_special_tokens=False)[0]


def test_tokens_of_one_text_and_parts_of_characters_keep_names_of_their_own() -> None:
    byte = FIRST_BYTE + ord("A")  # the same text as the letter
    top = (LETTER, byte, FIRST_BYTE + 0xE6, FIRST_BYTE + 0xE7)
    values = (-1.0, -2.0, -3.0, -4.0)
    builder = CompletionLogprobsBuilder(TOKENIZER, [1], skip_special_tokens=True, as_ids=False)
    drawn = [TokenLogprobs(token_id, -1.0, 1, top, values) for token_id in (LETTER, byte)]
    built = builder.build(drawn, 4)
    assert built.tokens == ["A", "A"]
    first, second = built.top_logprobs
    assert first == {"A": -1.0, f"token_id:{byte}": -2.0, "bytes:\\xe6": -3.0, "bytes:\\xe7": -4.0}
    assert second == {f"token_id:{LETTER}": -1.0, "A": -2.0, "bytes:\\xe6": -3.0, "bytes:\\xe7": -4.0}


def test_what_is_no_character_after_all_takes_a_place_in_the_text() -> None:
    ids = [FIRST_BYTE + 0xE6, LETTER, FIRST_BYTE + 0xC3, FIRST_BYTE + 0xA9, LETTER]
    assert TOKENIZER.decode(ids) == "\ufffdAéA"
    builder = CompletionLogprobsBuilder(TOKENIZER, [1], skip_special_tokens=True, as_ids=False)
    built = builder.build([TokenLogprobs(token_id, -1.0, 1, (), ()) for token_id in ids], 0)
    assert built.text_offset == [0, 1, 2, 2, 3]
