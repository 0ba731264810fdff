"""Chat messages into one prompt text, by the model's own template.

A model without a template is an error: none is made up for it.

Templates come with checkpoints, so they are programs of a stranger: they run in Jinja's immutable sandbox, with the
few helpers that transformers gives them, on plain JSON values only.

Special tokens in user text. The template's output is one string, and encoding it turns every text that spells a
special token into that token, also inside a user's message: a user can close their own turn and write a system
message. This is what transformers does by default, so it is the default here; `check_special_text` refuses such
messages (`LLM.chat(refuse_special_text=True)`). Use it wherever users are not trusted with the system prompt.
"""

import datetime
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxserve.errors import InvalidRequest, UnsupportedOption
from jaxserve.text.base import Tokenizer

# Errors that a template can raise by itself: its own, and Python's on values it did not expect.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip


_ROLE = re.compile(r"[\w.-]{1,64}")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; for a prompt it is its own body."""

    tags = {"generation"}  # noqa: RUF012  (the attribute is Jinja's)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A compiled template. Immutable after construction, safe to call from several threads.

    Args:
      source: Jinja source, None for a model that has none (`render` then raises).
      bos_token, eos_token: texts that the template may write.
      now: clock behind `strftime_now`.

    Raises InvalidRequest when the source does not compile.
    """

    def __init__(
        self,
        source: str | None,
        *,
        bos_token: str = "",
        eos_token: str = "",
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._now = now
        self._reads: frozenset[str] = frozenset()
        try:
            environment = self._environment()
            self._template = None if source is None else environment.from_string(source)
            if source is not None:
                self._reads = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(f"the chat template does not compile: {error}; fix the template") from error

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: str | None = None) -> "ChatTemplate":
        """The template of a tokenizer, or `source` in its place, with its beginning and end tokens."""
        bos, eos = (
            "" if token_id is None else tokenizer.token_text(token_id)
            for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id)
        )
        return cls(tokenizer.chat_template if source is None else source, bos_token=bos, eos_token=eos)

    def reads(self, name: str) -> bool:
        """Whether the template reads a variable, such as `tools`; one that does not would leave it out in silence."""
        return name in self._reads

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text.

        Args:
          messages: see `check_messages`.
          add_generation_prompt: end with the opening of the assistant's turn.
          tools: JSON schemas of functions, handed to the template as they are.
          variables: further values for the template (`enable_thinking`, `documents`, …).

        Raises InvalidRequest for malformed messages, a missing template, or what the template raises.
        """
        checked = check_messages(messages)
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template; send a plain prompt, or add chat_template.jinja to its directory"
            )
        values = {**self._tokens, **_plain(variables or {}, "template variables")}
        values |= {"messages": checked, "tools": None if tools is None else _plain(list(tools), "tools")}
        try:
            return self._template.render(values, add_generation_prompt=add_generation_prompt)
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(f"the chat template refused the messages: {error}") from error

    def _environment(self) -> jinja2.Environment:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: self._now().strftime(pattern)
        return environment


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids of the rendered messages. The template writes the special tokens itself, so encoding adds none."""
    text = template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables)
    return tokenizer.encode(text, add_special_tokens=False)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A plain copy of `messages`, each content one string, or parts where it has pictures.

    A message is {"role": str, "content": str or a list of {"type": "text", "text": str}} and whatever else the
    template reads (name, tool_calls, tool_call_id, …). Text parts are joined by newlines, as vLLM does. Content with
    {"type": "image"} among its parts, which stands for a picture, stays a list of parts of these two kinds. Content may
    be null beside tool_calls, whose `arguments` may be JSON text (OpenAI) and reach the template as the object. Text
    that is no JSON, such as that of a call which was cut by its length, reaches it as it is.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest(f"messages must be a non-empty list of {{role, content}}, got {messages!r}")
    checked = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"{where} must be an object with role and content, got {message!r}")
        plain = _plain(message, where)
        if not isinstance(plain.get("role"), str) or not plain["role"]:
            raise InvalidRequest(f"{where} needs a role, a string such as 'user', got {plain.get('role')!r}")
        if not _ROLE.fullmatch(plain["role"]):
            raise InvalidRequest(
                f"{where} needs a role that is a name of at most 64 letters, digits, '_', '-' or '.', got "
                f"{plain['role']!r:.80}"
            )
        if plain.get("tool_calls"):
            _parse_arguments(plain["tool_calls"], where)
        plain["content"] = _checked_content(plain, where)
        checked.append(plain)
    return checked


def _checked_content(message: Mapping[str, Any], where: str) -> str | list[dict[str, str]]:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("tool_calls"):
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
    if any(part["type"] == "image" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _parse_arguments(tool_calls: Any, where: str) -> None:
    try:
        for call in tool_calls:
            function = call.get("function", call)
            if isinstance(function.get("arguments"), str):
                function["arguments"] = _parsed(function["arguments"])
    except (AttributeError, TypeError) as error:
        raise InvalidRequest(f"{where}.tool_calls must be a list of objects: {error}") from error


def _parsed(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text


def _plain(value: Any, where: str) -> Any:
    """A deep copy through JSON: a template must never hold an object with methods of this package."""
    try:
        return json.loads(json.dumps(dict(value) if isinstance(value, Mapping) else value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where} must be plain JSON: {error}") from error


def check_special_text(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], beside: Mapping[str, Any] | None = None
) -> None:
    """Raises InvalidRequest when a text in a message spells a special token (see the file's head).

    Every text counts, since templates write names, roles and arguments of calls too. `beside`: further values of
    the template, such as tools, under the names that errors use.
    """
    named = {f"messages[{index}]": message for index, message in enumerate(check_messages(messages))}
    check_no_special(tokenizer, {**named, **(beside or {})})


def check_no_special(tokenizer: Tokenizer, named: Mapping[str, Any]) -> None:
    """Raises InvalidRequest when a text in one of the JSON values spells a special token. Errors use their names."""
    specials = [text for token_id in sorted(tokenizer.special_ids) if (text := tokenizer.token_text(token_id))]
    for where, value in named.items():
        for found in _texts(value):
            for text in specials:
                if text in found:
                    raise InvalidRequest(f"{where} contains the special token {text!r}; take it out")


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys of objects included. Without recursion: arguments of calls may be deep."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict):
            yield from part
            left += part.values()
        elif isinstance(part, list):
            left += part


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models never saw."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
