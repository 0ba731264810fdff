"""vLLM through `LLM`'s engine in this process: requests handed in, then step after step.

vLLM's own processes are not used: with two cores they would take one from the model, and the step loop is what vLLM's
offline API runs.
"""

import os
import time
from typing import Any

from peers.values import Answer, Ask, Settings

_GIB = 2**30


def _set_environment(settings: Settings) -> None:
    """vLLM reads these when it is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    if settings.device == "cpu":
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, settings.kv_bytes // _GIB))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = settings.overrides.get("bind", f"0-{settings.threads - 1}")


class Engine:
    """One engine of vLLM. `Settings.overrides["draft_tokens"]`: that its `ngram` may propose in a step, 0 for none."""

    def __init__(self, settings: Settings) -> None:
        _set_environment(settings)
        import torch
        import vllm

        eager = bool(settings.overrides.get("eager", False))
        drafts = int(settings.overrides.get("draft_tokens", 0))
        lookup = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
        room = {} if settings.device == "cpu" else {"gpu_memory_utilization": settings.memory_share}
        options: dict[str, Any] = {
            "dtype": settings.dtype,
            "max_model_len": settings.max_len,
            "max_num_seqs": max(settings.max_requests, 16),
            "enforce_eager": eager,
            "load_format": "dummy" if settings.random_weights else "auto",
            **({"speculative_config": lookup} if drafts else {}),
            **room,
        }
        llm = vllm.LLM(settings.model, skip_tokenizer_init=True, seed=0, **options)
        self._engine = llm.llm_engine
        self._sampling = vllm.SamplingParams
        self._num_runs = 0
        self.about = {
            "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
            "settings": {**options, "threads": torch.get_num_threads()},
            "device": torch.cuda.get_device_name() if settings.device == "gpu" else "cpu",
        }

    def run(self, asks: list[Ask]) -> list[Answer]:
        self._num_runs += 1
        waiting = sorted(enumerate(asks), key=lambda pair: pair[1].due_s, reverse=True)
        tokens: list[list[int]] = [[] for _ in asks]
        times_s: list[list[float]] = [[] for _ in asks]
        start_s = time.perf_counter()
        while waiting or self._engine.has_unfinished_requests():
            now_s = time.perf_counter() - start_s
            while waiting and waiting[-1][1].due_s <= now_s:
                self._add(*waiting.pop())
            if not self._engine.has_unfinished_requests():
                time.sleep(waiting[-1][1].due_s - now_s)
                continue
            outputs = self._engine.step()
            now_s = time.perf_counter() - start_s
            for output in outputs:
                index = int(output.request_id.split("/")[1].split("-")[0])
                new = list(output.outputs[0].token_ids)
                tokens[index] += new
                times_s[index] += [now_s] * len(new)
        return [Answer(tokens=tuple(t), times_s=tuple(s)) for t, s in zip(tokens, times_s, strict=True)]

    def _add(self, index: int, ask: Ask) -> None:
        from vllm.sampling_params import RequestOutputKind

        sampling = self._sampling(
            temperature=0.0,
            max_tokens=ask.num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(f"{self._num_runs}/{index}", {"prompt_token_ids": list(ask.prompt)}, sampling)
