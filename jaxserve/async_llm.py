"""`AsyncLLM`: a model inside an asyncio program, one stream of news per prompt.

Owns the life of the engine's thread in such a program. Refuses the streams themselves (`engine.streams`), batches
(`LLM`) and protocols (`serve`). Whoever leaves a stream, or is cancelled in it, ends its request, so that no step is
spent on what nobody reads.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from jaxserve.api import SamplingParams
from jaxserve.assemble import SchedulerChoice
from jaxserve.config import ResolvedConfig
from jaxserve.engine import AsyncEngine, Prompt, Update
from jaxserve.front_door import FrontDoor
from jaxserve.offline import Job, prepare_chat, prepare_job

__all__ = ["AsyncLLM", "Update"]


class AsyncLLM(FrontDoor):
    """A loaded model that answers many prompts at once, each as a stream.

        llm = AsyncLLM(model="demo")
        async for update in llm.generate("Once upon a time", SamplingParams(max_tokens=64)):
            print(update.text, end="")
        await llm.shutdown()

    `AsyncLLM(model)` and `AsyncLLM.from_config(file)` take what `LLM` takes. Both load and compile before they return,
    so a running event loop calls them through `asyncio.to_thread`. Generation runs on a thread of its own until
    `shutdown`.
    """

    def _start(self, resolved: ResolvedConfig, scheduler: SchedulerChoice | None) -> None:
        super()._start(resolved, scheduler)
        self._streams = AsyncEngine(self._engine)
        self._engine.start()

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        echo: bool = False,
    ) -> AsyncGenerator[Update, None]:
        """Completes one prompt: text, token ids, or one of the dictionaries of `LLM.generate`.

        Yields updates until one has `last` set; with n > 1 those of the sequences are mixed. Leaving the stream early,
        or a cancel, aborts the request.

        Args:
          sampling_params: None takes `get_default_sampling_params`.
          request_id: for `abort`; unique among live requests. None chooses one.
          priority: smaller first; needs the policy 'priority', others refuse all but 0.
          echo: the text begins with the prompt.

        Raises, when first asked for an update, InvalidRequest and its kin, QueueFull or EngineStopped.
        """
        sampling = self._sampling(sampling_params)
        return self._stream(
            lambda: prepare_job(self._engine, prompt, sampling, request_id=request_id, priority=priority, echo=echo)
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        refuse_special_text: bool = False,
    ) -> AsyncGenerator[Update, None]:
        """Answers one conversation. Arguments as in `LLM.chat`; yields and raises as `generate` does."""
        sampling = self._sampling(sampling_params)
        return self._stream(
            lambda: prepare_chat(
                self._engine,
                self._engine.chat_template(chat_template),
                messages,
                sampling,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                variables=chat_template_kwargs,
                refuse_special_text=refuse_special_text,
                request_id=request_id,
                priority=priority,
            )
        )

    async def embed(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        priority: int = 0,
        truncate_prompt_tokens: int | None = None,
    ) -> list[float]:
        """The embedding of one prompt: the mean of its final hidden states, of Euclidean length 1.

        A cancel aborts it. Raises InvalidRequest and its kin, QueueFull or EngineStopped.
        """
        return await self._streams.embed(
            prompt, request_id=request_id, priority=priority, truncate_prompt_tokens=truncate_prompt_tokens
        )

    def abort(self, request_id: str) -> None:
        """Ends a request: its stream gets a last update with finish reason ABORT. An unknown id is ignored."""
        self._engine.abort(request_id)

    async def shutdown(self, drain_s: float = 30.0) -> None:
        """Refuses new requests, gives the running ones `drain_s` seconds, ends what is left, and ends the thread.

        May be called again, which does nothing more.
        """
        try:
            await asyncio.to_thread(self._engine.drain, drain_s)
        finally:
            await asyncio.to_thread(self._engine.stop)
            self._streams.close()

    def _sampling(self, given: SamplingParams | None) -> SamplingParams:
        return self.get_default_sampling_params() if given is None else given

    async def _stream(self, prepare: Callable[[], Job]) -> AsyncGenerator[Update, None]:
        job = await self._streams.run(prepare)
        async with contextlib.aclosing(self._streams.stream(job.request, echo=job.echo)) as updates:
            async for update in updates:
                yield update
