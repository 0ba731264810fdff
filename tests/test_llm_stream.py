"""`LLM.stream`, copies of `SamplingParams`, and the tokenizer of a loaded model, on the fake device."""

import dataclasses
import signal
from collections.abc import Iterator

import pytest
from fake_parts import Fakes

from jaxserve import LLM, SamplingParams
from jaxserve.errors import DeadlineExceeded, EngineStopped, InvalidRequest, UnsupportedOption
from jaxserve.offline.llm import Update
from jaxserve.sched import ContinuousScheduler

FOUR = SamplingParams(temperature=0.0, max_tokens=4)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes().install(monkeypatch.setattr)


@pytest.fixture
def llm(fakes: Fakes) -> Iterator[LLM]:
    with LLM(served_model_name="fake", block_size=4) as llm:
        yield llm
        scheduler = llm._engine._scheduler
        assert isinstance(scheduler, ContinuousScheduler)
        scheduler.check()
        assert llm._engine.num_live == scheduler.num_held_pages == 0 and not scheduler.has_work()


def text(updates: list[Update], index: int = 0) -> str:
    return "".join(update.text for update in updates if update.index == index)


def test_news_come_one_by_one_and_end(llm: LLM, fakes: Fakes) -> None:
    stream = llm.stream("abc", FOUR)
    assert fakes.runner is not None and not fakes.runner.plans, "nothing runs before the first is asked for"
    first = next(stream)
    assert first.text and not first.last and len(fakes.runner.plans) < 4
    updates = [first, *stream]
    assert text(updates) == llm.generate("abc", FOUR, use_tqdm=False)[0].outputs[0].text == "defg"
    assert [update.last for update in updates] == [False] * (len(updates) - 1) + [True]
    assert updates[-1].finish_reason == "length"


def test_all_forms_of_prompts(llm: LLM) -> None:
    for prompt in ([256, 97, 98, 99], {"prompt": "abc"}, {"prompt_token_ids": [256, 97, 98, 99]}):
        assert text(list(llm.stream(prompt, FOUR))) == "defg"
    assert text(list(llm.stream("abc", FOUR, echo=True))) == "abcdefg"
    assert text(list(llm.stream(HI, FOUR))) == llm.chat(HI, FOUR, use_tqdm=False)[0].outputs[0].text
    several = list(llm.stream("abc", FOUR.clone(n=2)))
    assert text(several, 0) == text(several, 1) == "defg" and sum(update.last for update in several) == 1


def test_who_leaves_ends_the_request(llm: LLM) -> None:
    stream = llm.stream("abc", SamplingParams(temperature=0.0, max_tokens=50))
    next(stream)
    assert llm._engine.num_live == 1
    stream.close()
    assert llm._engine.num_live == 0
    for _ in llm.stream("abc", SamplingParams(temperature=0.0, max_tokens=50)):
        break  # nothing else holds the generator
    assert llm._engine.num_live == 0


def test_other_calls_between_two_updates(llm: LLM) -> None:
    first, second = llm.stream("abc", FOUR), llm.stream("aaa", SamplingParams(temperature=0.0, max_tokens=20))
    begun = [next(first)]
    assert next(second).text == "b"
    assert llm.generate("xyz", FOUR, use_tqdm=False)[0].outputs[0].text == "{|}~"
    assert text([*begun, *first]) == "defg"
    second.close()


