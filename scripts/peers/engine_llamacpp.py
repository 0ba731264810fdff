"""llama.cpp through its C API: continuous batching over many sequences, as its server does it.

Each step has one token of each running sequence, then prompts as far as the batch has room; tokens are the greedy
choice from the logits. A prompt that begins as a running one does takes that one's keys and values over
(`llama_memory_seq_cp`); it waits while they are still being computed.
"""

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import numpy as np

from peers.values import AS_PUBLISHED, Answer, Ask, Settings

_BATCH = 512  # tokens of a step; more only delays the sequences that already run
_MIN_SHARED = 32  # tokens; shorter beginnings are not worth a copy
_TYPES = {"float32": ("f32", llama_cpp.GGML_TYPE_F32), "bfloat16": ("bf16", llama_cpp.GGML_TYPE_F16)}
_TYPES["q8_0"] = ("q8_0", llama_cpp.GGML_TYPE_F16)  # keys and values: float16 is llama.cpp's default
_TYPES[AS_PUBLISHED] = (AS_PUBLISHED, llama_cpp.GGML_TYPE_F16)


class _Row:
    """One sequence on its way. Mutated by `_Run` only."""

    def __init__(self, index: int, ask: Ask, number: int) -> None:
        self.index, self.ask, self.number = index, ask, number
        self.num_done = 0  # tokens of the prompt whose keys and values are there
        self.tokens: list[int] = []
        self.times_s: list[float] = []


