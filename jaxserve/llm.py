"""`LLM`: a model in a notebook or a script, with the names that vLLM users know.

Owns prompts in many shapes, one call at a time. Refuses a loop of its own (`offline`) and a server (`serve`). Names are
kept where the meaning is the same; an argument that would not do what vLLM's does is not accepted at all.
"""

import operator
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, Self

from jaxserve.api import SamplingParams
from jaxserve.assemble import SchedulerChoice
from jaxserve.config import ResolvedConfig, for_batches
from jaxserve.console import BatchBar
from jaxserve.engine import Prompt, pooling_params
from jaxserve.errors import InvalidRequest, JaxserveError
from jaxserve.front_door import FrontDoor
from jaxserve.offline import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Job,
    Logprob,
    RequestMetrics,
    RequestOutput,
    Result,
    prepare_chat,
    prepare_job,
    run_jobs,
)

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
]

Message = Mapping[str, Any]


class LLM(FrontDoor):
    """A loaded model that answers prompts, many at once. To be used by one thread at a time; asyncio has `AsyncLLM`.

    `LLM(model)` takes the names that vLLM has for its arguments, `LLM.from_config(file)` the settings of a config.
    """

    def _start(self, resolved: ResolvedConfig, scheduler: SchedulerChoice | None) -> None:
        super()._start(for_batches(resolved), scheduler)

    def close(self) -> None:
        """Ends the step log, and what is still built in the background; nothing can be asked any more.

        `with LLM(...) as llm:` does it at the end of the block. Without it both end with the process.
        """
        self._engine.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts; returns one output per prompt, in their order.

        Args:
          prompts: one or a list of: text; token ids (a list or an array); {"prompt": text} or
            {"prompt_token_ids": ids}, each with an optional "cache_salt".
          sampling_params: for all, or one per prompt; None: `get_default_sampling_params`.
          use_tqdm: show a progress bar on stderr.
          priority: one per prompt, smaller first; needs the policy 'priority', others refuse all but 0.

        Raises InvalidRequest and its kin for the first bad prompt, before anything has run; RequestRejected when the
        pool could never hold one. Nothing is left running after an error or an interrupt.
        """
        batch: Sequence[Prompt] = [prompts] if _is_one_prompt(prompts) else list(prompts)  # type: ignore[arg-type]
        options = self._sampling_for(len(batch), sampling_params)
        priorities = [0] * len(batch) if priority is None else list(priority)
        if len(priorities) != len(batch):
            raise InvalidRequest(f"{len(batch)} prompts, but {len(priorities)} priorities; give one for each")
        jobs = []
        for index, prompt in enumerate(batch):
            try:
                jobs.append(prepare_job(self._engine, prompt, options[index], priority=priorities[index]))
            except JaxserveError as error:
                raise _numbered(error, "prompts", index, len(batch)) from error
        return self._run(jobs, "prompts", use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        refuse_special_text: bool = False,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them; a message is {"role": …, "content": …}.

        Args:
          chat_template: Jinja source in place of the model's own.
          add_generation_prompt: end the prompt with the opening of the assistant's turn.
          tools: JSON schemas, handed to the template.
          chat_template_kwargs: further values for the template.
          refuse_special_text: refuse messages that spell a special token, with which a user could close their own turn
            and write a system message.

        `RequestOutput.prompt` is the rendered text. Errors as in `generate`.
        """
        conversations = [messages] if _is_one_conversation(messages) else list(messages)
        options = self._sampling_for(len(conversations), sampling_params)
        template = self._engine.chat_template(chat_template)
        jobs = []
        for index, conversation in enumerate(conversations):
            try:
                job = prepare_chat(
                    self._engine,
                    template,
                    conversation,  # type: ignore[arg-type]
                    options[index],
                    add_generation_prompt=add_generation_prompt,
                    tools=tools,
                    variables=chat_template_kwargs,
                    refuse_special_text=refuse_special_text,
                )
            except JaxserveError as error:
                raise _numbered(error, "conversations", index, len(conversations)) from error
            jobs.append(job)
        return self._run(jobs, "conversations", use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Embeds prompts; returns one output per prompt, in their order: `output.outputs.embedding`.

        An embedding is the mean of the final hidden states of the prompt's tokens, of Euclidean length 1. `prompts` as
        in `generate`; `truncate_prompt_tokens` keeps the last that many tokens of each. Errors as in `generate`.
        """
        batch: Sequence[Prompt] = [prompts] if _is_one_prompt(prompts) else list(prompts)  # type: ignore[arg-type]
        sampling = pooling_params(truncate_prompt_tokens)
        jobs = []
        for index, prompt in enumerate(batch):
            try:
                jobs.append(prepare_job(self._engine, prompt, sampling, pooling=True))
            except JaxserveError as error:
                raise _numbered(error, "prompts", index, len(batch)) from error
        outputs = []
        for result in self._run(jobs, "prompts", use_tqdm):
            assert result.embedding is not None, result.request_id
            outputs.append(
                EmbeddingRequestOutput(
                    request_id=result.request_id,
                    prompt_token_ids=result.prompt_token_ids,
                    outputs=EmbeddingOutput(embedding=result.embedding),
                )
            )
        return outputs

    def _sampling_for(
        self, count: int, sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if sampling_params is None:
            return [self.get_default_sampling_params()] * count
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * count
        if len(sampling_params) != count:
            raise InvalidRequest(
                f"{count} prompts, but {len(sampling_params)} sampling_params; give one for all, or one for each"
            )
        return sampling_params

    def _run(self, jobs: Sequence[Job], what: str, show_bar: bool) -> list[RequestOutput]:
        results: list[RequestOutput | None] = [None] * len(jobs)

        def take(index: int, result: Result) -> None:
            if isinstance(result, JaxserveError):
                raise _numbered(result, what, index, len(jobs)) from result
            results[index] = result

        with BatchBar(len(jobs), shown=show_bar and bool(jobs)) as bar:
            run_jobs(self._engine, jobs, take, bar.update)
        return [r for r in results if r is not None]


def _is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    if isinstance(prompts, str | Mapping):
        return True
    if not isinstance(prompts, Collection) or isinstance(prompts, bytes | bytearray | Set):
        raise InvalidRequest(
            f"prompts is text, token ids, a dictionary or a list of these, got {type(prompts).__name__}"
        )
    try:
        operator.index(next(iter(prompts)))  # type: ignore[arg-type]
    except (TypeError, StopIteration):  # no number comes first, or nothing does
        return False
    return True


def _is_one_conversation(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> bool:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequest(f"messages is a list of {{role, content}}, or a list of such lists, got {messages!r:.80}")
    return len(messages) == 0 or isinstance(messages[0], Mapping)


def _numbered(error: JaxserveError, what: str, index: int, count: int) -> JaxserveError:
    return type(error)(f"{what}[{index}]: {error}" if count > 1 else str(error))
