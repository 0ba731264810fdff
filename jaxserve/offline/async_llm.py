"""`AsyncLLM`: a model inside an asyncio program, one stream of news per prompt.

The engine's thread lives and ends with this object. The streams are those of `engine.streams`; `LLM` is for batches. A
task that leaves a stream, or is cancelled in it, ends the request, so that no step is spent on an answer nobody reads.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from jaxserve.api import Request, RequestOptions, SamplingParams
from jaxserve.config import ResolvedConfig
from jaxserve.engine import AsyncEngine, CacheControl, Prompt, Update, encode_pairs, make_pairs, need_reranker
from jaxserve.offline import prepare_chat
from jaxserve.offline.arguments import refuses_unknown
from jaxserve.offline.forks import Maker
from jaxserve.offline.front_door import FrontDoor

if TYPE_CHECKING:
    from jaxserve.assemble import SchedulerChoice
    from jaxserve.assemble.device import WeightSource

__all__ = ["AsyncLLM", "Update"]


class AsyncLLM(FrontDoor):
    """A loaded model that answers many prompts at once, each as a stream.

        llm = AsyncLLM(model="demo")
        async for update in llm.generate("Once upon a time", SamplingParams(max_tokens=64)):
            print(update.text, end="")
        await llm.shutdown()

    `AsyncLLM(model)` and `AsyncLLM.from_config(file)` take what `LLM` takes. Both load and compile before they return,
    so a running event loop calls them through `asyncio.to_thread`. Generation runs on a thread of its own until
    `shutdown`. All methods raise ForkedProcess in a child that was forked since.
    """

    def _start(self, resolved: ResolvedConfig, scheduler: "SchedulerChoice | None", *, progress: bool) -> None:
        super()._start(resolved, scheduler, progress=progress)
        self._maker = Maker()
        self._streams = AsyncEngine(self._engine)
        self._engine.start()

    @refuses_unknown
    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        ttft_target_s: float | None = None,
        tpot_target_s: float | None = None,
        timeout_s: float | None = None,
        adapter: str | None = None,
        echo: bool = False,
    ) -> AsyncGenerator[Update, None]:
        """Completes one prompt: text, token ids, or one of the dictionaries of `LLM.generate`.

        Yields updates until one has `last` set; with n > 1 those of the sequences are mixed. Leaving the stream early,
        or a cancel, aborts the request.

        Args:
          sampling_params: None takes `get_default_sampling_params`.
          request_id: for `abort`; unique among live requests. None chooses one.
          priority: smaller first; needs the policy 'priority', 'preemptive' or 'fair', others refuse all but 0.
          cache_salt: prompts share prefix pages only with the same salt; a dictionary's own wins.
          tenant: for policies that share between tenants, as 'fair' does.
          ttft_target_s, tpot_target_s: seconds to the first token and for each after it, for the policy 'slo'; None:
            those of the config.
          timeout_s: seconds after which it ends with DeadlineExceeded; None: no limit.
          adapter: name of a loaded LoRA adapter (`load_adapter`); None, or the model's own name: none.
          echo: the text begins with the prompt.

        Raises, when first asked for an update, InvalidRequest and its kin, QueueFull or EngineStopped; DeadlineExceeded
        when `timeout_s` is over.
        """
        self._maker.check()
        sampling = self._sampling(sampling_params)
        options = RequestOptions(
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            ttft_target_s=ttft_target_s,
            tpot_target_s=tpot_target_s,
            timeout_s=timeout_s,
            adapter=adapter,
            echo=echo,
        )
        return self._stream(lambda: self._engine.prepare(prompt, sampling, options))

    @refuses_unknown
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        ttft_target_s: float | None = None,
        tpot_target_s: float | None = None,
        timeout_s: float | None = None,
        adapter: str | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        refuse_special_text: bool = False,
    ) -> AsyncGenerator[Update, None]:
        """Answers one conversation. Arguments as in `generate` and `LLM.chat`; yields and raises as `generate` does."""
        self._maker.check()
        sampling = self._sampling(sampling_params)
        options = RequestOptions(
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            ttft_target_s=ttft_target_s,
            tpot_target_s=tpot_target_s,
            timeout_s=timeout_s,
            adapter=adapter,
        )
        return self._stream(
            lambda: (
                prepare_chat(
                    self._engine,
                    self._engine.chat_template(chat_template),
                    messages,
                    sampling,
                    options,
                    add_generation_prompt=add_generation_prompt,
                    tools=tools,
                    variables=chat_template_kwargs,
                    refuse_special_text=refuse_special_text,
                ).request
            )
        )

    @refuses_unknown
    async def embed(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        priority: int = 0,
        truncate_prompt_tokens: int | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
    ) -> list[float]:
        """The embedding of one prompt. Arguments as in `LLM.embed`.

        A cancel aborts it. Raises InvalidRequest and its kin, QueueFull or EngineStopped.
        """
        self._maker.check()
        return await self._streams.embed(
            prompt,
            RequestOptions(request_id=request_id, priority=priority),
            truncate_prompt_tokens=truncate_prompt_tokens,
            dimensions=dimensions,
            normalize=normalize,
        )

    @refuses_unknown
    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        request_id: str | None = None,
        priority: int = 0,
        instruction: str | None = None,
        max_tokens_per_doc: int | None = None,
    ) -> list[float]:
        """The scores of documents, 0 to 1, in their order. Arguments as in `LLM.score`.

        `request_id` begins the ids of the requests. A cancel aborts them. Raises UnsupportedOption for a model that is
        not known to judge, InvalidRequest and its kin, QueueFull or EngineStopped.
        """
        self._maker.check()
        reranker, tokenizer = need_reranker(self._engine.model.reranker), self._engine.tokenizer
        assert tokenizer is not None, "a reranker has been made with one"
        pairs = make_pairs(queries, documents)
        judgements = await self._streams.run(
            lambda: encode_pairs(
                reranker,
                tokenizer,
                pairs,
                "documents",
                max_model_len=self._engine.model.max_model_len,
                instruction=instruction,
                max_document_tokens=max_tokens_per_doc,
            ),
            prompts=len(pairs),
        )
        await self._streams.judge(judgements, RequestOptions(request_id=request_id, priority=priority))
        return [one.score for one in judgements]

    def abort(self, request_id: str) -> None:
        """Ends a request: its stream gets a last update with finish reason ABORT. An unknown id is ignored."""
        self._maker.check()
        self._engine.abort(request_id)

    async def update_weights(
        self, weights: "WeightSource", *, version: str, policy: Literal["finish", "recompute", "keep"] = "recompute"
    ) -> float:
        """Other weights, between two steps; nothing is compiled. Returns the seconds for which the loop paused.

        Args:
          weights: arrays by the names of `jaxserve.models.load_trainable`, which stay the caller's, or a directory with
            a checkpoint of the same shapes. They are checked and brought to their places beside the running steps.
          version: a name for `Update.weights` to tell.
          policy: of requests that run. "finish": they end on the old weights, and those that come meanwhile wait for
            that. "recompute": they go on with their tokens, whose keys and values the new weights compute anew.
            "keep": they go on with the old keys and values, too.

        Raises CheckpointError, ConfigError or InvalidRequest for what does not fit, and CapacityError when the device
        has no room for both sets of weights; nothing has changed then.
        """
        self._maker.check()
        return await asyncio.to_thread(self._assembly.weights.update, weights, version, policy)

    @refuses_unknown
    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Gives back the device's memory, weights and pages, when the running requests have ended; new ones are refused
        from now on. `keep_weights`: they go to the host's memory."""
        self._maker.check()
        await asyncio.to_thread(self._assembly.weights.sleep, keep_weights=keep_weights)

    async def wake_up(self, weights: "WeightSource | None" = None, *, version: str = "") -> None:
        """Takes the device again; other weights as in `update_weights`, which are needed where none were kept.

        Raises as `update_weights`, and CapacityError when the device has no room; it sleeps on then.
        """
        self._maker.check()
        await asyncio.to_thread(self._assembly.weights.wake_up, weights, version)

    @refuses_unknown
    async def reset_prefix_cache(self) -> bool:
        """Forgets the pages of all prompts beside the running steps, whose requests keep theirs. See `LLM`."""
        self._maker.check()
        await asyncio.to_thread(CacheControl(self._engine).flush, None, store=False)
        return True

    async def load_adapter(self, name: str, path: str | os.PathLike[str], *, replace: bool = False) -> None:
        """Reads a LoRA adapter beside the running steps; requests may name it from now on. See `LLM.load_adapter`.

        `replace`: those that run with an adapter of this name end with it.
        """
        self._maker.check()
        adapters = self._assembly.adapters
        await asyncio.to_thread(adapters.load, name, path, self.model_name, replace=replace)

    def unload_adapter(self, name: str) -> None:
        """No request may name the adapter any more; those that run end with it. Raises UnknownModel."""
        self._maker.check()
        self._assembly.adapters.unload(name, self.model_name)

    async def shutdown(self, drain_s: float = 30.0) -> None:
        """Refuses new requests, gives the running ones `drain_s` seconds, ends what is left, and ends the thread.

        Weights and pages are given back at once. May be called again, which does nothing more, as in a child that was
        forked.
        """
        if not self._maker.is_here:
            return
        try:
            await asyncio.to_thread(self._engine.drain, drain_s)
        finally:
            await asyncio.to_thread(self._end)
            self._streams.close()

    async def _stream(self, prepare: Callable[[], Request]) -> AsyncGenerator[Update, None]:
        request = await self._streams.run(prepare)
        async with contextlib.aclosing(self._streams.stream(request)) as updates:
            async for update in updates:
                yield update
