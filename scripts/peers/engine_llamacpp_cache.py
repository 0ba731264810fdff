"""llama.cpp with a cache of prompts in host memory, as its server keeps it, for one request at a time.

The context has one sequence. A prompt that begins as the last one did goes on. Else the stored state with the
longest common beginning is put in its place, and that of the last request is stored; stored states give way, the least
recently used first, so that all take no more than `Settings.kv_bytes`.

The first of an answer's tokens is no token but the number of those of the prompt that were not computed, at time 0.
"""

import collections
import ctypes
import time

import llama_cpp
import numpy as np

from peers.engine_llamacpp import Engine as Continuous
from peers.values import Answer, Ask, Settings

_BATCH = 512


class Engine:
    """A model, one context and the stored states."""

    def __init__(self, settings: Settings) -> None:
        inner = Continuous(settings)
        self._inner = inner
        self._context, self._memory, self._batch = inner.context, inner.memory, inner.batch
        self._vocab = inner.vocab
        self._room = settings.kv_bytes
        self._tokens: list[int] = []  # whose keys and values the context has
        self._states: collections.OrderedDict[tuple[int, ...], ctypes.Array] = collections.OrderedDict()
        self.about = inner.about

    def run(self, asks: list[Ask]) -> list[Answer]:
        return [self._answer(ask) for ask in asks]

    def _answer(self, ask: Ask) -> Answer:
        begin_s = time.perf_counter()
        prompt = list(ask.prompt)
        kept = min(self._prepare(prompt), len(prompt) - 1)
        llama_cpp.llama_memory_seq_rm(self._memory, 0, kept, -1)
        self._tokens = prompt[:kept]
        tokens, times_s = [kept], [0.0]
        todo = prompt[kept:]
        while len(tokens) <= ask.num_tokens:
            while todo:
                piece, todo = todo[:_BATCH], todo[_BATCH:]
                self._batch.size = 0
                self._batch.add(0, piece, len(self._tokens), not todo)
                self._batch.decode(self._context)
                self._tokens += piece
            logits = llama_cpp.llama_get_logits_ith(self._context, -1)
            best = int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())
            tokens.append(best)
            times_s.append(time.perf_counter() - begin_s)
            todo = [best]
        return Answer(tokens=tuple(tokens), times_s=tuple(times_s))

    def _prepare(self, prompt: list[int]) -> int:
        """Puts the best state into the context. Returns how many tokens of the prompt it has."""
        here = _num_equal(self._tokens, prompt)
        found = max(self._states, key=lambda tokens: _num_equal(tokens, prompt), default=())
        if _num_equal(found, prompt) <= here:
            if here < len(self._tokens) // 2:  # most of it would be lost
                self._store()
            return here
        self._store()
        state = self._states.pop(found)
        llama_cpp.llama_memory_seq_rm(self._memory, 0, -1, -1)
        if not llama_cpp.llama_state_seq_set_data(self._context, state, len(state), 0):
            raise RuntimeError("llama_state_seq_set_data: the state was not taken")
        return _num_equal(found, prompt)

    def _store(self) -> None:
        if not self._tokens:
            return
        size = llama_cpp.llama_state_seq_get_size(self._context, 0)
        state = (ctypes.c_uint8 * size)()
        llama_cpp.llama_state_seq_get_data(self._context, state, size, 0)
        self._states[tuple(self._tokens)] = state
        while sum(map(len, self._states.values())) > self._room:
            self._states.popitem(last=False)


def _num_equal(a: tuple[int, ...] | list[int], b: list[int]) -> int:
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
