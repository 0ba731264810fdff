"""The one rule for fields that this server does not have: a table by API and place, and the note of a field's use.

An option changes what is sampled or how the answer looks: one that is not here is refused by name, at every place (the
models of bodies see to that). A mark changes neither. At the top of a request the marks are those of the table, and any
other name is refused, since it could be an option. Within a message, a part, a call, a tool or an item nothing is an
option but what the models declare, so every other name there is a mark. Tools, items and blocks that belong to a
provider are left out of the prompt under the same rule, with their type as their name.

A mark is ignored; each use is counted under a closed list of names, and each of these is named once in the log.
"""

import enum
import logging
from collections.abc import Collection, Mapping
from typing import NamedTuple

from jaxserve.serve.counts import OTHER, DoorCounts

logger = logging.getLogger(__name__)


class Place(enum.StrEnum):
    """Where a field stands. `OPTION` is an object of options, such as `response_format`."""

    REQUEST = "request"
    OPTION = "option"
    MESSAGE = "message"
    PART = "part"
    CALL = "call"
    TOOL = "tool"
    ITEM = "item"

    @property
    def takes_any(self) -> bool:
        """Whether an unknown name is a mark here."""
        return self not in (Place.REQUEST, Place.OPTION)


class Mark(NamedTuple):
    """A field that was ignored. `name` is a client's word."""

    place: Place
    name: str


# Every API: labels, keys of caches, tiers of prices. Ways to cache and to run, none of which changes an answer.
_EVERY = frozenset(
    {
        "cache_control",
        "client_metadata",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
    }
)
# Engines' own fields for slots and caches, and labels of proxies.
_OPENAI = _EVERY | {"cache_prompt", "id_slot", "keep_alive", "session_id", "spaces_between_special_tokens", "store"}

REQUEST_MARKS: Mapping[str, frozenset[str]] = {
    "completions": _OPENAI,
    "chat": _OPENAI | {"prediction", "verbosity"},
    "embeddings": _OPENAI,
    "documents": _OPENAI,
    "tokenize": _OPENAI,
    # Without a store of files, tools of a provider or work in the background these have nothing to act on; a prompt
    # that is too long is refused whole, whatever `truncation` and `context_management` would leave out of it.
    "responses": (_EVERY - {"metadata"})
    | {"background_options", "access_programs", "context_management", "image", "max_tool_calls", "truncation"},
    "messages": (_EVERY - {"metadata"})
    | {
        "anthropic_beta",
        "anthropic_version",
        "betas",
        "billing_policy",
        "compaction",
        "context_management",
        "diagnostics",
        "fallback_credit_token",
        "fallbacks",
        "mcp_servers",
        "speed",
        "user_profile_id",
        "workspace_id",
    },
}

# Names at the other places that clients are known to send: labels of the metric, no more. Any other is `other` there.
_KNOWN: Mapping[Place, frozenset[str]] = {
    Place.REQUEST: frozenset().union(*REQUEST_MARKS.values()) | {"reasoning_effort"},
    Place.OPTION: frozenset({"include_obfuscation", "task_budget", "verbosity"}),
    Place.MESSAGE: frozenset(
        {
            "annotations",
            "cache_control",
            "extra_content",
            "id",
            "parsed",
            "provider_specific_fields",
            "reasoning_details",
            "redacted_thinking",
            "thinking_blocks",
            "type",
        }
    ),
    Place.PART: frozenset(
        {"annotations", "cache_control", "caller", "citations", "detail", "logprobs", "prompt_cache_breakpoint"}
        | {"signature", "redacted_thinking", "server_tool_use", "web_search_tool_result"}
        | {"budget_tokens", "display", "is_error", "summary"}
    ),
    Place.CALL: frozenset({"caller", "extra_content", "index", "parsed_arguments", "provider_specific_fields"}),
    Place.TOOL: frozenset(
        {"cache_control", "custom", "defer_loading", "eager_input_streaming", "image_generation", "local_shell", "mcp"}
        | {"web_search", "web_search_20250305"}
    ),
    Place.ITEM: frozenset(
        {"caller", "custom_tool_call", "custom_tool_call_output", "encrypted_content", "id", "item_reference", "phase"}
        | {"reasoning", "status", "web_search_call"}
    ),
}


def note(counts: DoorCounts, route: str, marks: Collection[Mark]) -> None:
    """Counts the marks of one request, and names those in the log that this process has not seen before.

    A name that is on no list is a client's own word, which no line of a log repeats: it is told as another field.
    """
    for place, name in sorted(marks):
        label = name if name in _KNOWN[place] else OTHER
        if counts.note_ignored(route, place, label):
            shown = "a field that this server does not know" if label is OTHER else repr(name)
            logger.info("%s: %s of a %s is ignored: no answer depends on it here (said once)", route, shown, place)
