"""`LLM`: a model in a notebook or a script, with the names that vLLM users know.

It takes prompts in many forms and answers them with the loop of `offline`. Names are kept where the meaning is the
same; an argument that would not do what vLLM's does is not accepted at all.
"""

import operator
import os
import threading
from collections.abc import Collection, Generator, Mapping, Sequence, Set
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, Self, TypeGuard

from jaxserve.api import RequestOptions, SamplingParams
from jaxserve.config import ResolvedConfig, for_batches
from jaxserve.engine import CacheControl, Prompt, Update, encode_pairs, make_pairs, need_reranker, pooling_params
from jaxserve.errors import InvalidRequest, JaxserveError
from jaxserve.offline import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Job,
    Logprob,
    RequestMetrics,
    RequestOutput,
    Result,
    ScoringOutput,
    ScoringRequestOutput,
    Turns,
    prepare_chat,
    prompt_text,
    run_jobs,
    stream_updates,
)
from jaxserve.offline.arguments import refuses_unknown
from jaxserve.offline.console import BatchBar
from jaxserve.offline.front_door import FrontDoor
from jaxserve.offline.turns import one_call

if TYPE_CHECKING:
    from jaxserve.assemble import SchedulerChoice
    from jaxserve.assemble.device import WeightSource

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
    "Update",
]

Message = Mapping[str, Any]


