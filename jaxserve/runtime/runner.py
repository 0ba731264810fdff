"""The device's side of a plan: pack, transfer, launch.

Owns the arrays of the device and the compiled executables. Refuses policy: it executes plans in order and would
rather fail than compile. Runs on the engine's loop thread alone.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxserve.api import TokenLogprobs
from jaxserve.errors import MissingBucket
from jaxserve.runtime.pack import Layout, following_tokens, pack, split_grants
from jaxserve.runtime.row_state import NUM_ROW_FIELDS, encode_row, encode_row_state, needs_row_state
from jaxserve.runtime.sampling import Logprobs
from jaxserve.runtime.step import DeviceState, StepOutput
from jaxserve.sched.plan import Bucket, Limits, PageCopy, RowSetup, StepPlan, StepResult

COPY_SLOTS = 16  # page copies of one launch; more take several
TABLE_SLOTS = 1024  # block table entries of one `write_tables` launch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Executables:
    """What `runtime.build` compiled. Nothing is ever added."""

    steps: Mapping[Bucket, jax.stages.Compiled]
    copy_pages: jax.stages.Compiled
    write_tables: jax.stages.Compiled
    configure_row: jax.stages.Compiled


class DeviceRunner:
    """A `sched.base.Runner` on JAX devices. Mutated by the thread that dispatches."""

    def __init__(
        self,
        *,
        limits: Limits,
        layouts: Mapping[Bucket, Layout],
        executables: Executables,
        weights: Any,
        state: DeviceState,
        vocab_size: int,
        buffer_sharding: jax.sharding.Sharding,
    ) -> None:
        self._limits = limits
        self._layouts = layouts
        self._executables = executables
        self._weights = weights
        self._state = state
        self._vocab_size = vocab_size
        self._buffer_sharding = buffer_sharding
        self._row_params = np.zeros((limits.max_rows + 1, NUM_ROW_FIELDS), np.int32)
        self._row_logprobs: dict[int, int] = {}  # row -> alternatives asked for
        self._row_prompt_logprobs: dict[int, int] = {}
        self._row_prompts: dict[int, np.ndarray] = {}

    @property
    def limits(self) -> Limits:
        return self._limits

    def dispatch(self, plan: StepPlan) -> "DeviceInFlight":
        """Launches the step and returns at once. Raises MissingBucket when no compiled shape fits."""
        bucket = self._limits.find_bucket(plan.num_tokens, plan.num_rows, plan.decode_only)
        if bucket is None or bucket not in self._executables.steps:
            raise MissingBucket(
                f"step {plan.step_id} has {plan.num_tokens} tokens of {plan.num_rows} rows; compiled are "
                f"{', '.join(f'{b.tokens}x{b.rows}' for b in self._limits.buckets)}; nothing compiles after start"
            )
        for row in plan.freed_rows:
            self._forget(row)
        for setup in plan.setups:
            self._set_up(setup)
        layout = self._layouts[bucket]
        grants, rest = split_grants(plan.grants, layout.max_grants)
        if rest:
            self._write_tables(rest)
        if plan.copies:
            self._copy_pages(plan.copies)
        buffer = jax.device_put(pack(plan, layout, self._row_params, self._row_prompts, grants), self._buffer_sharding)
        output, self._state = self._executables.steps[bucket](self._weights, self._state, buffer)
        return self._in_flight(plan, output)

    def _in_flight(self, plan: StepPlan, output: StepOutput) -> "DeviceInFlight":
        sampled = tuple(range(len(plan.decode_rows))) + tuple(
            i for i, chunk in enumerate(plan.chunks, start=len(plan.decode_rows)) if chunk.sample
        )
        logprobs: tuple[int | None, ...] = ()
        if self._row_logprobs:
            logprobs = tuple(self._row_logprobs.get(row) for row in plan.sampled_rows)
        prompts: list[_PromptSpan] = []
        at = len(plan.decode_rows)
        for chunk in plan.chunks:
            if chunk.prompt_logprobs:
                targets = following_tokens(chunk, self._row_prompts[chunk.row])
                prompts.append(_PromptSpan(chunk.row, at, targets, self._row_prompt_logprobs[chunk.row]))
            at += len(chunk.token_ids)
        return DeviceInFlight(output, sampled, logprobs, tuple(prompts))

    def _set_up(self, setup: RowSetup) -> None:
        row = setup.row
        self._forget(row)
        self._row_params[row] = encode_row(setup)
        if setup.sampling.logprobs is not None:
            self._row_logprobs[row] = setup.sampling.logprobs
        if setup.sampling.prompt_logprobs is not None:
            self._row_prompt_logprobs[row] = setup.sampling.prompt_logprobs
            self._row_prompts[row] = np.asarray(setup.token_ids[: setup.prompt_len], np.int32)
        if needs_row_state(setup):
            payload = self._put(encode_row_state(setup, self._vocab_size))
            self._state = self._executables.configure_row(self._state, self._put(np.int32(row)), payload)

    def _forget(self, row: int) -> None:
        self._row_params[row] = 0
        self._row_logprobs.pop(row, None)
        self._row_prompt_logprobs.pop(row, None)
        self._row_prompts.pop(row, None)

    def _write_tables(self, entries: list[tuple[int, int, int]]) -> None:
        for start in range(0, len(entries), TABLE_SLOTS):
            block = np.full((TABLE_SLOTS, 3), (self._limits.max_rows, 0, 0), np.int32)
            part = entries[start : start + TABLE_SLOTS]
            block[: len(part)] = part
            self._state = self._executables.write_tables(self._state, self._put(block))

    def _copy_pages(self, copies: tuple[PageCopy, ...]) -> None:
        for start in range(0, len(copies), COPY_SLOTS):
            block = np.zeros((COPY_SLOTS, 2), np.int32)
            part = copies[start : start + COPY_SLOTS]
            block[: len(part)] = part
            self._state = self._executables.copy_pages(self._state, self._put(block))

    def _put(self, array: np.ndarray | np.int32) -> jax.Array:
        return jax.device_put(array, self._buffer_sharding)


@dataclasses.dataclass(frozen=True, slots=True)
class _PromptSpan:
    """Where a chunk's prompt log-probabilities lie: tokens [start, start + len(targets)) of the step."""

    row: int
    start: int
    targets: np.ndarray
    num_top: int


