"""What becomes of a client's values before the scheduler sees them: ids, bad words, limits, and what is refused."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from jaxserve.api import NO_OPTIONS, Request, RequestOptions, SamplingParams
from jaxserve.engine import Engine, ModelInfo, Prompt, prepare_request
from jaxserve.errors import InvalidRequest, UnsupportedOption
from jaxserve.sched import create_scheduler
from jaxserve.testing import ByteTokenizer, FakeRunner, make_limits
from jaxserve.text import Tokenizer, load_tokenizer

FIXTURES = Path(__file__).parent.parent / "fixtures" / "tokenizers"
KINDS = ("spm_bpe", "spm_bpe_legacy", "spm_unigram", "llama3", "qwen", "metaspace")
MODEL = ModelInfo(name="fake", vocab_size=259, max_model_len=64, eos_token_ids=(257,))


def prepare(
    prompt: Prompt = "ab",
    sampling: SamplingParams | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    vocab_size: int = 259,
    options: RequestOptions = NO_OPTIONS,
) -> Request:
    model = ModelInfo(name="fake", vocab_size=vocab_size, max_model_len=64, eos_token_ids=(), max_pool_tokens=20)
    return prepare_request(
        prompt,
        sampling or SamplingParams(),
        options,
        request_id="r",
        model=model,
        tokenizer=tokenizer or ByteTokenizer(),
        seed=0,
        arrival_s=0.0,
    )


def make_engine(policy="fcfs", *, tokenizer: bool = True) -> Engine:
    runner = FakeRunner(make_limits(), vocab_size=259)
    return Engine(
        runner=runner,
        scheduler=create_scheduler(policy, runner.limits),
        tokenizer=ByteTokenizer() if tokenizer else None,
        model=MODEL,
    )


@pytest.mark.parametrize(
    "prompt",
    [np.array([1, 2, 3]), np.array([1, 2, 3], np.uint8), [np.int64(1), 2, np.int32(3)], (1, 2, 3), range(1, 4),
     {"prompt_token_ids": np.array([1, 2, 3])}],
    ids=lambda v: repr(v).split(" at 0x")[0],
)  # fmt: skip
def test_whole_numbers_of_any_library_are_ids(prompt) -> None:
    ids = prepare(prompt).prompt_token_ids
    assert ids == (1, 2, 3)
    assert {type(i) for i in ids} == {int}


@pytest.mark.parametrize(
    "prompt",
    [[1, True], [1, np.bool_(True)], np.array([1.0, 2.0]), np.array(3), np.array([[1, 2], [3, 4]]), {1, 2}, [None],
     bytearray(b"ab"), iter([1, 2])],
    ids=lambda v: repr(v).split(" at 0x")[0],
)  # fmt: skip
def test_anything_else_is_refused(prompt) -> None:
    with pytest.raises(InvalidRequest, match="a prompt is text or a list of token ids"):
        prepare(prompt)


@pytest.mark.parametrize(
    ("given", "bias"),
    [({7: 1}, {7: 1.0}), ({"7": -2.5, 8: 0}, {7: -2.5, 8: 0.0}), ({7: np.float32(0.5)}, {7: 0.5}), ({}, None)],
    ids=lambda v: repr(v).split(" at 0x")[0],
)
def test_logit_bias_takes_ids_as_numbers_or_as_json_has_them(given, bias) -> None:
    assert SamplingParams(logit_bias=given).logit_bias == bias


@pytest.mark.parametrize(
    "given",
    [{1.5: 1.0}, {1.0: 1.0}, {True: 1.0}, {"1.0": 1.0}, {" 1": 1.0}, {"-1": 1.0}, {"1_0": 1.0}, {"²": 1.0}, {"": 1.0},
     {None: 1.0}, {"9" * 5000: 1.0}, {7: True}, {7: "1"}, {7: None}, {7: 10**400}, {7: float("nan")}, [(7, 1.0)], 7],
    ids=lambda v: repr(v).split(" at 0x")[0][:20],
)  # fmt: skip
def test_any_other_logit_bias_is_refused(given) -> None:
    with pytest.raises(InvalidRequest, match="logit_bias"):
        SamplingParams(logit_bias=given)


def test_two_biases_of_one_token_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="token 7 twice"):
        SamplingParams(logit_bias={7: 1.0, "7": 2.0})  # type: ignore[dict-item]


def test_more_min_tokens_than_fit_is_refused() -> None:
    resolved = SamplingParams(max_tokens=None, min_tokens=18)
    with pytest.raises(InvalidRequest, match="min_tokens is 18, but at most 17 tokens"):
        prepare([1, 2, 3], resolved)
    assert prepare([1, 2], resolved).max_tokens == 18


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_priority_needs_a_policy_that_reads_it(policy: str) -> None:
    engine = make_engine(policy)
    assert engine.prepare("a", SamplingParams(), RequestOptions(priority=0)).priority == 0
    if policy == "priority":
        assert engine.prepare("a", SamplingParams(), RequestOptions(priority=-3)).priority == -3
        return
    with pytest.raises(InvalidRequest, match="priority needs sched.policy: priority"):
        engine.prepare("a", SamplingParams(), RequestOptions(priority=-3))


def test_a_scheduler_of_somebody_elses_gets_every_priority() -> None:
    class Wrapped:
        def __init__(self, limits, options) -> None:
            self._inner = create_scheduler("fcfs", limits)
            self.add, self.abort = self._inner.add, self._inner.abort
            self.schedule, self.commit = self._inner.schedule, self._inner.commit
            self.has_work = self._inner.has_work

    assert make_engine(Wrapped).prepare("a", SamplingParams(), RequestOptions(priority=5)).priority == 5


def test_echo_of_what_is_no_text_is_refused() -> None:
    silent = SamplingParams(detokenize=False)
    for engine, sampling, why in (
        (make_engine(tokenizer=False), SamplingParams(), "tokenizer"),
        (make_engine(), silent, "detokenize"),
    ):
        with pytest.raises(UnsupportedOption, match=why):
            engine.prepare([1], sampling, RequestOptions(echo=True))


def words_of(kind: str, *bad_words: str) -> tuple[Tokenizer, tuple[tuple[int, ...], ...]]:
    tokenizer = load_tokenizer(FIXTURES / kind)
    sampling = SamplingParams(bad_words=bad_words)
    return tokenizer, prepare("a", sampling, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size).bad_word_ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("word", ["fox", "the", "!", "lazy", "0"])
def test_a_bad_word_is_spelled_with_and_without_a_space(kind: str, word: str) -> None:
    """The pieces of the vocabulary file itself tell which spelling has the space."""
    tokenizer, spellings = words_of(kind, word)
    shown = ["".join(tokenizer.token_text(i) for i in ids) for ids in spellings]
    assert shown == [word, f" {word}"]
    start = tokenizer.encode("\n", add_special_tokens=False)
    assert [tokenizer.decode([*start, *ids]) for ids in spellings] == [f"\n{word}", f"\n {word}"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_word_is_what_the_model_would_write(kind: str) -> None:
    """Inside of a text, each spelling is found among the ids that the tokenizer gives it there."""
    tokenizer, (bare, spaced) = words_of(kind, "fox")
    for text, spelling in (("the\nfox", bare), ("the fox", spaced)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tuple(ids[-len(spelling) :]) == spelling


@pytest.mark.parametrize("kind", KINDS)
def test_equal_spellings_count_once(kind: str) -> None:
    _, spellings = words_of(kind, "fox", " fox", "fox")
    assert len(spellings) == len(set(spellings)) == 2
    assert words_of(kind, " fox")[1] == spellings[1:]


def test_an_unwritable_bad_word_is_refused() -> None:
    class Letters(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return super().encode("".join(c for c in text if c.isalpha()), add_special_tokens=add_special_tokens)

    with pytest.raises(UnsupportedOption, match=r"'!' cannot be written"):
        prepare("a", SamplingParams(bad_words=["!"]), tokenizer=Letters())


def test_every_limit_names_a_remedy() -> None:
    too_many: list[Mapping[str, object]] = [
        {"stop_token_ids": list(range(33))},
        {"bad_words": [str(i) for i in range(33)]},
        {"logit_bias": dict.fromkeys(range(513), 1.0)},
    ]
    for options in too_many:
        with pytest.raises(UnsupportedOption, match="Give fewer"):
            SamplingParams.from_dict(json.loads(json.dumps(options)))
    with pytest.raises(UnsupportedOption, match="1025 characters long.*Give a shorter part"):  # nothing is encoded
        SamplingParams(bad_words=["a" * 1025])
    with pytest.raises(UnsupportedOption, match="34 token sequences .most words make two.*Give fewer"):
        prepare("a", SamplingParams(bad_words=[chr(97 + i) for i in range(17)]))
