"""HF transformers' continuous batching: requests join and leave a running batch, keys and values lie in pages.

Its manager has a thread of its own, so there is no loop here.
"""

import threading
import time
from typing import Any

from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from peers.engine_hf import load_model, make_about
from peers.values import Answer, Ask, Settings

_PAGE = 256  # transformers' default
_STEP_TOKENS = 512  # on a CPU; its own default allows 8192, whose mask over all pages costs more than it saves


class Engine:
    """One manager that lives as long as the model."""

    def __init__(self, settings: Settings) -> None:
        model = load_model(settings)
        if settings.device == "cpu":
            sizes: dict[str, Any] = {
                "num_blocks": settings.max_requests * -(-settings.max_len // _PAGE),  # all requests, at their longest
                "max_batch_tokens": _STEP_TOKENS,
            }
        else:
            sizes = {"max_memory_percent": 0.8 * settings.memory_share}
        sizes["default_compile_level"] = int(settings.overrides.get("compile", 0))
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(page_size=_PAGE, **sizes),
        )
        if settings.device == "gpu":
            self._manager.warmup()
        self._manager.start()
        self._num_runs = 0
        self.about = make_about(model, settings, {"page_size": _PAGE, **sizes})

    def run(self, asks: list[Ask]) -> list[Answer]:
        self._num_runs += 1
        names = [f"{self._num_runs}-{index}" for index in range(len(asks))]
        start_s = time.perf_counter()
        feeder = threading.Thread(target=self._feed, args=(asks, names, start_s))
        feeder.start()
        found: dict[str, Any] = {}
        while len(found) < len(asks):
            result = self._manager.get_result(timeout=1.0)
            if result is not None:
                if result.error is not None:
                    raise RuntimeError(result.error)
                found[result.request_id] = result
            elif not self._manager.is_running():
                raise RuntimeError("the manager's thread has ended")
        feeder.join()
        return [
            Answer(
                tokens=tuple(found[name].generated_tokens),
                times_s=tuple(time_s - start_s for time_s in found[name].timestamps),
            )
            for name in names
        ]

    def _feed(self, asks: list[Ask], names: list[str], start_s: float) -> None:
        for ask, name in sorted(zip(asks, names, strict=True), key=lambda pair: pair[0].due_s):
            time.sleep(max(0.0, start_s + ask.due_s - time.perf_counter()))
            self._manager.add_request(
                list(ask.prompt), request_id=name, max_new_tokens=ask.num_tokens, record_timestamps=True
            )
