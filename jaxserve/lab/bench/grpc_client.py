"""A client of jaxserve's own gRPC service for the load generator: `jaxserve.client` with times."""

import contextlib
import time
from collections.abc import Mapping
from typing import cast

from jaxserve.api import SamplingParams
from jaxserve.client import AsyncClient, ClientPrompt, Retries, Tls
from jaxserve.client import RequestFailed as CallFailed
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.lab.bench.recording import Recording, RequestFailed
from jaxserve.lab.bench.serve_options import Endpoint
from jaxserve.lab.workloads.samples import Sample
from jaxserve.serve.gen import inference_pb2 as pb


class GrpcClient:
    """One channel to one server. Belongs to the event loop on which it was made."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Raises ConfigError for a key or a certificate that cannot be used."""
        tls = None if endpoint.ca_file is None else Tls(ca=endpoint.ca_file)
        retries = Retries(attempts=0)  # a failure is a part of what is measured
        self._client = AsyncClient(endpoint.url, tls=tls, token=endpoint.api_key, retries=retries)
        self._address = endpoint.url
        self._options: Mapping[str, object] = {"ignore_eos": endpoint.ignore_eos} | (
            {"temperature": endpoint.temperature} if endpoint.temperature is not None else {}
        )

    async def describe(self, timeout_s: float) -> dict[str, str]:
        """Model and version, as the server reports. Waits for a server that is starting; raises ConfigError."""
        if not await self._client.is_serving(timeout_s=timeout_s, wait_for_ready=True):
            raise ConfigError(f"{self._address} does not serve gRPC; is the server running there, and is it ready?")
        try:
            model = await self._client.model(timeout_s=timeout_s)
        except CallFailed as error:
            raise ConfigError(f"{self._address} does not say what it serves: {error}") from error
        return {"model": model.name, "version": model.version}

    async def count_tokens(self, text: str, *, with_added: bool, timeout_s: float) -> int | None:
        """See `LoadClient.count_tokens`."""
        try:
            return len(await self._client.tokenize(text, add_special_tokens=with_added, timeout_s=timeout_s))
        except CallFailed:  # a server of token ids
            return None

    async def send(self, sample: Sample, recording: Recording) -> None:
        """See `LoadClient.send`."""
        prompt = sample.prompt if isinstance(sample.prompt, str) else list(sample.prompt)
        try:
            sampling = SamplingParams.from_dict({**self._options, "max_tokens": sample.output_len})
            recording.start()
            async with contextlib.aclosing(self._client.generate(cast(ClientPrompt, prompt), sampling)) as replies:
                async for reply in replies:
                    if reply.finish_reason == pb.FINISH_REASON_ABORT:
                        raise RequestFailed("aborted", "the server ended the request before its end")
                    recording.output_times_s.append(time.perf_counter())
                    if reply.HasField("usage"):
                        recording.prompt_tokens = reply.usage.num_prompt_tokens
                        recording.output_tokens = reply.usage.num_generated_tokens
                        recording.cached_tokens = reply.usage.num_cached_tokens
                        recording.drafted_tokens = reply.usage.num_drafted_tokens
                        recording.accepted_tokens = reply.usage.num_accepted_tokens
        except CallFailed as error:
            raise RequestFailed(f"gRPC {error.status}", str(error)) from error
        except InvalidRequest as error:
            raise RequestFailed("cannot be sent", str(error)) from error
        if recording.output_tokens is None:
            raise RequestFailed("cut off", "the stream ended without a usage")

    async def close(self) -> None:
        """Closes the channel."""
        await self._client.close()
