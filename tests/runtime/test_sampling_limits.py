"""What is refused before it reaches the device, and with which words."""

import pytest

from jaxserve.api import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_STOP_TOKEN_IDS, Request, SamplingParams, check_request
from jaxserve.errors import InvalidRequest, UnsupportedOption

V = 50


def make_request(prompt=(1, 2), stop_ids=(), bad_words=(), **options):
    return Request(
        request_id="r",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**options),
        max_tokens=4,
        seed=0,
        stop_token_ids=frozenset(stop_ids),
        bad_word_ids=tuple(tuple(w) for w in bad_words),
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt": (1, V)}, "prompt_token_ids has token id 50"),
        ({"prompt": (1, -1)}, "prompt_token_ids has token id -1"),
        ({"allowed_token_ids": [3, V]}, "allowed_token_ids has token id 50"),
        ({"logit_bias": {V + 7: 1.0}}, "logit_bias has token id 57"),
        ({"stop_token_ids": [V]}, "stop_token_ids has token id 50"),
        ({"bad_words": [(1, V)]}, "bad_words has token id 50"),
    ],
)
def test_ids_outside_of_the_vocabulary(options, words):
    with pytest.raises(InvalidRequest, match=words):
        check_request(make_request(**options), V)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stop_ids": range(MAX_STOP_TOKEN_IDS + 1)}, f"{MAX_STOP_TOKEN_IDS + 1} stop token ids"),
        ({"bad_words": [(1,)] * (MAX_BAD_WORDS + 1)}, f"at most {MAX_BAD_WORDS} work"),
        ({"bad_words": [(1,) * (MAX_BAD_WORD_LEN + 1)]}, f"1 to {MAX_BAD_WORD_LEN} work"),
        ({"bad_words": [()]}, "0 tokens long"),
    ],
)
def test_more_than_the_slots_hold(options, words):
    with pytest.raises(UnsupportedOption, match=words):
        check_request(make_request(**options), V)


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": [3, 4], "bad_words": [(3,), (4,)]},
        {"allowed_token_ids": [3, 4], "bad_words": [(3,)], "stop_ids": (4,), "min_tokens": 1},
        {"bad_words": [(i,) for i in range(2)], "vocab_size": 2, "prompt": (0, 1)},
    ],
)
def test_options_that_leave_no_token(options):
    vocab_size = options.pop("vocab_size", V)
    with pytest.raises(InvalidRequest, match="forbid every token"):
        check_request(make_request(**options), vocab_size)


def test_full_slots_are_fine():
    request = make_request(
        prompt=(0, V - 1),
        stop_ids=range(MAX_STOP_TOKEN_IDS),
        bad_words=[(i,) * MAX_BAD_WORD_LEN for i in range(MAX_BAD_WORDS)],
        allowed_token_ids=[3, V - 1],
        logit_bias={0: 1.0, V - 1: -1.0},
        min_tokens=2,
    )
    check_request(request, V)
