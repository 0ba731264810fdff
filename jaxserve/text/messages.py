"""Messages of a chat on their way to a template: checked, then brought into the form that the template reads.

Every door takes this step, so that no word of a caller is lost because a template looks for it elsewhere. What a
template reads is in its `TemplateForm`. What it takes as it came stays as it came: there the prompt is that of
transformers.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import InvalidRequest, UnsupportedOption
from jaxserve.text.json_size import has_more_parts
from jaxserve.text.template_form import THOUGHT_NAMES, TemplateForm

_ROLE = re.compile(r"[\w.-]{1,64}")
_MOST_ARGUMENT_PARTS = 2**17  # objects, lists and fields of all calls: far more than models write
_BETWEEN_INSTRUCTIONS = "\n\n"


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A plain copy of `messages`, each content one string or a list of parts.

    A message is {"role": str, "content": str or a list of parts} and whatever else the template reads (name,
    tool_calls, tool_call_id, …). A part is {"type": "text", "text": str} or {"type": "image"}, which stands for a
    picture. Content of an assistant may be null or absent, and is "" then. `arguments` of tool_calls may be an object,
    or JSON text (OpenAI). Raises InvalidRequest, and UnsupportedOption for parts of another type.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest(f"messages must be a non-empty list of {{role, content}}, got {messages!r}")
    checked = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"{where} must be an object with role and content, got {message!r}")
        copy = plain(message, where)
        if not isinstance(copy.get("role"), str) or not copy["role"]:
            raise InvalidRequest(f"{where} needs a role, a string such as 'user', got {copy.get('role')!r}")
        if not _ROLE.fullmatch(copy["role"]):
            raise InvalidRequest(
                f"{where} needs a role that is a name of at most 64 letters, digits, '_', '-' or '.', got "
                f"{copy['role']!r:.80}"
            )
        if copy.get("tool_calls"):
            _check_calls(copy["tool_calls"], where)
        copy["content"] = _checked_content(copy, where)
        checked.append(copy)
    return checked


def _checked_content(message: Mapping[str, Any], where: str) -> str | list[dict[str, str]]:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and (message["role"] == "assistant" or message.get("tool_calls")):
        return ""
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} needs content, a string or a list of text parts, got {content!r}")
    parts: list[dict[str, str]] = []
    for part in content:
        if part == {"type": "image"}:
            parts.append({"type": "image"})
            continue
        if isinstance(part, dict) and part.get("type") not in ("text", None):
            raise UnsupportedOption(
                f"{where} has a part of type {part['type']!r:.80}; a chat is made of 'text', and of pictures "
                "('image_url') where the model takes them"
            )
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{where}: each part must be {{'type': 'text', 'text': ...}}, got {part!r:.80}")
        parts.append({"type": "text", "text": part["text"]})
    return parts


def _check_calls(tool_calls: Any, where: str) -> None:
    if not isinstance(tool_calls, list) or not all(isinstance(call, dict) for call in tool_calls):
        raise InvalidRequest(f"{where}.tool_calls must be a list of objects, got {tool_calls!r:.80}")
    for call in tool_calls:
        if not isinstance(call.get("function", call), dict):
            raise InvalidRequest(f"{where}.tool_calls must be a list of objects, each with an object as its function")


def plain(value: Any, where: str) -> Any:
    """A deep copy as JSON would make it: a template must never hold an object with methods of this package."""
    try:
        return _copied(value)
    except (TypeError, RecursionError):
        pass
    try:
        return json.loads(json.dumps(dict(value) if isinstance(value, Mapping) else value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where} must be plain JSON: {error}") from error


def _copied(value: Any) -> Any:
    """A copy of what is plain as it stands, in half of the time that JSON takes. Raises TypeError for other values."""
    kind = type(value)
    if kind is str or kind is int or kind is bool or kind is float or value is None:
        return value
    if kind is dict:
        if any(type(name) is not str for name in value):
            raise TypeError
        return {name: _copied(inner) for name, inner in value.items()}
    if kind is list:
        return [_copied(inner) for inner in value]
    raise TypeError


def shaped(
    checked: Sequence[Mapping[str, Any]], form: TemplateForm, *, argument_text: bool | None = None
) -> list[dict[str, Any]]:
    """Checked messages in the form that a template reads. They are left as they are, and share their parts.

    A `developer` that the template does not name is a system message, one with those that it follows or that follow it.
    Content is a list of parts, or text, as the template reads it for the role; text parts are joined by newlines where
    it reads text. A thought stands under every name that it reads. `argument_text`: arguments of calls are JSON text,
    else objects; None: as the form says. Text that is no JSON, such as that of a call which was cut by its length,
    stays as it is. Raises InvalidRequest for arguments of too many parts.
    """
    as_text = form.wants_argument_text if argument_text is None else argument_text
    if not as_text:
        _check_argument_parts(checked)
    found: list[dict[str, Any]] = []
    can_join = False  # the last message is a system message, and `joins` is about a developer's
    for message in checked:
        shape = dict(message)
        is_developer = shape["role"] == "developer" and not form.names_developer
        if is_developer:
            shape["role"] = "system"
        if form.thoughts:
            _copy_thought(shape, form.thoughts)
        if shape.get("tool_calls"):
            shape["tool_calls"] = [_shaped_call(call, as_text) for call in shape["tool_calls"]]
        if found and shape["role"] == found[-1]["role"] == "system" and (is_developer or can_join):
            found[-1]["content"] = _joined(found[-1]["content"], shape["content"], form)
            can_join = True
            continue
        found.append(shape)
        can_join = is_developer
    for shape in found:
        if form.asks_for_null and shape.get("tool_calls") and not shape["content"]:
            shape["content"] = None
        else:
            shape["content"] = _shaped_content(shape["content"], shape["role"], form)
    return found


def _check_argument_parts(messages: Sequence[Mapping[str, Any]]) -> None:
    """Before arguments are read, of all calls together."""
    calls = [call.get("function", call) for message in messages for call in message.get("tool_calls") or ()]
    texts = [text for call in calls if isinstance(text := call.get("arguments"), str)]
    if has_more_parts(_MOST_ARGUMENT_PARTS, *texts):
        raise InvalidRequest(
            f"the arguments of all calls have more than {_MOST_ARGUMENT_PARTS} objects, lists and fields together; "
            "leave older calls out"
        )


def _copy_thought(message: dict[str, Any], names: Sequence[str]) -> None:
    thought = next((message[name] for name in THOUGHT_NAMES if message.get(name) is not None), None)
    if thought is not None:
        for name in names:
            if message.get(name) is None or name == THOUGHT_NAMES[0]:
                message[name] = thought


def _shaped_content(content: str | list[dict[str, str]], role: str, form: TemplateForm) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        if form.takes_parts(role) and not form.takes_text(role):
            return [{"type": "text", "text": content}] if content else []
        return content
    takes_parts = form.takes_parts(role)
    if any(part["type"] == "image" for part in content) or (takes_parts and not form.takes_one_part(role)):
        return content
    text = "\n".join(part["text"] for part in content)
    return text if form.takes_text(role) or not takes_parts else [{"type": "text", "text": text}]


def _joined(
    first: str | list[dict[str, str]], second: str | list[dict[str, str]], form: TemplateForm
) -> str | list[dict[str, str]]:
    if not isinstance(first, str) or not isinstance(second, str):
        first, second = (_shaped_content(content, "system", form) for content in (first, second))
    if isinstance(first, str) and isinstance(second, str):
        return first + _BETWEEN_INSTRUCTIONS + second
    lists = [[{"type": "text", "text": one}] if isinstance(one, str) else one for one in (first, second)]
    return [*lists[0], {"type": "text", "text": _BETWEEN_INSTRUCTIONS}, *lists[1]]


def _shaped_call(call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    function = call.get("function", call)
    if "arguments" not in function:
        return call
    function = function | {"arguments": _shaped_arguments(function["arguments"], as_text)}
    return call | {"function": function} if "function" in call else function


def _shaped_arguments(arguments: Any, as_text: bool) -> Any:
    if not isinstance(arguments, str):
        arguments = {} if arguments is None else arguments
        return json.dumps(arguments, ensure_ascii=False) if as_text else arguments
    if as_text:
        return arguments or "{}"
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return {} if value is None else value


def with_whole_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools with every field that templates read: no description is "", no parameters are {}."""
    whole = []
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping):
            function = {**function, "description": function.get("description") or ""}
            function["parameters"] = function.get("parameters") or {}
        whole.append({**tool, "function": function} if "function" in tool else function)
    return whole