class LLM(FrontDoor):
    """A loaded model that answers prompts, many at once. Threads may share one; asyncio has `AsyncLLM`.

    `LLM(model)` takes the names that vLLM has for its arguments, `LLM.from_config(file)` the settings of a config.

    Calls of several threads run in one batch. `sleep` and `close` wait until those of other threads have ended, and
    keep new ones waiting. A stream that is not being read is no such call: its request goes on with whatever runs.
    In a child that was forked all raise ForkedProcess.
    """

    def _start(self, resolved: ResolvedConfig, scheduler: "SchedulerChoice | None", *, progress: bool) -> None:
        super()._start(for_batches(resolved), scheduler, progress=progress)
        self._turns = Turns(self._engine)
        self._changing = threading.Lock()  # held while the weights change, which one thread at a time may want

    @one_call
    def update_weights(
        self, weights: "WeightSource", *, version: str, policy: Literal["finish", "recompute", "keep"] = "recompute"
    ) -> float:
        """Other weights for the prompts from now on; nothing is compiled. Returns seconds for which the loop paused.

        Args:
          weights: arrays by the names of `jaxserve.models.load_trainable`, which stay the caller's, or a directory with
            a checkpoint of the same shapes.
          version: a name for `CompletionOutput.weights` to tell.
          policy: of sequences that run, which a batch has none of between two calls; see `AsyncLLM.update_weights`.

        Raises CheckpointError, ConfigError or InvalidRequest for what does not fit, and CapacityError when the device
        has no room for both sets of weights; nothing has changed then.
        """
        with self._changing:
            return self._assembly.weights.update(weights, version, policy, self._drive)

    @refuses_unknown
    def sleep(self, *, keep_weights: bool = True) -> None:
        """Gives back the device's memory, weights and pages; `keep_weights`: they go to the host's memory.

        Waits until the calls of other threads and streams that have begun have ended.
        """
        with self._turns.alone():
            self._assembly.weights.sleep(self._drive, keep_weights=keep_weights)

    @one_call
    def wake_up(self, weights: "WeightSource | None" = None, *, version: str = "") -> None:
        """Takes the device again; other weights as in `update_weights`, which are needed where none were kept.

        Raises as `update_weights`, and CapacityError when the device has no room; it sleeps on then.
        """
        with self._changing:
            self._assembly.weights.wake_up(weights, version, self._drive)

    @one_call
    def load_adapter(self, name: str, path: str | os.PathLike[str], *, replace: bool = False) -> None:
        """Reads a LoRA adapter in the form of PEFT, which prompts name as `adapter` from now on.

        Args:
          name: 1 to 64 letters, digits, dots, hyphens or underscores.
          path: of the directory with `adapter_config.json` and `adapter_model.safetensors`.
          replace: another adapter of this name gives way; else that is refused.

        Needs `adapters.slots`. Raises AdapterError for files that do not fit the model or the limits, InvalidRequest
        for the name, ConfigError without slots; nothing has changed then.
        """
        self._assembly.adapters.load(name, path, self.model_name, replace=replace)

    @one_call
    def unload_adapter(self, name: str) -> None:
        """No prompt may name the adapter any more. Raises UnknownModel."""
        self._assembly.adapters.unload(name, self.model_name)

    @refuses_unknown
    @one_call
    def reset_prefix_cache(self) -> bool:
        """Forgets the pages of all prompts, on the device and in host memory, so that none finds one. Returns True.

        Streams that have begun keep theirs, and a store (`store.kind`) all of its own. Raises InvalidRequest for a
        scheduler of your own that has no such operation.
        """
        CacheControl(self._engine, self._drive).flush(None, store=False)
        return True

    def _drive(self, changes: "Sequence[Future[Any]]") -> None:
        def done() -> bool:
            return all(change.done() for change in changes)

        try:
            while not done():
                self._turns.step(done)
        except BaseException as error:  # the weights may be half exchanged, so nothing may be drawn by them
            self._engine.fail(error)
            raise

    def close(self) -> None:
        """Gives back weights and pages at once, ends the step log and the builds in the background.

        Waits until the calls of other threads have ended; streams that are not being read end where they are. Other
        methods raise EngineStopped from now on; this one may be called again. `with LLM(...) as llm:` does it at the
        end of the block, so that the next model has the whole device. Without it all ends with the process.
        """
        self._turns.close(self._end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @refuses_unknown
    @one_call
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | int = 0,
        cache_salt: Sequence[str] | str = "",
        tenant: Sequence[str] | str = "",
        ttft_target_s: Sequence[float | None] | float | None = None,
        tpot_target_s: Sequence[float | None] | float | None = None,
        adapter: Sequence[str | None] | str | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts; returns one output per prompt, in their order.

        Args:
          prompts: one or a list of: text; token ids (a list or an array); {"prompt": text} or
            {"prompt_token_ids": ids}, each with an optional "cache_salt".
          sampling_params: for all, or one per prompt; None: `get_default_sampling_params`.
          use_tqdm: show a progress bar on stderr.
          priority: smaller first; needs the policy 'priority', 'preemptive' or 'fair', others refuse all but 0.
          cache_salt: prompts share prefix pages only with the same salt; a dictionary's own wins.
          tenant: for policies that share between tenants, as 'fair' does.
          ttft_target_s, tpot_target_s: seconds to the first token and for each after it, for the policy 'slo'; None:
            those of the config.
          adapter: name of a loaded LoRA adapter (`load_adapter`); None, or the model's own name: none.

        `priority` and all after it: one value for all prompts, or a list with one for each.

        Raises InvalidRequest and its kin for the first bad prompt, before anything has run; RequestRejected when the
        pool could never hold one. Nothing is left running after an error or an interrupt.
        """
        batch: Sequence[Prompt] = [prompts] if _is_one_prompt(prompts) else list(prompts)  # type: ignore[arg-type]
        sampling = self._sampling_for(len(batch), sampling_params)
        options = _options(len(batch), "prompts", priority, cache_salt, tenant, ttft_target_s, tpot_target_s, adapter)
        jobs = []
        for index, prompt in enumerate(batch):
            try:
                request = self._engine.prepare(prompt, sampling[index], options[index])
            except JaxserveError as error:
                raise _numbered(error, "prompts", index, len(batch)) from error
            jobs.append(Job(request=request, prompt=prompt_text(prompt)))
        outputs = _Outputs("prompts", len(jobs))
        with BatchBar(len(jobs), shown=use_tqdm and bool(jobs)) as bar:
            run_jobs(self._engine, jobs, outputs.take, bar.update, self._turns)
        return outputs.all

    @refuses_unknown
    @one_call
    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        ttft_target_s: float | None = None,
        tpot_target_s: float | None = None,
        timeout_s: float | None = None,
        adapter: str | None = None,
        echo: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Generator[Update, None, None]:
        """Answers one prompt, or one conversation, and yields what is new as soon as it is there.

            for update in llm.stream("Once upon a time", SamplingParams(max_tokens=64)):
                print(update.text, end="", flush=True)

        The model works while the next update is asked for. Leaving the loop early, or an interrupt, ends the request.
        Other calls may come between two updates, of this thread too: they wait for nothing, and the stream goes on with
        them, so that its next updates are there at once; nobody has to read it to its end. With n > 1
        the updates of the sequences are mixed (`Update.index`). For many streams at once, and asyncio: `AsyncLLM`.

        Args:
          prompt: as one in `generate`, or the messages of one conversation.
          timeout_s: seconds after which it ends with DeadlineExceeded; None: no limit.
          echo: the text begins with the prompt; of a prompt alone.
          chat_template_kwargs: further values for the template of a conversation.

        The rest as in `generate`, but that of one prompt. Raises InvalidRequest and its kin, before anything has run.
        """
        options = RequestOptions(
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            ttft_target_s=ttft_target_s,
            tpot_target_s=tpot_target_s,
            timeout_s=timeout_s,
            adapter=adapter,
            echo=echo,
        )
        sampling = self._sampling(sampling_params)
        if _is_messages(prompt):
            if echo:
                raise InvalidRequest("echo is for prompts; a conversation has none that it could begin with")
            template = self._engine.chat_template()
            job = prepare_chat(self._engine, template, prompt, sampling, options, variables=chat_template_kwargs)
            return stream_updates(self._turns, job.request)
        if chat_template_kwargs is not None:
            raise InvalidRequest("chat_template_kwargs are for conversations; the prompt is none")
        return stream_updates(self._turns, self._engine.prepare(prompt, sampling, options))  # type: ignore[arg-type]

    @refuses_unknown
    @one_call
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | int = 0,
        cache_salt: Sequence[str] | str = "",
        tenant: Sequence[str] | str = "",
        ttft_target_s: Sequence[float | None] | float | None = None,
        tpot_target_s: Sequence[float | None] | float | None = None,
        adapter: Sequence[str | None] | str | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        refuse_special_text: bool = False,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them; a message is {"role": …, "content": …}.

        Args:
          priority, cache_salt, tenant, ttft_target_s, tpot_target_s, adapter: as in `generate`.
          chat_template: Jinja source in place of the model's own.
          add_generation_prompt: end the prompt with the opening of the assistant's turn.
          tools: JSON schemas, handed to the template.
          chat_template_kwargs: further values for the template.
          refuse_special_text: refuse messages that spell a special token of the model; else it is plain text there, so
            that nobody can close their own turn and write a system message.

        `RequestOutput.prompt` is the rendered text. Errors as in `generate`.
        """
        conversations = [messages] if _is_one_conversation(messages) else list(messages)
        sampling = self._sampling_for(len(conversations), sampling_params)
        options = _options(
            len(conversations), "conversations", priority, cache_salt, tenant, ttft_target_s, tpot_target_s, adapter
        )
        template = self._engine.chat_template(chat_template)
        jobs = []
        for index, conversation in enumerate(conversations):
            try:
                job = prepare_chat(
                    self._engine,
                    template,
                    conversation,  # type: ignore[arg-type]
                    sampling[index],
                    options[index],
                    add_generation_prompt=add_generation_prompt,
                    tools=tools,
                    variables=chat_template_kwargs,
                    refuse_special_text=refuse_special_text,
                )
            except JaxserveError as error:
                raise _numbered(error, "conversations", index, len(conversations)) from error
            jobs.append(job)
        outputs = _Outputs("conversations", len(jobs))
        with BatchBar(len(jobs), shown=use_tqdm and bool(jobs)) as bar:
            run_jobs(self._engine, jobs, outputs.take, bar.update, self._turns)
        return outputs.all

    @refuses_unknown
    @one_call
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Embeds prompts; returns one output per prompt, in their order: `output.outputs.embedding`.

        An embedding is the mean of the final hidden states of the tokens that the model pools (`model.pooling`): all of
        the prompt, the last or the first.

        Args:
          prompts: as in `generate`.
          truncate_prompt_tokens: keep the last that many tokens of each prompt.
          dimensions: numbers to keep of each embedding, one of the sizes that the model was trained to be cut to.
          normalize: scale each to Euclidean length 1; None: as the checkpoint says, which is yes unless it says no.
          use_tqdm: show a progress bar on stderr.

        Errors as in `generate`; UnsupportedOption for `dimensions` that the model was not trained for.
        """
        form = self._engine.model.embedding.form(dimensions, normalize)
        batch: Sequence[Prompt] = [prompts] if _is_one_prompt(prompts) else list(prompts)  # type: ignore[arg-type]
        sampling = pooling_params(truncate_prompt_tokens)
        jobs = []
        for index, prompt in enumerate(batch):
            try:
                request = self._engine.prepare(prompt, sampling, RequestOptions(pooling=True))
            except JaxserveError as error:
                raise _numbered(error, "prompts", index, len(batch)) from error
            jobs.append(Job(request=request, prompt=prompt_text(prompt), form=form))
        outputs = _Outputs("prompts", len(jobs))
        with BatchBar(len(jobs), shown=use_tqdm and bool(jobs)) as bar:
            run_jobs(self._engine, jobs, outputs.take, bar.update, self._turns)
        embedded = []
        for output in outputs.all:
            assert output.embedding is not None, output.request_id
            embedded.append(
                EmbeddingRequestOutput(
                    request_id=output.request_id,
                    prompt_token_ids=output.prompt_token_ids,
                    outputs=EmbeddingOutput(embedding=output.embedding),
                )
            )
        return embedded

    @refuses_unknown
    @one_call
    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        max_tokens_per_doc: int | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Judges documents; returns one output for each, in their order: `output.outputs.score`, from 0 to 1.

        The model is asked about each document in the words of `rerank.template`, and the score is
        P(yes) / (P(yes) + P(no)) of its answer.

        Args:
          queries: one for all documents, or one for each.
          documents: one or several texts.
          instruction: what the documents are judged for; None: `rerank.instruction`.
          max_tokens_per_doc: cut longer documents off there.
          use_tqdm: show a progress bar on stderr.

        Raises UnsupportedOption for a model that is not known to judge, InvalidRequest and its kin for the first pair
        that cannot be taken, before anything has run.
        """
        reranker, tokenizer = need_reranker(self._engine.model.reranker), self._engine.tokenizer
        assert tokenizer is not None, "a reranker has been made with one"
        judgements = encode_pairs(
            reranker,
            tokenizer,
            make_pairs(queries, documents),
            "documents",
            max_model_len=self._engine.model.max_model_len,
            instruction=instruction,
            max_document_tokens=max_tokens_per_doc,
        )
        request_ids: dict[int, str] = {}
        with BatchBar(len(judgements), shown=use_tqdm) as bar:
            waiting = list(enumerate(judgements))
            while waiting:
                jobs = []
                for _, one in waiting:
                    assert one.sampling is not None, one
                    jobs.append(Job(request=self._engine.prepare({"prompt_token_ids": one.prompt_ids}, one.sampling)))
                outputs = _Outputs("documents", len(jobs))
                run_jobs(self._engine, jobs, outputs.take, bar.update, self._turns)
                for (index, one), output in zip(waiting, outputs.all, strict=True):
                    request_ids[index] = output.request_id
                    for entry in output.outputs[0].logprobs or ():
                        one.take({token_id: found.logprob for token_id, found in entry.items()})
                waiting = [(index, one) for index, one in waiting if one.sampling is not None]
        return [
            ScoringRequestOutput(
                request_id=request_ids[index],
                prompt_token_ids=list(one.prompt_ids),
                outputs=ScoringOutput(score=one.score),
            )
            for index, one in enumerate(judgements)
        ]

    def _sampling_for(
        self, count: int, sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if not isinstance(sampling_params, Sequence):
            return [self._sampling(sampling_params)] * count
        if len(sampling_params) != count:
            raise InvalidRequest(
                f"{count} prompts, but {len(sampling_params)} sampling_params; give one for all, or one for each"
            )
        return [self._sampling(one) for one in sampling_params]


class _Outputs:
    """The outputs of one call. `run_jobs` gives them to `take`, which raises the first error."""

    def __init__(self, what: str, count: int) -> None:
        self._what = what
        self._outputs: list[RequestOutput | None] = [None] * count

    def take(self, index: int, result: Result) -> None:
        if isinstance(result, JaxserveError):
            raise _numbered(result, self._what, index, len(self._outputs)) from result
        self._outputs[index] = result

    @property
    def all(self) -> list[RequestOutput]:
        """In the order of the prompts; all have ended."""
        return [output for output in self._outputs if output is not None]


def _options(
    count: int,
    what: str,
    priority: Sequence[int] | int,
    cache_salt: Sequence[str] | str,
    tenant: Sequence[str] | str,
    ttft_target_s: Sequence[float | None] | float | None,
    tpot_target_s: Sequence[float | None] | float | None,
    adapter: Sequence[str | None] | str | None,
) -> list[RequestOptions]:
    """The options of each of `count` prompts. Raises InvalidRequest for a list of another length."""

    def each(name: str, given: Any) -> Sequence[Any]:
        if isinstance(given, str) or not isinstance(given, Collection):
            return [given] * count
        if len(given) != count:
            raise InvalidRequest(f"{count} {what}, but {len(given)} of {name}; give one for all, or one for each")
        return list(given)

    rows = zip(
        each("priority", priority),
        each("cache_salt", cache_salt),
        each("tenant", tenant),
        each("ttft_target_s", ttft_target_s),
        each("tpot_target_s", tpot_target_s),
        each("adapter", adapter),
        strict=True,
    )
    return [
        RequestOptions(
            priority=level, cache_salt=salt, tenant=name, ttft_target_s=ttft_s, tpot_target_s=tpot_s, adapter=named
        )
        for level, salt, name, ttft_s, tpot_s, named in rows
    ]


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


def _is_messages(prompt: object) -> TypeGuard[Sequence[Message]]:
    """Whether it is one conversation; a list of token ids has no mapping in it."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str):
        return False
    return len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _numbered(error: JaxserveError, what: str, index: int, count: int) -> JaxserveError:
    return type(error)(f"{what}[{index}]: {error}" if count > 1 else str(error))
