"""`StepPlan`: all that the device is told of one step, as a value.

Owns the plan and result types and their JSON form. Refuses to decide anything: policies fill plans, runners execute
them. A plan is the only seam between the two, so the same value drives the device, a fake runner, the simulator, a
log, a replay, and on several hosts a broadcast.

Rules that an executor may rely on:
  * Steps are executed in the order of `step_id`; within a step: `freed_rows`, `setups`, `grants`, `copies`, then the
    forward pass of `decode_rows` and `chunks`. A page freed after step i was planned can therefore be granted in
    step i+1 even while step i still runs: the device orders the writes.
  * Page 0 is the dummy page: never granted, the target of padding.
  * A row belongs to one sequence from its `RowSetup` until it stands in `freed_rows`.
  * A row that draws under a mask draws a token of it. The mask holds for this step alone.
  * `decode_rows` read their input token from the device (`last_token[row]`), `chunks` carry theirs.
  * A burst (`num_steps` above 1) is so many steps of its decode rows in one launch. Each row feeds what it drew last,
    until it has taken its steps or what it would feed has ended it: a stop id, with more than `min_tokens` drawn. A row
    whose end was drawn by an earlier plan takes none. It has no chunks and no masks, and its grants cover all steps.
"""

import base64
import dataclasses
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxserve.api import SamplingParams, TokenLogprobs

__all__ = ["Bucket", "Chunk", "Limits", "PageCopy", "PageGrant", "RowMask", "RowSetup", "StepPlan", "StepResult"]

DUMMY_PAGE = 0


