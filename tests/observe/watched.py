"""What the tests of metrics, page and `top` share: a served engine that has work to show."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from serve_parts import WAIT_S, Served, served

from jaxserve.api import SamplingParams
from jaxserve.config.schema import GrpcConfig, HttpConfig
from jaxserve.engine.adapters import LoadedAdapters
from jaxserve.sched.loading import SlotStore
from jaxserve.sched.plan import NO_SLOTS, HostSlots
from jaxserve.testing import ByteTokenizer

KEYS = ("right-key", "other-key")

http = httpx.Client(verify=False, timeout=WAIT_S)  # one for all tests: making one reads the certificates of the system


@contextlib.contextmanager
def watched(
    tmp_path: Path | None = None,
    *,
    delay_s: float = 0.0,
    num_pages: int = 256,
    drain_s: float = WAIT_S,
    grpc: bool = False,
    drafts: bool = False,
    slots: HostSlots = NO_SLOTS,
    store: SlotStore | None = None,
    admin_tokens_file: str | None = None,
    adapters: LoadedAdapters | None = None,
    **http: Any,
) -> Iterator[Served]:
    """A server whose engine answers in bytes. With `tmp_path` it wants one of KEYS.

    `drafts`: it speculates, and of three drafts two are right.
    """
    if tmp_path is not None:
        path = tmp_path / "keys"
        path.write_text("\n".join(KEYS))
        http["api_keys_file"] = str(path)
    parts = Served(
        tokenizer=ByteTokenizer(),
        delay_s=delay_s,
        num_pages=num_pages,
        shapes=((4, 1),) if drafts else (),
        slots=slots,
        store=store,
        adapters=adapters,
        accept=(lambda *draft: min(2, draft[-1])) if drafts else None,
    )
    with served(
        parts,
        grpc_config=GrpcConfig(port=0 if grpc else None),
        http_config=HttpConfig(**{"port": 0, **http}),
        drain_s=drain_s,
        admin_tokens_file=admin_tokens_file,
    ):
        yield parts


def ask(parts: Served, prompt: str = "abc", **sampling: Any) -> None:
    """Gives the engine a request, without a protocol. Nobody reads its answer."""
    options = {"max_tokens": 8, "ignore_eos": True, **sampling}
    parts.engine.submit(parts.engine.prepare(prompt, SamplingParams(**options)), lambda update: None)


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for something that must happen."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never came: {what}"
        time.sleep(0.01)


def until_idle(parts: Served) -> None:
    (stats,) = parts.engine.stats
    until(lambda: parts.engine.num_live == parts.engine.num_unstarted == 0, "the end of all requests")
    # The last step is counted after its requests were told of their end.
    until(lambda: stats.totals().new_tokens == sum(r.new_tokens for r in stats.requests()), "the last step's record")