class DeviceInFlight:
    """A launched step. `result` may be called once."""

    __slots__ = ("_logprobs", "_output", "_prompts", "_sampled")

    def __init__(
        self,
        output: StepOutput,
        sampled: tuple[int, ...],
        logprobs: tuple[int | None, ...],
        prompts: tuple[_PromptSpan, ...],
    ) -> None:
        self._output = output
        self._sampled = sampled
        self._logprobs = logprobs
        self._prompts = prompts
        output.token_ids.copy_to_host_async()  # on its way while the host plans the next step

    def result(self) -> StepResult:
        """Waits for the step and reads what was asked for."""
        token_ids = np.asarray(self._output.token_ids)[list(self._sampled)].tolist()
        logprobs = None
        if any(k is not None for k in self._logprobs):
            logprobs = self._read_logprobs(token_ids)
        prompt_logprobs = {span.row: self._read_prompt(span) for span in self._prompts} if self._prompts else None
        return StepResult(token_ids=token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _read_logprobs(self, token_ids: list[int]) -> list[TokenLogprobs | None]:
        logprobs = _to_host(self._output.logprobs, slice(None))
        return [
            None if num_top is None else _entry(logprobs, i, token_id, num_top)
            for token_id, i, num_top in zip(token_ids, self._sampled, self._logprobs, strict=True)
        ]

    def _read_prompt(self, span: _PromptSpan) -> list[TokenLogprobs]:
        assert self._output.prompt is not None, "a decode step has no prompt tokens"
        logprobs = _to_host(self._output.prompt, slice(span.start, span.start + len(span.targets)))
        return [_entry(logprobs, i, int(target), span.num_top) for i, target in enumerate(span.targets)]


def _to_host(logprobs: Logprobs, where: slice) -> Logprobs:
    return jax.tree.map(lambda a: np.asarray(a)[where], logprobs)


def _entry(logprobs: Logprobs, i: int, token_id: int, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(
        token_id,
        float(logprobs.logprob[i]),
        int(logprobs.rank[i]),
        tuple(logprobs.top_ids[i, :num_top].tolist()),
        tuple(logprobs.top_logprobs[i, :num_top].tolist()),
    )
