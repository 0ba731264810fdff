"""llama.cpp through llama-cpp-python's `Llama`, one request at a time, with its own speculation if asked for.

`LlamaPromptLookupDecoding` proposes what followed the last one or two tokens earlier in the sequence.
"""

import itertools
import time
from pathlib import Path

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from peers.values import Answer, Ask, Settings


class Engine:
    """Float32 weights and caches. `Settings.overrides["draft_tokens"]`: proposed in a step, 0 for none."""

    def __init__(self, settings: Settings) -> None:
        drafts = settings.overrides["draft_tokens"]
        options = {
            "n_ctx": settings.max_len,
            "n_threads": settings.threads,
            "n_threads_batch": settings.threads,
            "type_k": llama_cpp.GGML_TYPE_F32,
            "type_v": llama_cpp.GGML_TYPE_F32,
            "flash_attn": True,
        }
        self._llm = llama_cpp.Llama(
            str(Path(settings.model).with_suffix(".f32.gguf")),
            logits_all=bool(drafts),  # it needs them, and does not make room for them by itself
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=drafts) if drafts else None,
            verbose=False,
            **options,
        )
        self.about = {
            "versions": {"llama_cpp_python": llama_cpp.__version__},
            "settings": options | {"draft_tokens": drafts},
            "device": "cpu",
        }

    def run(self, asks: list[Ask]) -> list[Answer]:
        return [self._answer(ask) for ask in asks]

    def _answer(self, ask: Ask) -> Answer:
        self._llm.reset()
        start_s, tokens, times_s = time.perf_counter(), [], []
        for token in itertools.islice(self._llm.generate(list(ask.prompt), temp=0.0), ask.num_tokens):
            tokens.append(int(token))
            times_s.append(time.perf_counter() - start_s)
        return Answer(tokens=tuple(tokens), times_s=tuple(times_s))
