"""`LLM`: a model in a notebook or a script, with the names that vLLM users know.

Owns the translation between those names and ours. Refuses a loop of its own (`offline`) and a server (`serve`). Names
are kept where the meaning is the same; an argument that would not do what vLLM's does is not accepted at all.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.api import SamplingParams
from jaxserve.assemble import Assembly, SchedulerChoice, assemble
from jaxserve.config import ResolvedConfig, load_config
from jaxserve.console import BatchBar, StartBar
from jaxserve.engine import Prompt
from jaxserve.errors import InvalidRequest, JaxserveError
from jaxserve.offline import (
    CompletionOutput,
    Job,
    Logprob,
    RequestMetrics,
    RequestOutput,
    Result,
    chat_template_of,
    prepare_chat,
    prepare_job,
    run_jobs,
)
from jaxserve.text import Tokenizer

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"]

Message = Mapping[str, Any]

_CONFIG_NAMES = {  # vLLM's argument -> the field it sets; None leaves the field alone
    "tokenizer": "model.tokenizer",
    "skip_tokenizer_init": "model.skip_tokenizer",
    "served_model_name": "model.name",
    "dtype": "model.dtype",
    "seed": "model.seed",
    "max_model_len": "model.max_len",
    "max_num_seqs": "sched.max_rows",
    "max_num_batched_tokens": "sched.max_step_tokens",
    "enable_prefix_caching": "cache.prefix_caching",
    "enable_chunked_prefill": "sched.chunked_prefill",
    "block_size": "cache.page_size",
    "num_gpu_blocks_override": "cache.num_pages",
    "gpu_memory_utilization": "cache.memory_fraction",
}


class LLM:
    """A loaded model that answers prompts, many at once. To be used by one thread at a time.

    Args:
      model: Hugging Face style or Orbax directory, or 'demo'.
      tokenizer: directory of the tokenizer when it is another one.
      skip_tokenizer_init: token ids in, token ids out; no tokenizer is loaded.
      served_model_name: name of the model in messages.
      dtype: 'auto', 'float32' or 'bfloat16'.
      seed: of requests that bring none.
      max_model_len: tokens of a sequence, prompt and output.
      max_num_seqs: sequences that run at once.
      max_num_batched_tokens: tokens of a step.
      enable_prefix_caching: share pages of equal prompt beginnings.
      enable_chunked_prefill: cut prompts to fill steps.
      block_size: tokens of a page of the KV cache.
      num_gpu_blocks_override: pages of the KV cache, on whatever device.
      gpu_memory_utilization: share of the device's memory for weights and pages.
      scheduler: name of a policy, or a policy or scheduler, class or object (see `jaxserve.sched`).

    Raises ConfigError, CheckpointError or CapacityError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "demo",
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        skip_tokenizer_init: bool | None = None,
        served_model_name: str | None = None,
        dtype: str | None = None,
        seed: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool | None = None,
        enable_chunked_prefill: bool | None = None,
        block_size: int | None = None,
        num_gpu_blocks_override: int | None = None,
        gpu_memory_utilization: float | None = None,
        scheduler: SchedulerChoice | None = None,
    ) -> None:
        given = {
            "tokenizer": None if tokenizer is None else os.fspath(tokenizer),
            "skip_tokenizer_init": skip_tokenizer_init,
            "served_model_name": served_model_name,
            "dtype": dtype,
            "seed": seed,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "enable_prefix_caching": enable_prefix_caching,
            "enable_chunked_prefill": enable_chunked_prefill,
            "block_size": block_size,
            "num_gpu_blocks_override": num_gpu_blocks_override,
            "gpu_memory_utilization": gpu_memory_utilization,
        }
        overrides: dict[str, object] = {_CONFIG_NAMES[n]: value for n, value in given.items() if value is not None}
        self._start(load_config(None, {"model.path": os.fspath(model), **overrides}), scheduler)

    @classmethod
    def from_config(
        cls,
        path: str | os.PathLike[str],
        overrides: Mapping[str, object] | Sequence[str] = (),
        *,
        scheduler: SchedulerChoice | None = None,
    ) -> "LLM":
        """From a YAML file: `LLM.from_config("demo.yaml", overrides={"cache.num_pages": 24})`."""
        llm = cls.__new__(cls)
        llm._start(load_config(path, overrides), scheduler)
        return llm

    def _start(self, resolved: ResolvedConfig, scheduler: SchedulerChoice | None) -> None:
        with StartBar() as bar:
            self._assembly: Assembly = assemble(resolved, scheduler=scheduler, on_compiled=bar.update)
        self._engine = self._assembly.engine

    def get_tokenizer(self) -> Tokenizer | None:
        """None with `skip_tokenizer_init`."""
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends; the rest as in `SamplingParams()`."""
        return SamplingParams.from_dict(self._assembly.sampling_defaults)

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
          prompts: one or a list of: text; token ids; {"prompt": text} or {"prompt_token_ids": ids}, each with an
            optional "cache_salt".
          sampling_params: for all, or one per prompt; None: `get_default_sampling_params`.
          use_tqdm: show a progress bar on stderr.
          priority: one per prompt, smaller first; needs the policy 'priority'.

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
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them; a message is {"role": …, "content": …}.

        Args:
          chat_template: Jinja source in place of the model's own.
          add_generation_prompt: end the prompt with the opening of the assistant's turn.
          tools: JSON schemas, handed to the template.
          chat_template_kwargs: further values for the template.

        `RequestOutput.prompt` is the rendered text. Errors as in `generate`.
        """
        conversations = [messages] if _is_one_conversation(messages) else list(messages)
        options = self._sampling_for(len(conversations), sampling_params)
        template = chat_template_of(self._engine, chat_template)
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
                )
            except JaxserveError as error:
                raise _numbered(error, "conversations", index, len(conversations)) from error
            jobs.append(job)
        return self._run(jobs, "conversations", use_tqdm)

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
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(
            f"prompts is text, token ids, a dictionary or a list of these, got {type(prompts).__name__}"
        )
    return len(prompts) > 0 and isinstance(prompts[0], int)


def _is_one_conversation(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> bool:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequest(f"messages is a list of {{role, content}}, or a list of such lists, got {messages!r:.80}")
    return len(messages) == 0 or isinstance(messages[0], Mapping)


def _numbered(error: JaxserveError, what: str, index: int, count: int) -> JaxserveError:
    return type(error)(f"{what}[{index}]: {error}" if count > 1 else str(error))
