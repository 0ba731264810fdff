"""Messages in the form that a template reads, against transformers (see scripts/make_template_fixtures.py)."""

import datetime
import hashlib
import json
from pathlib import Path

import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.text import ChatTemplate

FIXTURES = Path(__file__).parent.parent / "fixtures" / "tokenizers"
CONVERSATIONS = json.loads((FIXTURES / "conversations.json").read_text())["conversations"]
ANSWERS = json.loads((FIXTURES / "templates.json").read_text())
SMALL = json.loads((Path(__file__).parent / "small_templates.json").read_text())


def written(source: str, conversation: dict) -> str:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", now=lambda: datetime.datetime(2026, 3, 1))
    return template.render(conversation["messages"], tools=conversation.get("tools"))


@pytest.mark.parametrize("number", range(len(CONVERSATIONS)), ids=[one["name"] for one in CONVERSATIONS])
@pytest.mark.parametrize("name", list(SMALL))
def test_a_way_of_reading_gets_what_transformers_gives_it(name, number):
    answer = ANSWERS["small"][name][number]
    if answer is None:
        pytest.skip("transformers shows the words in no form")
    assert written(SMALL[name], CONVERSATIONS[number]) == answer


def test_published_templates_get_what_transformers_gives_them(request):
    """Writes a line for each conversation that differs; the templates are those of a folder that the user has."""
    folder = request.config.getoption("--templates")
    if folder is None:
        pytest.skip("needs --templates FOLDER, with published templates")
    equal, without, differ, unknown = 0, 0, [], []
    for path in sorted(Path(folder).glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        known = ANSWERS["published"].get(path.stem)
        if known is None or hashlib.sha256(source.encode()).hexdigest()[:16] != known["sha256"]:
            unknown.append(path.stem)
            continue
        for conversation, answer in zip(CONVERSATIONS, known["texts"], strict=True):
            if answer is None:
                without += 1
                continue
            try:
                text = written(source, conversation)
            except InvalidRequest as error:
                text = str(error)
            if hashlib.sha256(text.encode()).hexdigest()[:16] == answer:
                equal += 1
            else:
                differ.append(f"{path.stem}: {conversation['name']}")
    print(f"{equal} equal, {len(differ)} differ, {without} without an answer; not in the file: {unknown}")
    assert not differ, "\n".join(differ)
