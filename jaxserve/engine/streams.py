"""Streams for asyncio: one async iterator per request on top of the engine's loop thread.

Owns the bridge between the loop thread and an event loop. Refuses to know a protocol.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxserve.api import Request, SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.engine.inputs import Prompt
from jaxserve.engine.outputs import Update
from jaxserve.errors import InvalidRequest
from jaxserve.text.chat import ChatTemplate, encode_chat


class AsyncEngine:
    """The engine as coroutines. One per event loop; closing it does not stop the engine."""

    def __init__(self, engine: Engine, encode_threads: int = 2) -> None:
        self.engine = engine
        self._pool = ThreadPoolExecutor(encode_threads, thread_name_prefix="jaxserve-encode")
        self._template: ChatTemplate | None = None  # compiled by the first chat request

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        add_special_tokens: bool = True,
        echo: bool = False,
    ) -> AsyncGenerator[Update, None]:
        """Yields updates until the request has ended. Leaving the iterator early, or a cancel, aborts the request.

        Raises the typed error that ended the request, if one did.
        """
        request = await self.prepare(
            prompt,
            sampling,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            add_special_tokens=add_special_tokens,
        )
        async with contextlib.aclosing(self.stream(request, echo=echo)) as updates:
            async for update in updates:
                yield update

    async def prepare(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        add_special_tokens: bool = True,
    ) -> Request:
        """`Engine.prepare` on a thread of its own, so that a long prompt does not hold up the other streams."""

        def work() -> Request:
            return self.engine.prepare(
                prompt,
                sampling,
                request_id=request_id,
                priority=priority,
                cache_salt=cache_salt,
                tenant=tenant,
                add_special_tokens=add_special_tokens,
            )

        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of the messages under the model's own template. Raises InvalidRequest when it has none."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._encode_chat, messages)

    def _encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise InvalidRequest("chat messages need a tokenizer, and this engine was started without; send token ids")
        if self._template is None:
            self._template = ChatTemplate.of(tokenizer)
        return encode_chat(tokenizer, self._template, messages)

    async def stream(self, request: Request, *, echo: bool = False) -> AsyncGenerator[Update, None]:
        """Submits a prepared request; yields and raises as `generate` does."""
        loop = asyncio.get_running_loop()
        updates: asyncio.Queue[Update] = asyncio.Queue()
        self.engine.submit(request, lambda u: loop.call_soon_threadsafe(updates.put_nowait, u) and None, echo=echo)
        ended = False
        try:
            while not ended:
                update = await updates.get()
                ended = update.last
                if update.error is not None:
                    raise update.error
                yield update
        finally:
            if not ended:
                self.engine.abort(request)

    def close(self) -> None:
        """Lets the threads that encode go. The engine is left alone."""
        self._pool.shutdown(wait=False, cancel_futures=True)
