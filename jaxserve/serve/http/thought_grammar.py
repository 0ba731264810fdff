"""A constraint that begins behind a thought: the grammar of a thought, and then of what the request demands.

A grammar holds from the first token on, and a model that thinks answers worse without its thought. So the thought
becomes a part of the grammar: any text up to the closing tag.
"""

import json
from collections.abc import Mapping
from typing import Any

from jaxserve.serve.http.formats import ThinkingFormat
from jaxserve.text.json_schema import compact, enforceable, name_of, named
from jaxserve.values.structured_output import StructuredOutput

_MOST_CHOICES = 64  # as alternatives of a grammar, thousands would be too many


def behind_thought(
    wanted: StructuredOutput, thinking: ThinkingFormat, *, has_begun: bool, is_ours: bool
) -> StructuredOutput | None:
    """The same form behind a thought, which may be left out if the prompt has not begun it.

    `is_ours`: a grammar was made by this package, in Lark's syntax with `start` as its first rule. None: the form
    cannot be put there; such are the regular expressions, the grammars and the long choices of clients.
    """
    body = _rules(wanted, is_ours)
    if body is None:
        return None
    thought = "thought" if has_begun else f"({json.dumps(thinking.open)} thought)?"
    rules = [
        f"start: SPACE_AROUND? {thought} SPACE_AROUND? demanded",
        f"thought[lazy]: /(.|\\n)*/ {json.dumps(thinking.close)}",
        "SPACE_AROUND: /[ \\n]{1,8}/",
        body,
    ]
    return StructuredOutput(grammar="\n".join(rules))


def _rules(wanted: StructuredOutput, is_ours: bool) -> str | None:
    """The rule `demanded`, and those that it needs."""
    if wanted.json_object:
        return f"demanded: %json {json_rule({'type': 'object'})}"
    if wanted.json_schema is not None:
        return f"demanded: %json {json_rule(json.loads(wanted.json_schema))}"
    if wanted.grammar is not None and is_ours:
        return wanted.grammar.replace("start:", "demanded:", 1)
    if 0 < len(wanted.choice) <= _MOST_CHOICES:
        return "demanded: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in wanted.choice)
    return None


def json_rule(schema: Any) -> str:
    """A JSON schema as grammars have it."""
    if isinstance(schema, Mapping):
        schema = compact(schema if name_of(schema) else named(schema, "json_schema"))
    return enforceable(json.dumps(schema))
