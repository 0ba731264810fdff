"""Pictures in prompts, chats and files of prompts, as `LLM` and `jaxserve run` prepare them, on a fake engine."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from picture_parts import PLACEHOLDER, picture_parts, png, url_of
from PIL import Image

from jaxserve.api import Request, SamplingParams
from jaxserve.errors import ConfigError, InvalidRequest, QueueFull, UnsupportedOption
from jaxserve.offline import open_under, prepare_chat
from jaxserve.offline.jsonl import BatchOptions, Entry, make_job, make_jobs, read_entries

PARTS = picture_parts()
ENGINE = PARTS.engine


def prepare(data: Any, text: str = f"a{PLACEHOLDER}b", **sampling: Any) -> Request:
    return ENGINE.prepare({"prompt": text, "multi_modal_data": data}, SamplingParams(**sampling))


def test_bytes_and_open_pictures_are_the_same_picture() -> None:
    data = png(colour=5)
    opened = Image.open(io.BytesIO(data))
    requests = [prepare({"image": given}) for given in (data, bytearray(data), opened, [data])]
    assert len({request.pictures[0].picture.digest for request in requests}) == 1
    assert requests[0].prompt_token_ids == (256, 97, *[259] * 6, 98)
    assert requests[0].content == (requests[0].pictures[0].span,) == ((2, 6, requests[0].pictures[0].picture.digest),)
    both = prepare({"image": [data, requests[0].pictures[0].picture]}, PLACEHOLDER * 2)
    assert [placed.start for placed in both.pictures] == [1, 7]
    assert ENGINE.prepare({"prompt": "text", "multi_modal_data": None}, SamplingParams()).pictures == ()


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"video": b""}, UnsupportedOption, "nothing else, got \\['video'\\]"),
        (b"", UnsupportedOption, "got bytes"),
        ({"image": "cat.png"}, InvalidRequest, r"multi_modal_data.image\[0\] is a str"),
        ({"image": [png(), 7]}, InvalidRequest, r"multi_modal_data.image\[1\] is a int"),
        ({"image": [b"x"]}, InvalidRequest, r"multi_modal_data.image\[0\]: a picture of 1 bytes"),
        ({"image": []}, InvalidRequest, "1 placeholders .* 0 pictures"),
        ({"image": [b""] * 4}, InvalidRequest, "4 pictures, but a request may have 3"),
    ],
)
def test_bad_data_is_refused(data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        prepare(data)


def test_a_prompt_with_pictures_is_not_cut() -> None:
    assert prepare({"image": png()}, truncate_prompt_tokens=9).pictures
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens is 8, but the prompt has 9 tokens and pictures"):
        prepare({"image": png()}, truncate_prompt_tokens=8)


def test_a_chat_has_pictures_where_its_parts_are() -> None:
    image = Image.open(io.BytesIO(png()))
    text = {"type": "text", "text": "and"}
    messages = [
        {"role": "user", "content": [{"type": "image", "image": image}, text, {"type": "image", "image": png(28, 28)}]}
    ]
    job = prepare_chat(ENGINE, ENGINE.chat_template(), messages, SamplingParams())
    assert job.prompt == f"<|chat|>user: {PLACEHOLDER}and{PLACEHOLDER}<|chat|>assistant: "
    assert [placed.picture.num_tokens for placed in job.request.pictures] == [6, 1]
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\] is a picture without 'image'"):
        prepare_chat(
            ENGINE, ENGINE.chat_template(), [{"role": "user", "content": [{"type": "image"}]}], SamplingParams()
        )


def test_prompts_of_the_command_line_are_about_its_pictures() -> None:
    options = BatchOptions(sampling={}, chat=True, pictures=(png(), png(28, 28)))
    prompt = Entry(fields={"prompt": "and?"})
    job = make_job(ENGINE, prompt, options)
    assert [placed.picture.num_tokens for placed in job.request.pictures] == [6, 1]
    assert job.prompt == "and?"
    shown = [{"type": "image", "image": data} for data in options.pictures]
    messages = [{"role": "user", "content": [*shown, {"type": "text", "text": "and?"}]}]
    asked = prepare_chat(ENGINE, ENGINE.chat_template(), messages, SamplingParams())
    assert job.request.prompt_token_ids == asked.request.prompt_token_ids


def entry(url: str) -> bytes:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


def test_a_file_of_prompts_names_files_under_one_directory_and_no_others(tmp_path: Path) -> None:
    pictures, outside = tmp_path / "pictures", tmp_path / "secret.png"
    (pictures / "deep").mkdir(parents=True)
    (pictures / "deep" / "a.png").write_bytes(png())
    outside.write_bytes(png())
    (pictures / "link.png").symlink_to(outside)
    names = ["deep/a.png", "../secret.png", "link.png", str(outside), "deep", "none.png", "a\0b", "deep/../deep/a.png"]
    lines = [entry(f"file:{name}") for name in names] + [entry(url_of(png())), entry("https://a.example/a.png")]
    options = BatchOptions(sampling={}, open_url=open_under(pictures))
    found = [*make_jobs(ENGINE, read_entries(io.BytesIO(b"\n".join(lines))), options, lambda entry: None)]
    taken = [not isinstance(one, Exception) for one in found]
    assert taken == [True, False, False, False, False, False, False, True, True, False], found
    assert all("not under --pictures" in str(found[number]) for number in (1, 2, 3)), found
    [refused] = make_jobs(ENGINE, read_entries(io.BytesIO(lines[0])), BatchOptions(sampling={}), lambda entry: None)
    assert isinstance(refused, InvalidRequest) and "only data: is taken" in str(refused)
    with pytest.raises(ConfigError, match="is no directory"):
        open_under(outside)


def test_pictures_that_wait_are_bounded_by_their_bytes() -> None:
    request = prepare({"image": png(280, 280)})
    num_bytes = len(request.pictures[0].picture.pixels)
    parts = picture_parts(max_picture_bytes=2 * num_bytes)
    requests = [prepare({"image": png(280, 280, colour)}) for colour in range(3)]
    for one in requests[:2]:
        parts.engine.submit(one, lambda update: None)
    with pytest.raises(QueueFull, match=rf"{2 * num_bytes} bytes of pictures are waiting .*vision.max_waiting_bytes"):
        parts.engine.submit(requests[2], lambda update: None)
    parts.engine.submit(prepare(None, "text alone"), lambda update: None)
    while parts.engine.step():
        pass
    parts.engine.submit(requests[2], lambda update: None)
