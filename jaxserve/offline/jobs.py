"""From a prompt, in the forms that only offline use takes, to a job: a checked request and the text to show with it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.api import NO_OPTIONS, Request, RequestOptions, SamplingParams
from jaxserve.engine import (
    AnyEngine,
    EmbeddingForm,
    OpenUrl,
    Prompt,
    chat_prompt,
    check_takes_pictures,
    refuse_url,
    split_chat,
)
from jaxserve.text import ChatTemplate, check_special_text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A prepared request, and the text it was made of. `form`: of the embedding, for a request that pools."""

    request: Request
    prompt: str | None = None
    form: EmbeddingForm = dataclasses.field(default_factory=EmbeddingForm)


def prompt_text(prompt: Prompt) -> str | None:
    """The text that `Engine.prepare` encodes; None for ids."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt") if prompt.get("prompt_token_ids") is None else None  # type: ignore[assignment]
    return prompt if isinstance(prompt, str) else None


def prepare_chat(
    engine: AnyEngine,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    sampling: SamplingParams,
    options: RequestOptions = NO_OPTIONS,
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    refuse_special_text: bool = False,
    open_url: OpenUrl = refuse_url,
) -> Job:
    """Renders, encodes and checks one conversation. Raises InvalidRequest and its kin.

    `refuse_special_text` refuses messages that spell a special token, which is text else, see `jaxserve.text.chat`.
    `open_url`: reads pictures whose URL is no `data:`.
    """
    messages, sources = split_chat(messages, open_url)
    check_takes_pictures(engine.model.pictures, sources)
    if refuse_special_text and engine.tokenizer is not None:
        check_special_text(engine.tokenizer, messages)
    rendered = template.prompt(messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables)
    # The template has written the special tokens; encoding must not add them again.
    prompt = chat_prompt(rendered.for_engine(engine.tokenizer), sources)
    request = engine.prepare(prompt, sampling, dataclasses.replace(options, add_special_tokens=False))
    return Job(request=request, prompt=rendered.text)