def test_errors_come_at_the_call(llm: LLM) -> None:
    for prompt, options, words in (
        ([], {}, "empty"),
        ([259], {}, "outside the vocabulary"),
        ("abc", {"chat_template_kwargs": {}}, "for conversations"),
        (HI, {"echo": True}, "echo is for prompts"),
        ([{"role": "user"}], {}, "needs content"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            llm.stream(prompt, FOUR, **options)
    with pytest.raises(UnsupportedOption, match="stream has no argument 'lora_request'; here it is 'adapter'"):
        llm.stream("a", lora_request=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    with pytest.raises(DeadlineExceeded):
        list(llm.stream("abc", SamplingParams(max_tokens=50), timeout_s=1e-9))


def test_an_interrupt_ends_the_request(llm: LLM) -> None:
    stream = llm.stream("abc", SamplingParams(temperature=0.0, max_tokens=50))
    next(stream)
    step, presses = llm._engine.step, iter(range(2))

    def interrupted() -> bool:
        if next(presses, None) is not None:  # the second one while the request is ended
            signal.raise_signal(signal.SIGINT)
        return step()

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    llm._engine.step = interrupted  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            for _ in stream:
                pass
    finally:
        llm._engine.step = step  # type: ignore[method-assign]
        signal.signal(signal.SIGINT, before)
    assert text(list(llm.stream("abc", FOUR))) == "defg"


def test_a_device_that_fails_ends_the_engine(fakes: Fakes) -> None:
    fakes.fail_at = (1, "dispatch")
    llm = LLM(served_model_name="fake", block_size=4)
    with pytest.raises(Exception, match="injected failure of step 1"):
        list(llm.stream("abc", FOUR))
    with pytest.raises(EngineStopped):
        list(llm.stream("abc", FOUR))


def test_a_stream_of_an_engine_that_was_closed(fakes: Fakes) -> None:
    llm = LLM(served_model_name="fake", block_size=4)
    stream = llm.stream("abc", SamplingParams(max_tokens=50))
    next(stream)
    llm.close()
    stream.close()


def test_copies_of_sampling_params() -> None:
    params = SamplingParams(temperature=0.5, stop="x", logit_bias={"3": 1}, structured={"regex": "a"})  # type: ignore
    assert params.clone() == params and params.clone() is not params
    assert params.clone(max_tokens=5, stop=["a"]) == dataclasses.replace(params, max_tokens=5, stop=("a",))
    assert params.max_tokens == 16
    with pytest.raises(InvalidRequest, match="temperature is -1"):
        params.clone(temperature=-1)
    with pytest.raises(UnsupportedOption, match="here it is 'max_tokens'"):
        params.clone(max_new_tokens=5)


def test_the_tokenizer_is_called_as_those_of_transformers(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    assert tokenizer is not None and llm.get_tokenizer() is not None
    assert tokenizer("abc") == {"input_ids": [256, 97, 98, 99], "attention_mask": [1, 1, 1, 1]}
    assert tokenizer("abc", add_special_tokens=False)["input_ids"] == [97, 98, 99]
    assert tokenizer(["a", "bc"]) == {"input_ids": [[256, 97], [256, 98, 99]], "attention_mask": [[1, 1], [1, 1, 1]]}
    assert tokenizer.decode(tokenizer.encode("abc")).endswith("abc")
    assert tokenizer.batch_decode([[97], [256, 98]], skip_special_tokens=True) == ["a", "b"]
    assert len(tokenizer) == tokenizer.vocab_size and tokenizer.eos_token_id in tokenizer.all_special_ids
    assert tokenizer.eos_token == tokenizer.token_text(257)
    with pytest.raises(UnsupportedOption, match="__call__ has no argument 'return_tensors'; not needed here"):
        tokenizer("a", return_tensors="pt")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def test_chats_are_rendered_as_they_are_answered(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    [answer] = llm.chat(HI, FOUR, use_tqdm=False)
    assert tokenizer.apply_chat_template(HI, tokenize=False, add_generation_prompt=True) == answer.prompt
    ids = tokenizer.apply_chat_template(HI, add_generation_prompt=True, return_dict=False)
    assert ids == answer.prompt_token_ids
    whole = tokenizer.apply_chat_template(HI, add_generation_prompt=True)
    assert whole == {"input_ids": ids, "attention_mask": [1] * len(ids)}
    assert tokenizer.apply_chat_template(HI, tokenize=False) != answer.prompt
    own = "{{ messages[0].content }}{{ mood }}"
    shown = tokenizer.apply_chat_template(HI, chat_template=own, tokenize=False, chat_template_kwargs={"mood": "!"})
    assert shown == "hi!"
    with pytest.raises(InvalidRequest, match="needs content"):
        tokenizer.apply_chat_template([{"role": "user"}])
