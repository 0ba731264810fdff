"""An engine that is closed has no memory of the device any more, although a name still holds it."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import pytest
from whole import FIXTURES, POOL, SMALL

from jaxserve import LLM, AsyncLLM, SamplingParams
from jaxserve.errors import EngineStopped

SETTINGS: dict[str, object] = {"model.path": str(FIXTURES / "llama"), **SMALL}
SETTINGS |= {name.replace("__", "."): value for name, value in POOL.items()}
IDS = [7, 11, 13, 17, 19] * 4
LONG = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def start(settings: Mapping[str, object] = {}) -> LLM:
    return LLM.from_config(None, {**SETTINGS, **settings}, progress=False)


class Device:
    """The bytes of arrays that have come since it was made."""

    def __init__(self) -> None:
        self._before = {id(array) for array in jax.live_arrays()}
        self._held = jax.live_arrays()  # their ids stay theirs

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in jax.live_arrays() if id(array) not in self._before)


def wait_until(condition: Callable[[], bool]) -> None:
    begin_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begin_s < 60, "in vain"
        time.sleep(0.002)


@pytest.mark.parametrize(
    "settings",
    [{}, {"parallel.data": 2}, {"parallel.tensor": 2, "parallel.pipeline": 2}, {"cache.host_bytes": 2**20}],
    ids=str,
)
def test_the_end_of_a_block_gives_back_all(settings: Mapping[str, object]) -> None:
    device = Device()
    with start(settings) as llm:
        [wanted] = llm.generate([IDS], SHORT, use_tqdm=False)
        held = device.num_bytes
        assert held > 100_000
        stream = llm.stream(IDS, LONG)  # a step is in flight when it closes
        next(stream)
    # The name, and the stream, still hold the object. Pages that were on their way to the host arrive there first.
    wait_until(lambda: device.num_bytes < held / 100)
    assert [update.finish_reason for update in stream][-1] == "abort"
    with start(settings) as llm:
        assert llm.generate([IDS], SHORT, use_tqdm=False)[0].outputs[0].token_ids == wanted.outputs[0].token_ids
    wait_until(lambda: device.num_bytes < held / 100)


def test_one_that_sleeps_and_one_with_other_weights(tmp_path: Path) -> None:
    device = Device()
    llm = start()
    held = device.num_bytes
    llm.sleep(keep_weights=True)
    llm.close()
    assert device.num_bytes < held / 100
    llm = start()
    llm.update_weights(FIXTURES / "llama", version="same")
    llm.generate([IDS], SHORT, use_tqdm=False)
    llm.close()
    assert device.num_bytes < held / 100
    with pytest.raises(EngineStopped, match="was closed"):
        llm.update_weights(FIXTURES / "llama", version="two")
    assert device.num_bytes < held / 100


def test_one_that_died() -> None:
    device = Device()
    llm = start()
    held = device.num_bytes
    llm._engine.fail(RuntimeError("injected"))
    llm.close()
    assert device.num_bytes < held / 100


async def test_shutdown() -> None:
    device = Device()
    llm = AsyncLLM.from_config(None, {**SETTINGS}, progress=False)
    held = device.num_bytes
    stream: Any = llm.generate(IDS, LONG)
    await anext(stream)
    await llm.shutdown(drain_s=0)
    assert held > 100_000 and device.num_bytes < held / 100
    with pytest.raises(EngineStopped):
        await anext(llm.generate(IDS, SHORT))
    for again in (llm.update_weights(FIXTURES / "llama", version="x"), llm.sleep(), llm.wake_up()):
        with pytest.raises(EngineStopped):
            await again
    assert device.num_bytes < held / 100
    await llm.shutdown()


def test_pictures() -> None:
    device = Device()
    with LLM("demo-vision", max_model_len=256, num_gpu_blocks_override=32, progress=False) as llm:
        held = device.num_bytes
    assert llm.model_name == "demo-vision" and device.num_bytes < held / 100