class Bucket(NamedTuple):
    """One compiled step shape: room for `tokens` flat tokens of `rows` rows.

    `decode_only` buckets take one token per row (tokens == rows) and no chunk.
    """

    tokens: int
    rows: int
    decode_only: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """All that a policy may know of the device.

    Attributes:
      max_rows: rows that can run at once.
      num_pages: pages that can be granted (the dummy page not counted); ids 1..num_pages.
      page_size: tokens a page holds.
      max_model_len: tokens a sequence may have, prompt and output.
      buckets: compiled shapes, ascending; a plan must fit one of them. Later limits of the same device may have more,
        never fewer, and the largest are there from the start: what fits these fits those, and what fits those fits
        these, perhaps with more padding.
      max_burst: steps that one launch may hold; 1: the device has no bursts.
      max_mixed_tokens: tokens of a step in which prompts stand beside rows that decode, so that it takes those not
        much longer than one without; None: no limit. A scheduler may know better; every plan that fits a bucket runs.
    """

    max_rows: int
    num_pages: int
    page_size: int
    max_model_len: int
    buckets: tuple[Bucket, ...]
    max_burst: int = 1
    max_mixed_tokens: int | None = None

    def with_buckets(self, buckets: Iterable[Bucket]) -> "Limits":
        """The same, with another list of buckets, in any order."""
        return dataclasses.replace(self, buckets=tuple(sorted(buckets)))

    @property
    def max_step_tokens(self) -> int:
        """Tokens of the largest bucket."""
        return max(b.tokens for b in self.buckets)

    def find_bucket(self, num_tokens: int, num_rows: int, decode_only: bool) -> Bucket | None:
        """The cheapest bucket that holds the step, or None. A decode-only step may run in a mixed bucket."""
        fitting = [
            b
            for b in self.buckets
            if b.tokens >= num_tokens and b.rows >= num_rows and (decode_only or not b.decode_only)
        ]
        return min(fitting, key=lambda b: (b.tokens, b.rows, not b.decode_only), default=None)

    def bucket_of(self, plan: "StepPlan") -> Bucket | None:
        """The bucket that runs `plan`, or None. Bursts are compiled for the buckets of decode steps alone."""
        if plan.num_steps == 1:
            return self.find_bucket(plan.num_tokens, plan.num_rows, plan.decode_only)
        if plan.num_steps > self.max_burst or not plan.decode_only:
            return None
        return min((b for b in self.buckets if b.decode_only and b.rows >= plan.num_rows), default=None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowSetup:
    """A row is given to a sequence. Carries all the per-row state of sampling.

    `seed` is the sequence's own (already distinct for each of the n sequences). `prompt_len` tells prompt from output
    when a preempted sequence is computed again: tokens from `prompt_len` on count as output for penalties.
    `token_ids` are the tokens known so far (prompt, then output after a preemption).
    """

    row: int
    request_id: str
    index: int
    seed: int
    prompt_len: int
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    bad_word_ids: tuple[tuple[int, ...], ...]


class PageGrant(NamedTuple):
    """Columns [first, first + len(page_ids)) of the row's block table become `page_ids`."""

    row: int
    first: int
    page_ids: tuple[int, ...]


class PageCopy(NamedTuple):
    """Copy-on-write: all bytes of page `source` go to page `target`, in every layer."""

    source: int
    target: int


class Chunk(NamedTuple):
    """Tokens of one row whose values the host knows: a piece of a prompt, or of a recomputation.

    `start` is the position of the first token. `sample` is True for the last piece: it yields a token.
    `prompt_logprobs` asks for log-probabilities of the tokens that follow each of these, `pool` for the sum of their
    final hidden states.
    """

    row: int
    start: int
    token_ids: tuple[int, ...]
    sample: bool
    prompt_logprobs: bool = False
    pool: bool = False


class RowMask(NamedTuple):
    """The tokens that `row` may draw in this step: one bit each, lowest first, in base64."""

    row: int
    bits: str

    @classmethod
    def of(cls, row: int, mask: bytes) -> "RowMask":
        return cls(row, base64.b64encode(mask).decode())

    @property
    def mask(self) -> bytes:
        """Whole little-endian 32-bit words; tokens beyond their end are forbidden."""
        return base64.b64decode(self.bits)

    def allows(self, token_id: int) -> bool:
        mask = self.mask
        return token_id >> 3 < len(mask) and bool(mask[token_id >> 3] >> (token_id & 7) & 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. Rows of the batch are `decode_rows` first, then one per chunk, in this order.

    `decode_positions[i]` is the position of the token that `decode_rows[i]` feeds (= tokens already in its pages).
    `masks` are put in by the engine, one for each row that draws under `SamplingParams.structured`.
    `num_steps` above 1 makes it a burst, in which `decode_rows[i]` takes `row_steps[i]` of the steps, 1 or more; all of
    them where `row_steps` is empty.
    """

    step_id: int
    decode_rows: tuple[int, ...] = ()
    decode_positions: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    setups: tuple[RowSetup, ...] = ()
    grants: tuple[PageGrant, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    freed_rows: tuple[int, ...] = ()
    masks: tuple[RowMask, ...] = ()
    num_steps: int = 1
    row_steps: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, padding left out; of a burst, those of its first step."""
        return len(self.decode_rows) + sum(len(c.token_ids) for c in self.chunks)

    @property
    def num_fed(self) -> int:
        """Tokens of all its steps, if no row ends before it has taken its own; `num_tokens` but for a burst."""
        return self.num_tokens if self.num_steps == 1 else sum(self.steps_of_rows)

    @property
    def steps_of_rows(self) -> tuple[int, ...]:
        """What each of `decode_rows` takes of the steps."""
        return self.row_steps or (self.num_steps,) * len(self.decode_rows)

    @property
    def num_rows(self) -> int:
        """Rows that take part in the step."""
        return len(self.decode_rows) + len(self.chunks)

    @property
    def decode_only(self) -> bool:
        """Each row feeds one token, which the device drew itself."""
        return not self.chunks

    @property
    def sampled_rows(self) -> tuple[int, ...]:
        """Rows that yield a token, in batch order: the order of `StepResult.token_ids`."""
        return self.decode_rows + tuple(c.row for c in self.chunks if c.sample)

    def to_json(self) -> str:
        """One line. `from_json(plan.to_json()) == plan`. What makes a burst is left out of all other plans."""
        fields = _fields_of(self)
        if not self.row_steps:
            del fields["row_steps"]
        if self.num_steps == 1:
            del fields["num_steps"]
        return json.dumps(fields, default=_fields_of, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> "StepPlan":
        """The plan that `to_json` wrote."""
        return cls.from_fields(json.loads(line))

    @classmethod
    def from_fields(cls, raw: dict[str, Any]) -> "StepPlan":
        """The plan of a JSON object, already parsed: for lines that hold more than a plan."""
        return cls(
            step_id=raw["step_id"],
            decode_rows=tuple(raw["decode_rows"]),
            decode_positions=tuple(raw["decode_positions"]),
            chunks=tuple(Chunk(row, start, tuple(ids), *asks) for row, start, ids, *asks in raw["chunks"]),
            setups=tuple(_setup_from_json(s) for s in raw["setups"]),
            grants=tuple(PageGrant(row, first, tuple(ids)) for row, first, ids in raw["grants"]),
            copies=tuple(PageCopy(*c) for c in raw["copies"]),
            freed_rows=tuple(raw["freed_rows"]),
            masks=tuple(RowMask(*m) for m in raw["masks"]),
            num_steps=raw.get("num_steps", 1),
            row_steps=tuple(raw.get("row_steps", ())),
        )


def _fields_of(value: Any) -> dict[str, Any]:
    """For `json`, which knows tuples and asks about dataclasses. `asdict` copies each number: milliseconds a step."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _setup_from_json(raw: dict[str, Any]) -> RowSetup:
    sampling = dict(raw.pop("sampling"))
    return RowSetup(
        **{
            **raw,
            "token_ids": tuple(raw["token_ids"]),
            "stop_token_ids": tuple(raw["stop_token_ids"]),
            "bad_word_ids": tuple(tuple(w) for w in raw["bad_word_ids"]),
            "sampling": SamplingParams(**sampling),
        }
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What came back from the device for one plan.

    Attributes:
      token_ids: one per `StepPlan.sampled_rows`, in that order. Of a burst: those of its first step, then those of its
        second, and so on; in each the rows that took it, in that order.
      logprobs: the same length, entries None for rows that did not ask; None when no row asked.
      prompt_logprobs: row -> one entry per token of its chunk whose successor lies in the prompt.
      hidden_sums: row -> sum of the final hidden states [D] of the tokens of its chunk, where the plan asks to pool.
      counts: of a burst, how many steps each of `sampled_rows` took: fewer than planned if it ended; None otherwise.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None
    hidden_sums: dict[int, list[float]] | None = None
    counts: list[int] | None = None