class Engine:
    """A model and one context."""

    def __init__(self, settings: Settings) -> None:
        suffix, cache_type = _TYPES[settings.dtype]
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        path = Path(settings.model)
        if settings.dtype != AS_PUBLISHED:
            path = path.with_suffix(f".{suffix}.gguf")
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not model:
            raise FileNotFoundError(f"llama.cpp cannot load {path}")
        flash = llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO  # a third faster here at 16 streams, and a little less exact
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = settings.max_requests * settings.max_len
        params.n_batch = params.n_ubatch = _BATCH
        params.n_seq_max = settings.max_requests
        params.n_threads = params.n_threads_batch = settings.threads
        params.type_k = params.type_v = cache_type
        params.kv_unified = True  # a cache for each sequence cuts batches up: a quarter of the speed at 16 streams
        params.flash_attn_type = flash
        params.no_perf = True
        self.context = llama_cpp.llama_init_from_model(model, params)
        if not self.context:
            raise MemoryError(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.max_rows = settings.max_requests
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.batch = _Batch()
        self.about = {
            "versions": {"llama_cpp_python": llama_cpp.__version__},
            "settings": {
                "weights": suffix,
                "keys_values": "f32" if cache_type == llama_cpp.GGML_TYPE_F32 else "f16",
                "threads": settings.threads,
                "n_batch": _BATCH,
                "n_ctx": params.n_ctx,
                "kv_unified": True,
                "flash_attention": flash,
                "system": llama_cpp.llama_print_system_info().decode(),
            },
            "device": "cpu",
        }

    def run(self, asks: list[Ask]) -> list[Answer]:
        return _Run(self, asks).finish()


class _Batch:
    """A `llama_batch` whose columns are arrays. Filled from the front, then decoded."""

    def __init__(self) -> None:
        self.tokens, self.positions, self.numbers, counts = (np.zeros(_BATCH, np.int32) for _ in range(4))
        self.wanted = np.zeros(_BATCH, np.int8)
        counts[:] = 1
        self._counts = counts
        pointer = ctypes.POINTER(ctypes.c_int32)
        step, base = self.numbers.itemsize, self.numbers.ctypes.data
        self._number_pointers = (pointer * _BATCH)(
            *(ctypes.cast(base + index * step, pointer) for index in range(_BATCH))
        )
        self.size = 0

    def add(self, number: int, tokens: tuple[int, ...] | list[int], position: int, wanted: bool) -> None:
        """Tokens of one sequence from `position` on; logits are wanted of none but the last."""
        part = slice(self.size, self.size + len(tokens))
        self.tokens[part] = tokens
        self.positions[part] = np.arange(position, position + len(tokens))
        self.numbers[part] = number
        self.wanted[part] = 0
        self.wanted[part.stop - 1] = wanted
        self.size = part.stop

    def decode(self, context: ctypes.c_void_p) -> None:
        def at(array: np.ndarray, kind: type) -> "ctypes._Pointer":
            return array.ctypes.data_as(ctypes.POINTER(kind))

        batch = llama_cpp.llama_batch(
            n_tokens=self.size,
            token=at(self.tokens, ctypes.c_int32),
            pos=at(self.positions, ctypes.c_int32),
            n_seq_id=at(self._counts, ctypes.c_int32),
            seq_id=self._number_pointers,
            logits=at(self.wanted, ctypes.c_int8),
        )
        status = llama_cpp.llama_decode(context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode: status {status} for {self.size} tokens")


class _Run:
    """All requests of one call of `Engine.run`."""

    def __init__(self, engine: Engine, asks: list[Ask]) -> None:
        self._engine, self._asks = engine, asks
        self._start_s = time.perf_counter()
        self._waiting = sorted(range(len(asks)), key=lambda index: asks[index].due_s)
        self._free = list(range(engine.max_rows))
        self._rows: list[_Row] = []
        self._answers: dict[int, Answer] = {}

    def finish(self) -> list[Answer]:
        while self._waiting or self._rows:
            self._admit()
            if self._rows:
                self._step()
            else:
                due_s = self._asks[self._waiting[0]].due_s
                time.sleep(max(0.0, self._start_s + due_s - time.perf_counter()))
        return [self._answers[index] for index in range(len(self._asks))]

    def _admit(self) -> None:
        now_s = time.perf_counter() - self._start_s
        held = []
        while self._waiting and self._free and self._asks[self._waiting[0]].due_s <= now_s:
            index = self._waiting.pop(0)
            row = _Row(index, self._asks[index], self._free[-1])
            source, length = self._same_beginning(row.ask.prompt)
            if source is not None and source.num_done < length:
                held.append(index)
                continue
            if source is not None:
                llama_cpp.llama_memory_seq_cp(self._engine.memory, source.number, row.number, 0, length)
                row.num_done = length
            self._free.pop()
            self._rows.append(row)
        self._waiting = held + self._waiting

    def _same_beginning(self, prompt: tuple[int, ...]) -> tuple[_Row | None, int]:
        """The running row that shares most with `prompt`, and how much: at least one token is left to compute."""
        best, longest = None, _MIN_SHARED - 1
        for row in self._rows:
            if row.ask.prompt[:_MIN_SHARED] != prompt[:_MIN_SHARED]:
                continue
            length = min(_num_equal(row.ask.prompt, prompt), len(prompt) - 1)
            if length > longest:
                best, longest = row, length
        return best, longest if best is not None else 0

    def _step(self) -> None:
        batch = self._engine.batch
        batch.size = 0
        ready = list(self._fill(batch))
        batch.decode(self._engine.context)
        logits = llama_cpp.llama_get_logits(self._engine.context)
        table = np.ctypeslib.as_array(logits, (max(len(ready), 1), self._engine.vocab))
        chosen = table.argmax(-1).tolist() if ready else []
        now_s = time.perf_counter() - self._start_s
        for row, token in zip(ready, chosen, strict=True):
            row.tokens.append(token)
            row.times_s.append(now_s)
            if len(row.tokens) == row.ask.num_tokens:
                self._rows.remove(row)
                self._free.append(row.number)
                llama_cpp.llama_memory_seq_rm(self._engine.memory, row.number, -1, -1)
                self._answers[row.index] = Answer(tokens=tuple(row.tokens), times_s=tuple(row.times_s))

    def _fill(self, batch: _Batch) -> Iterator[_Row]:
        """Rows that get a token from this batch, in the order of their logits."""
        for row in self._rows:
            if row.tokens:
                batch.add(row.number, row.tokens[-1:], len(row.ask.prompt) + len(row.tokens) - 1, True)
                yield row
        for row in self._rows:
            if not row.tokens and batch.size < _BATCH:
                piece = row.ask.prompt[row.num_done : row.num_done + _BATCH - batch.size]
                last = row.num_done + len(piece) == len(row.ask.prompt)
                batch.add(row.number, piece, row.num_done, last)
                row.num_done += len(piece)
                if last:
                    yield row


def _num_equal(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(np.asarray(a[:length]) != np.asarray(b[:length]))
    return int(different[0]) if len(different) else length
