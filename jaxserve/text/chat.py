"""Chat messages into one prompt text, by the model's own template.

A model without a template is an error: none is made up for it.

Templates come with checkpoints, so they are programs of a stranger: they run in Jinja's immutable sandbox, with the
few helpers that transformers gives them, on plain JSON values only. Messages are brought into the form that the
template reads (`messages`, `template_form`).

Special tokens in user text. A text that spells a special token stays text: it never becomes that token, so nobody can
close their own turn and write a system message (`special_text`; transformers does so with `sanitize_control_tokens`).
`check_special_text` refuses such messages instead (`LLM.chat(refuse_special_text=True)`).
"""

import dataclasses
import datetime
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxserve.errors import InvalidRequest
from jaxserve.text.base import Tokenizer
from jaxserve.text.messages import check_messages, plain, shaped, with_whole_tools
from jaxserve.text.special_text import MARKS, Piece, PromptText, SpecialText
from jaxserve.text.template_form import TemplateForm, read_form

# Errors that a template can raise by itself: its own, and Python's on values it did not expect.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
# Those of a value in another form than the template reads.
_FORM_ERRORS = (TypeError, jinja2.UndefinedError)
_WITH_TOOLS = "tool_use"  # the name of the template for chats with tools, as in transformers
_NON_ASCII = re.compile(r"[^\x00-\x7f]")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; for a prompt it is its own body."""

    tags = {"generation"}  # noqa: RUF012  (the attribute is Jinja's)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Compiled:
    template: jinja2.Template
    form: TemplateForm


class ChatTemplate:
    """A compiled template, or one for chats with tools beside one for others. Immutable after construction, safe to
    call from several threads.

    Args:
      source: Jinja source, None for a model that has none (a chat is then refused).
      tool_source: that of chats with tools; None: it is the same.
      bos_token, eos_token: texts that the template may write.
      special_text: special tokens, which texts of messages, tools and variables do not become; None: there are none.
      now: clock behind `strftime_now`.

    Raises InvalidRequest when a source does not compile.
    """

    def __init__(
        self,
        source: str | None,
        *,
        tool_source: str | None = None,
        bos_token: str = "",
        eos_token: str = "",
        special_text: SpecialText | None = None,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._special_text = SpecialText(()) if special_text is None else special_text
        self._now = now
        self._plain = None if source is None else self._compiled(source)
        self._with_tools = self._plain if tool_source is None else self._compiled(tool_source)

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: str | None = None) -> "ChatTemplate":
        """The templates of a tokenizer, or `source` in their place, which may be the name of one of them."""
        bos, eos = (
            "" if token_id is None else tokenizer.token_text(token_id)
            for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id)
        )
        named = tokenizer.named_chat_templates
        return cls(
            tokenizer.chat_template if source is None else named.get(source, source),
            tool_source=named.get(_WITH_TOOLS) if source is None else None,
            bos_token=bos,
            eos_token=eos,
            special_text=SpecialText.of(tokenizer),
        )

    def reads(self, name: str, *, with_tools: bool = True) -> bool:
        """Whether the template of chats with (or without) tools reads a variable, such as `tools`; one that does not
        would leave it out in silence."""
        return name in self.form(with_tools=with_tools).variables

    def form(self, *, with_tools: bool = False) -> TemplateForm:
        """What the template of chats with (or without) tools reads; of no template, nothing."""
        compiled = self._with_tools if with_tools else self._plain
        return TemplateForm() if compiled is None else compiled.form

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of `prompt`, for display: encoded as it is, a special token in a message would become one."""
        prompt = self.prompt(messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables)
        return prompt.text

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> PromptText:
        """The prompt.

        Args:
          messages: see `check_messages`.
          add_generation_prompt: end with the opening of the assistant's turn.
          tools: JSON schemas of functions, handed to the template as they are.
          variables: further values for the template (`enable_thinking`, `documents`, …).

        Raises InvalidRequest for malformed messages, a missing template, or what the template raises.
        """
        checked = check_messages(messages)
        compiled = self._with_tools if tools else self._plain
        if compiled is None:
            raise InvalidRequest(
                "this model has no chat template; send a plain prompt, or add chat_template.jinja to its directory"
            )
        values = {"documents": None, **plain(variables or {}, "template variables")}
        for name, text in self._tokens.items():
            if values.get(name, text) != text:
                raise InvalidRequest(f"the template variable {name} is the model's own, {text!r}; leave it out")
        values["add_generation_prompt"] = add_generation_prompt
        values["tools"] = None if tools is None else plain(list(tools), "tools")
        refusal: Exception | None = None
        for attempt in _attempts(checked, compiled.form, values):
            try:
                return self._written(compiled.template, attempt)
            except _TEMPLATE_ERRORS as error:
                refusal = refusal or error
                if not isinstance(error, _FORM_ERRORS):
                    break
        raise InvalidRequest(f"the chat template refused the messages: {refusal}") from refusal

    def _written(self, template: jinja2.Template, values: dict[str, Any]) -> PromptText:
        marks = self._special_text.marks_for(values)
        if marks is None:
            return PromptText((Piece(template.render({**self._tokens, **values}), False),))
        marked = {name: self._special_text.marked(value, marks) for name, value in values.items()}
        return self._special_text.read(template.render({**self._tokens, **marked}), marks)

    def _compiled(self, source: str) -> _Compiled:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: self._now().strftime(pattern)
        try:
            return _Compiled(template=environment.from_string(source), form=read_form(environment.parse(source)))
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(f"the chat template does not compile: {error}; fix the template") from error


def _attempts(
    checked: Sequence[Mapping[str, Any]], form: TemplateForm, values: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Values for a template: in the form that its tree tells, and then, for a template that fails on that, with the
    arguments of calls in the other form, and with no field of a tool absent."""
    messages = shaped(checked, form)
    yield {**values, "messages": messages}
    tools = values["tools"] and with_whole_tools(values["tools"])
    others = [messages]
    if any(message.get("tool_calls") for message in checked):
        others.append(shaped(checked, form, argument_text=not form.wants_argument_text))
        yield {**values, "messages": others[-1]}
    if tools != values["tools"]:
        for other in others:
            yield {**values, "messages": other, "tools": tools}


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
) -> list[int]:
    """Ids of the rendered messages. The template writes the special tokens itself, so encoding adds none.

    `max_tokens`: see `PromptText.encode`.
    """
    prompt = template.prompt(messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables)
    return prompt.encode(tokenizer, max_tokens)


def check_special_text(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], beside: Mapping[str, Any] | None = None
) -> None:
    """Raises InvalidRequest when a text in a message spells a special token (see the file's head).

    Every text counts, since templates write names, roles and arguments of calls too. `beside`: further values of
    the template, such as tools, under the names that errors use.
    """
    messages = shaped(check_messages(messages), TemplateForm(names_developer=True))
    named = {f"messages[{index}]": message for index, message in enumerate(messages)}
    SpecialText.of(tokenizer).check({**named, **(beside or {})})


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models never saw. Marks of special text are never escaped."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NON_ASCII.sub(_escaped, text) if ensure_ascii else text


def _escaped(character: re.Match[str]) -> str:
    return character[0] if character[0] in MARKS else json.dumps(character[0])[1:-1]
