"""From what a user writes to a job: a checked request, and what to show of it.

Owns the shapes of prompts that only offline use takes. Refuses to run anything.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.api import Request, SamplingParams
from jaxserve.engine import AnyEngine, Prompt, check_echo
from jaxserve.errors import InvalidRequest
from jaxserve.text import ChatTemplate, check_special_text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A prepared request, the text it was made of, and whether the output begins with the prompt."""

    request: Request
    prompt: str | None = None
    echo: bool = False


def prepare_job(
    engine: AnyEngine,
    prompt: Prompt,
    sampling: SamplingParams,
    *,
    request_id: str | None = None,
    priority: int = 0,
    echo: bool = False,
    pooling: bool = False,
) -> Job:
    """Encodes and checks one prompt; a dictionary may also hold a "cache_salt". `pooling` asks for its embedding.

    Raises what `Engine.prepare` raises, and UnsupportedOption for an `echo` of what is no text.
    """
    cache_salt = ""
    if isinstance(prompt, Mapping) and "cache_salt" in prompt:
        cache_salt = prompt["cache_salt"]
        if not isinstance(cache_salt, str):
            raise InvalidRequest(f"cache_salt must be text, got {cache_salt!r}")
        prompt = {key: value for key, value in prompt.items() if key != "cache_salt"}
    request = engine.prepare(
        prompt, sampling, request_id=request_id, priority=priority, cache_salt=cache_salt, pooling=pooling
    )
    if echo:
        check_echo(request, engine.tokenizer)
    text = prompt
    if isinstance(prompt, Mapping):
        text = prompt.get("prompt") if prompt.get("prompt_token_ids") is None else None
    return Job(request=request, prompt=text if isinstance(text, str) else None, echo=echo)


def prepare_chat(
    engine: AnyEngine,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    sampling: SamplingParams,
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    refuse_special_text: bool = False,
    request_id: str | None = None,
    priority: int = 0,
    echo: bool = False,
) -> Job:
    """Renders, encodes and checks one conversation. Raises InvalidRequest and its kin.

    `refuse_special_text` refuses messages that spell a special token, see `jaxserve.text.chat`.
    """
    if refuse_special_text and engine.tokenizer is not None:
        check_special_text(engine.tokenizer, messages)
    text = template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables)
    # The template has written the special tokens; encoding must not add them again.
    request = engine.prepare(text, sampling, request_id=request_id, priority=priority, add_special_tokens=False)
    if echo:
        check_echo(request, engine.tokenizer)
    return Job(request=request, prompt=text, echo=echo)
