"""Makes tests/fixtures/tokenizers/templates.json: what transformers writes for chats, by published templates.

    python scripts/make_template_fixtures.py --published FOLDER

needs an environment with transformers (no PyTorch), and a FOLDER of published templates, NAME.jinja, that the user has.
Of those the file has names and digests only: of the template, and of the text of each conversation of
conversations.json. The small templates of tests/text/small_templates.json, each of which reads messages in one way, are
rendered in full. `python -m pytest tests/text/test_template_form.py --templates FOLDER` compares.

transformers hands messages to a template as they are, so the answer for a conversation is that of the first form in
which the template shows every word of it: as clients send it, with arguments as objects, as text, texts as lists of
parts, parts as one text, a developer as the system. Where no form does, there is no answer, and the entry is null.

Ids of texts that spell special tokens are those of `sanitize_control_tokens`.
"""

import argparse
import copy
import datetime
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import chat_template_utils

ROOT = Path(__file__).parent.parent / "tests"
FIXTURES = ROOT / "fixtures" / "tokenizers"


class _Clock(datetime.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> "datetime.datetime":
        return datetime.datetime(2026, 3, 1)


def _as_objects(messages: list[dict[str, Any]]) -> None:
    for call in (call for message in messages for call in message.get("tool_calls") or ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])


def _as_parts(messages: list[dict[str, Any]]) -> None:
    for message in messages:
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}] if message["content"] else []


def _users_as_parts(messages: list[dict[str, Any]]) -> None:
    _as_parts([message for message in messages if message["role"] == "user"])


def _as_text(messages: list[dict[str, Any]]) -> None:
    for message in messages:
        if isinstance(message["content"], list):
            message["content"] = "\n".join(part["text"] for part in message["content"])


def _instructions_as_text(messages: list[dict[str, Any]]) -> None:
    _as_text([message for message in messages if message["role"] in ("system", "developer")])


def _as_system(messages: list[dict[str, Any]]) -> None:
    merged: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "developer":
            message["role"] = "system"
            if merged and merged[-1]["role"] == "system":
                merged[-1]["content"] += "\n\n" + message["content"]
                continue
        merged.append(message)
    messages[:] = merged


def _with_empty_content(messages: list[dict[str, Any]]) -> None:
    for message in messages:
        message["content"] = message["content"] or ""


def _with_thought_twice(messages: list[dict[str, Any]]) -> None:
    """Clients of vLLM and OpenRouter have it under the first name, which transformers reads and does not fill."""
    for message in messages:
        if "reasoning_content" in message:
            message["reasoning"] = message["reasoning_content"]


def _whole(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    functions = [{**tool["function"], "description": "", "parameters": {}, **tool["function"]} for tool in tools]
    return [{**tool, "function": function} for tool, function in zip(tools, functions, strict=True)]


def _words(messages: list[dict[str, Any]], source: str) -> list[str]:
    """The texts that a template has to show. Thoughts of older turns are left out by most, and are not among them."""
    found = []
    for message in messages:
        content = message["content"]
        found += [content] if isinstance(content, str) else [part["text"] for part in content or ()]
        found += ["Oslo" for _ in message.get("tool_calls") or () if "tool_calls" in source]
    return found


def render(source: str, conversation: dict[str, Any]) -> str | None:
    """What transformers writes; None: it has no answer."""
    names_developer = '"developer"' in source or "'developer'" in source
    contents = (
        (),
        (_users_as_parts,),
        (_as_parts,),
        (_instructions_as_text,),
        (_as_text,),
        (_as_parts, _instructions_as_text),
    )
    for arguments, shape, tools_of in itertools.product(((_as_objects,), ()), contents, (lambda tools: tools, _whole)):
        messages = copy.deepcopy(conversation["messages"])
        for change in (
            _with_empty_content,
            _with_thought_twice,
            *arguments,
            *(() if names_developer else (_as_system,)),
            *shape,
        ):
            change(messages)
        tools = tools_of(conversation["tools"]) if "tools" in conversation else None
        messages = chat_template_utils._normalize_chat_messages(messages)
        variables = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
        try:
            [text], _ = chat_template_utils.render_jinja_template([messages], tools, chat_template=source, **variables)
        except Exception:  # a template's own refusal, and every error of Python on another form
            continue
        if "'type': 'text'" in text or '"type": "text"' in text or "{'city'" in text or '"{\\"city' in text:
            continue  # a list or an object where the template takes text, or the other way round
        if all(word in text for word in _words(conversation["messages"], source)):
            return text
    return None


def special_texts(kind: str) -> list[dict[str, Any]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(FIXTURES / kind)
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special][:3]
    source = "{% for m in messages %}" + special[0] + "{{ m.role }}\n{{ m.content }}" + special[-1] + "{% endfor %}"
    cases = []
    for form in ("Is {0} struck out?", "{0}", "{0}{1} x {0}", "1{2}2", "a < b > c, no token", " {1}\n", "<{0}>"):
        messages = [{"role": "user", "content": form.format(*special, *special)}]
        options = {"chat_template": source, "sanitize_control_tokens": True, "return_dict": False}
        ids = tokenizer.apply_chat_template(messages, tokenize=True, **options)
        cases.append({"tokenizer": kind, "template": source, "messages": messages, "ids": ids})
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--published", type=Path, required=True)
    folder = parser.parse_args().published
    chat_template_utils.datetime = _Clock
    conversations = json.loads((FIXTURES / "conversations.json").read_text())["conversations"]
    published = {}
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        texts = [render(source, conversation) for conversation in conversations]
        published[path.stem] = {
            "sha256": hashlib.sha256(source.encode()).hexdigest()[:16],
            "texts": [None if text is None else hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts],
        }
    small = json.loads((ROOT / "text" / "small_templates.json").read_text())
    written = {name: [render(source, one) for one in conversations] for name, source in small.items()}
    special = [case for kind in ("qwen", "llama3", "metaspace") for case in special_texts(kind)]
    content = {
        "made_by": "scripts/make_template_fixtures.py",
        "published": published,
        "small": written,
        "special": special,
    }
    (FIXTURES / "templates.json").write_text(json.dumps(content, ensure_ascii=False, indent=0) + "\n")


if __name__ == "__main__":
    main()
