"""The vision model inside the package says what is in held-out pictures, and its text is that of the demo model."""

import io
from collections.abc import Iterator

import pytest
from demo_pictures import TASKS, answers, held_out, task_of
from eval_demo_vision import ENOUGH, SIZES, ask, evaluate

from jaxserve import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM.from_config(None, overrides={"model.path": "demo-vision", "model.dtype": "float32", **SIZES}) as llm:
        yield llm


def test_pictures_of_every_task(llm: LLM) -> None:
    """Three of each; one of the twelve may be wrong, as one in some hundred is."""
    pictures = [picture for task in TASKS for picture in held_out(task, 3, seed=21)]
    found = ask(llm, pictures)
    wrong = [(a, p.answer) for a, p in zip(found, pictures, strict=True) if a != p.answer]
    assert len(wrong) <= 1, wrong


def test_text_is_answered_as_by_the_demo_model(llm: LLM) -> None:
    asked = {"What is 683+784?": "1467", 'Reverse "wagon" letter by letter.': "n-o-g-a-w"}
    chats = [[{"role": "user", "content": text}] for text in asked]
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == list(asked.values())


@pytest.mark.slow
def test_two_hundred_pictures(llm: LLM) -> None:
    accuracy = evaluate(llm, 50, seed=22)
    assert sum(accuracy.values()) / len(accuracy) >= ENOUGH, accuracy


def test_drawn_pictures_are_the_same_every_time() -> None:
    def drawn(seed: int) -> list[tuple[str, bytes]]:
        found = []
        for task in TASKS:
            for picture in held_out(task, 2, seed):
                picture.image.save(file := io.BytesIO(), "PNG")
                assert picture.answer in answers()
                assert task_of(picture.answer) == picture.task == task
                found.append((picture.answer, file.getvalue()))
        return found

    assert drawn(5) == drawn(5)
    assert drawn(5) != drawn(6)
