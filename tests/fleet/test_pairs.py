"""A replica that computes prompts, one that answers and their ingress in one process: all but Ray's own calls.

The engines are real, on the fake device of `handoff_parts`, and the pages travel over gRPC.
"""

import types
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="the extra `ray` is not installed")

from handoff_parts import TOKENS, TokenPages, fake, secret_file

from jaxserve.api import SamplingParams
from jaxserve.config import load_config
from jaxserve.fleet import ray_engine
from jaxserve.fleet.ray_engine import EngineReplica
from jaxserve.fleet.ray_ingress import Ingress
from jaxserve.serve.convert import request_to_proto
from jaxserve.serve.route_apart import Apart

PROMPT = list(TOKENS)
NUM_FULL = 64  # tokens of its full pages
SAMPLING = SamplingParams(seed=7, max_tokens=8, ignore_eos=True)
MakeReplica = Callable[[str], EngineReplica]


class Stream:
    """As much of Ray's stream as an ingress uses. A call that is cancelled is left to its end."""

    def __init__(self, items: AsyncIterator[Any]) -> None:
        self._items = items

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._items

    def cancel(self) -> None: ...


class Handle:
    """As much of Ray's handle as an ingress uses, for one replica."""

    def __init__(self, replica: EngineReplica, method: str = "") -> None:
        self._replica, self._method = replica, method

    def options(self, *, method_name: str, stream: bool = False) -> "Handle":
        return Handle(self._replica, method_name)

    def remote(self, *args: Any, **kwargs: Any) -> Stream:
        return Stream(getattr(self._replica, self._method)(*args, **kwargs))


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeReplica]:
    """Makes a replica with a role, which ends with the test."""
    secret, made = secret_file(tmp_path), []

    def make(role: str) -> EngineReplica:
        parts = fake()
        context = types.SimpleNamespace(replica_id=types.SimpleNamespace(unique_id=role))
        assembly = types.SimpleNamespace(engine=parts.engine, pages=TokenPages(parts, 8))
        monkeypatch.setattr(ray_engine.serve, "get_replica_context", lambda: context)
        monkeypatch.setattr(ray_engine, "assemble", lambda _: assembly)
        handoff = {"role": role, "secret_file": secret, "wait_s": 60, "least_wait_s": 60}
        made.append(EngineReplica(load_config(None, {f"handoff.{name}": value for name, value in handoff.items()})))
        return made[-1]

    monkeypatch.setattr(ray_engine, "set_up_logging", lambda config: None)
    yield make
    for replica in made:
        replica.__del__()


async def _ask(ingress: Any, prompt: list[int]) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of its prompt were cached."""
    context = types.SimpleNamespace(set_trailing_metadata=lambda trailers: None)
    replies = [reply async for reply in ingress.Generate(request_to_proto(prompt, SAMPLING), context)]
    return [token for reply in replies for token in reply.token_ids], replies[0].prompt.num_cached_tokens


async def test_a_prompt_is_computed_by_one_replica_and_answered_by_another(make: MakeReplica) -> None:
    apart = Apart(prefill_above=16, timeout_s=60.0, retries=1)
    alone: Any = Ingress(Handle(make("both")), 2, apart)  # type: ignore[arg-type]
    expected, num_cached = await _ask(alone, PROMPT)
    assert num_cached == 0
    computing = make("prefill")
    paired: Any = Ingress(Handle(make("decode")), 2, apart, Handle(computing))  # type: ignore[arg-type]
    assert await _ask(paired, PROMPT) == (expected, NUM_FULL), "its pages were fetched"
    assert (await _ask(paired, PROMPT[:10]))[1] == 8, "a short one is computed where it is answered"
    computing.__del__()
    other = PROMPT[1:]
    assert await _ask(paired, other) == await _ask(alone, other), "nobody computes prompts, and the answer is whole"
