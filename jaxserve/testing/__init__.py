"""A fake for every expensive thing: a runner, a tokenizer, a clock, a loop.

The fakes need no JAX, so that the whole path from a prompt to a stream runs in milliseconds in tests and notebooks.
`FakeRunner` is written to be obviously right, not fast, and fails at the first plan that breaks a rule of `sched.plan`.

The fake runner keeps the tokens themselves in its pages, where a device keeps keys and values. Where drafts were wrong,
it leaves numbers that are no tokens. The embeddings of a picture are numbers that follow from its digest, and what a
placeholder leaves in a page is the number that was in the encoder's pool. In the mode "context" the next token is a
hash of all tokens before it. Each token that a row can see is read back through its block tables and compared, so that
a page that was lost, shared wrongly or copied too late is found at once.
"""

import collections
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from jaxserve.api import FinishReason, PromptInfo, Request, SamplingParams, TokenEvent, TokenLogprobs
from jaxserve.errors import MissingBucket
from jaxserve.sched.base import InFlight, Runner, Scheduler
from jaxserve.sched.plan import (
    DUMMY_PAGE,
    NO_ENCODER,
    NO_SLOTS,
    Bucket,
    Chunk,
    Drafted,
    Encode,
    EncoderPool,
    HostSlots,
    Limits,
    PageGroup,
    RowMask,
    RowSetup,
    StepPlan,
    StepResult,
    reads_history,
)
from jaxserve.testing.parts import ByteTokenizer, ManualClock
from jaxserve.values.content import Picture, PlacedPicture

_POISON = -7_777  # where a draft was wrong

__all__ = [
    "ByteTokenizer",
    "FakeRunner",
    "ManualClock",
    "Output",
    "drive",
    "make_limits",
    "make_picture",
    "make_request",
]


def make_limits(
    *,
    max_rows: int = 4,
    num_pages: int = 32,
    page_size: int = 4,
    windows: Iterable[int | None] = (None,),
    max_model_len: int = 64,
    token_buckets: Iterable[int] = (8, 16, 32),
    mixed_rows: Mapping[int, int] | None = None,
    shapes: Iterable[tuple[int, int]] = (),
    slots: HostSlots = NO_SLOTS,
    encoder: EncoderPool = NO_ENCODER,
) -> Limits:
    """Small limits for tests: decode buckets in powers of two up to `max_rows`, mixed ones as given.

    A mixed bucket has min(tokens, max_rows) rows unless `mixed_rows` says otherwise. `shapes` are (width, rounds) of
    further decode buckets, of `max_rows` rows.
    """
    rows, decode = 1, []
    while rows < max_rows:
        decode.append(Bucket(rows, rows, True))
        rows *= 2
    decode.append(Bucket(max_rows, max_rows, True))
    mixed = [Bucket(t, (mixed_rows or {}).get(t, min(t, max_rows)), False) for t in token_buckets]
    limits = Limits(
        max_rows=max_rows,
        num_pages=num_pages,
        page_size=page_size,
        page_groups=tuple(map(PageGroup, windows)),
        max_model_len=max_model_len,
        buckets=tuple(sorted(decode + mixed)),
        slots=slots,
        encoder=encoder,
    )
    return with_shapes(limits, *shapes)


def with_shapes(limits: Limits, *shapes: tuple[int, int]) -> Limits:
    """The limits with a decode bucket for each (width, rounds) beside those that they have."""
    rows = limits.max_rows
    wide = [Bucket(rows * width, rows, True, width, rounds) for width, rounds in shapes]
    return limits.with_buckets((*limits.buckets, *wide))


def make_request(
    request_id: str,
    prompt: Iterable[int],
    max_tokens: int = 8,
    *,
    sampling: SamplingParams | None = None,
    seed: int = 0,
    stop: Iterable[int] = (),
    arrival_s: float = 0.0,
    priority: int = 0,
    salt: str = "",
    tenant: str = "",
    owner: str = "",
    owner_weight: float = 1.0,
    pictures: Iterable[PlacedPicture] = (),
) -> Request:
    """A request of token ids. `sampling` defaults to one greedy sequence."""
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=sampling or SamplingParams(temperature=0.0, max_tokens=max_tokens),
        max_tokens=max_tokens,
        seed=seed,
        stop_token_ids=frozenset(stop),
        arrival_s=arrival_s,
        priority=priority,
        cache_salt=salt,
        tenant=tenant,
        owner=owner,
        owner_weight=owner_weight,
        pictures=tuple(pictures),
    )


def make_picture(start: int, length: int, name: str) -> PlacedPicture:
    """A picture of four patches a token at these positions; those of equal names and lengths are equal."""
    digest = hashlib.sha256(f"{name} {length}".encode()).digest()
    return PlacedPicture(Picture(digest=digest, grid=(1, 4, length), num_tokens=length, pixels=b""), start)


def embeddings(digest: str, count: int) -> list[int]:
    """The numbers that stand for the embeddings of a picture; none of them is a token."""
    first = int(digest[:8], 16) << 32
    return [first + (1 << 31) + i for i in range(count)]


def seen_tokens(request: Request) -> list[int]:
    """The prompt as the model of `FakeRunner` sees it: embeddings in the place of placeholders."""
    seen = list(request.prompt_token_ids)
    for placed in request.pictures:
        seen[placed.start : placed.end] = embeddings(placed.picture.digest.hex(), placed.picture.num_tokens)
    return seen


class _Row:
    """State of a row that a device would keep. Mutated only by `FakeRunner`."""

    __slots__ = ("drafts", "known", "last_token", "length", "masks", "setup", "tables")

    def __init__(self, setup: RowSetup, num_groups: int) -> None:
        self.setup = setup
        self.known = self.seen(0, setup.token_ids)  # what the context must hold; chunks bring the rest
        self.tables: list[list[int]] = [
            [] for _ in range(num_groups)
        ]  # of each group; DUMMY_PAGE where no token to come can see the page
        self.length = -1  # tokens in the pages; unknown until the first chunk, which has its start
        self.last_token: int | None = None
        self.masks: list[RowMask] = []  # of this step, place by place; the first is that of the next token to draw
        self.drafts: tuple[int, ...] | None = None  # of the host in this step

    def seen(self, start: int, token_ids: Iterable[int]) -> list[int]:
        """Tokens from position `start` on, with the embeddings of pictures in the place of placeholders."""
        seen = list(token_ids)
        for picture in self.setup.pictures:
            for at, value in enumerate(embeddings(picture.digest, picture.length), start=picture.start - start):
                if 0 <= at < len(seen):
                    seen[at] = value
        return seen


class _Done:
    """An InFlight that was executed at dispatch; `result` returns the outcome, and tells that it was read."""

    __slots__ = ("_error", "_on_read", "_result")

    def __init__(self, result: StepResult, error: Exception | None, on_read: Callable[[], None]) -> None:
        self._result = result
        self._error = error
        self._on_read = on_read

    def result(self) -> StepResult:
        if self._error is not None:
            raise self._error
        self._on_read()
        return self._result


class FakeRunner:
    """A `Runner` that executes plans on lists and asserts every rule of `sched.plan`.

    Args:
      limits: of the device that it stands for.
      vocab_size: V, tokens are 0..V-1.
      mode: "count": the token after t is (t + 1) % V, which a test computes by hand; "context": a hash of the seed
        and of the whole context. Either way each token that a row can see must be in its pages.
      forced: (request id, index) -> {output position: token id}, to inject stop ids.
      draw_count: of the tokens that a plan lets a decode row draw, how many it draws.
      accept: in place of `draw_count`: (request id, index, position of the first draft, number of drafts) -> how many
        of the drafts of a round are drawn. The row then has rounds as on a device, and ends with a token that ends it.
      fail_at: step at which the device fails: "dispatch" raises there, "result" when the result is asked for.
      num_draining: of the pages that plans have saved, how many are on their way when a result is read.
      clock, step_s: let each step take time.
      plans: every plan executed, in order, when `keep_plans`.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        vocab_size: int = 256,
        mode: Literal["count", "context"] = "count",
        forced: Mapping[tuple[str, int], Mapping[int, int]] | None = None,
        draw_count: Callable[[int], int] = lambda most: most,
        accept: Callable[[str, int, int, int], int] | None = None,
        fail_at: tuple[int, Literal["dispatch", "result"]] | None = None,
        num_draining: Callable[[int], int] = lambda num_saved: 0,
        clock: ManualClock | None = None,
        step_s: float = 0.0,
        keep_plans: bool = True,
    ) -> None:
        self.vocab_size = vocab_size
        self.plans: list[StepPlan] = []
        self.num_steps = 0
        self.num_copies = 0
        self._limits = limits
        self._mode = mode
        self._forced = {} if forced is None else forced
        self._draw_count = draw_count
        self._accept = accept
        self._fail_at = fail_at
        self._clock = clock
        self._step_s = step_s
        self._keep_plans = keep_plans
        self._rows: dict[int, _Row] = {}
        self._pages: list[list[int | None]] = [[None] * limits.page_size for _ in range(limits.num_pages + 1)]
        self._num_users: collections.Counter[int] = collections.Counter()  # rows whose table holds the page
        self._last_step_id = -1
        self._slots: list[list[int | None]] = [[] for _ in range(limits.slots.num_slots)]
        # Slots that plans save into or load, until their results are read.
        self._saving: collections.Counter[int] = collections.Counter()
        self._loading: collections.Counter[int] = collections.Counter()
        self._num_draining = num_draining
        self.num_saves = self.num_loads = 0
        self._embeddings: list[list[int]] = [[] for _ in range(limits.encoder.num_pages + 1)]  # of each page
        self.num_encodes = 0
        self._kept: dict[int, str] = {}  # in host memory: digests by number

    @property
    def limits(self) -> Limits:
        """Those that it was made with: plans must keep them."""
        return self._limits

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Executes the plan at once. Raises MissingBucket when it fits no bucket."""
        error: Exception | None = None
        if self._fail_at is not None and plan.step_id == self._fail_at[0]:
            error = RuntimeError(f"injected failure of step {plan.step_id}")
            if self._fail_at[1] == "dispatch":
                raise error
        if self._keep_plans:
            self.plans.append(plan)
        self.num_steps += 1
        self.num_copies += len(plan.copies)
        if self._clock is not None:
            self._clock.advance(self._step_s)
        self._check_shape(plan)
        self._apply_changes(plan)
        return _Done(self._forward(plan), error, functools.partial(self._read, plan))

    def _read(self, plan: StepPlan) -> None:
        self._saving.subtract(save.slot for save in plan.saves)
        self._loading.subtract(load.slot for load in plan.loads)

    def _check_shape(self, plan: StepPlan) -> None:
        assert plan.step_id > self._last_step_id, (plan.step_id, self._last_step_id)
        self._last_step_id = plan.step_id
        assert plan.num_tokens > 0 or self._slots, plan  # one without tokens saves pages, or waits for such saves
        if self._limits.bucket_of(plan) is None:
            raise MissingBucket(f"no bucket for {plan.num_tokens} tokens of {plan.num_rows} rows")
        batch_rows = [*plan.decode_rows, *(c.row for c in plan.chunks)]
        assert len(set(batch_rows)) == len(batch_rows), f"a row twice in one step: {batch_rows}"
        assert len(plan.decode_positions) == len(plan.decode_rows), plan
        assert len(plan.row_tokens) in (0, len(plan.decode_rows)), plan
        assert all(1 <= most <= plan.width * plan.rounds for most in plan.row_tokens), plan
        assert bool(plan.row_tokens) == (plan.width * plan.rounds > 1), plan

    def _apply_changes(self, plan: StepPlan) -> None:
        assert len(set(plan.freed_rows)) == len(plan.freed_rows), plan.freed_rows
        for row in plan.freed_rows:
            assert row in self._rows, f"row {row} is freed but has no owner"
            for table in self._rows.pop(row).tables:
                self._num_users.subtract(table)
        self._forget_unseen()
        for setup in plan.setups:
            assert 0 <= setup.row < self._limits.max_rows, setup.row
            assert setup.row not in self._rows, f"row {setup.row} is given away while it has an owner"
            assert setup.prompt_len <= setup.num_tokens <= self._limits.max_model_len, setup
            whole = reads_history(setup.sampling, setup.bad_word_ids)
            assert not whole or len(setup.token_ids) == setup.num_tokens, setup
            self._rows[setup.row] = _Row(setup, len(self._limits.page_groups))
        for grant in plan.grants:
            tables = self._rows[grant.row].tables
            table = tables[grant.group]
            if not table and self._limits.page_groups[grant.group].window is not None:
                table += [DUMMY_PAGE] * grant.first  # no token of the row will see what is before
            assert grant.first == len(table), f"a hole in the block table: {grant}, {table}"
            assert all(DUMMY_PAGE < p <= self._limits.num_pages for p in grant.page_ids), grant
            table += grant.page_ids
            self._num_users.update(grant.page_ids)
            held = [page_id for one in tables for page_id in one if page_id != DUMMY_PAGE]
            assert len(set(held)) == len(held), f"a page twice in the tables of a row: {tables}"
        self._move(plan)
        targets = {copy.target for copy in plan.copies}
        assert not targets & {copy.source for copy in plan.copies}, plan.copies
        assert len(targets) == len(plan.copies), plan.copies
        drafts = {draft.row: draft.token_ids for draft in plan.drafts}
        assert drafts.keys() <= set(plan.decode_rows) and (plan.width > 1 or not drafts), plan
        assert {mask.row for mask in plan.masks} <= set(plan.sampled_rows), plan
        for number, row in self._rows.items():
            row.masks, row.drafts = [mask for mask in plan.masks if mask.row == number], drafts.get(number)
            assert [mask.place for mask in row.masks] == list(range(len(row.masks))), plan.masks
            assert len(row.masks) <= 1 + len(row.drafts or ()), f"row {number} has masks behind no draft: {plan}"
        assert not plan.decode_only or plan.width == 1 or drafts.keys() == {mask.row for mask in plan.masks}, plan
        for copy in plan.copies:
            assert self._num_users[copy.target] == 1, f"{copy} writes a page of {self._num_users[copy.target]} rows"
            self._pages[copy.target] = list(self._pages[copy.source])
        self._encode(plan)

    def _encode(self, plan: StepPlan) -> None:
        pool = self._limits.encoder
        written = [page_id for encode in plan.encodes for page_id in encode.page_ids]
        assert len(set(written)) == len(written), f"an embedding is written twice in one step: {plan.encodes}"
        num_patches = [encode.num_patches for encode in plan.encodes if not encode.load]
        assert len(num_patches) < 2 or sum(num_patches) <= pool.max_patches, (
            f"{num_patches} patches in one step: {plan}"
        )
        for encode in plan.encodes:
            self._keep(encode)
            assert all(DUMMY_PAGE < page_id <= pool.num_pages for page_id in encode.page_ids), encode
            values = embeddings(encode.digest, len(encode.page_ids) * pool.page_size)
            for at, page_id in enumerate(encode.page_ids):
                self._embeddings[page_id] = values[at * pool.page_size : (at + 1) * pool.page_size]
        self.num_encodes += len(num_patches)
        chunks = {chunk.row: range(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in plan.chunks}
        for place in plan.pictures:
            fed = chunks[place.row]
            assert place.start < fed.stop and fed.start < place.start + place.length, f"{place} is of no use for {fed}"
            assert len(place.page_ids) == pool.pages_of(place.length), place

    def _keep(self, encode: Encode) -> None:
        """What host memory has: what is loaded was kept, and not forgotten since."""
        if encode.load:
            assert self._kept[encode.host_id] == encode.digest, encode
            return
        for host_id in encode.drops:
            del self._kept[host_id]
        if encode.host_id:
            assert encode.host_id not in self._kept, encode
            self._kept[encode.host_id] = encode.digest

    def _move(self, plan: StepPlan) -> None:
        """Pages go to slots, then slots to pages."""
        saved, loaded = {save.slot for save in plan.saves}, {load.page_id for load in plan.loads}
        assert len(saved) == len(plan.saves) and len(loaded) == len(plan.loads), plan
        assert not saved & {load.slot for load in plan.loads}, f"a slot is written and read in one step: {plan}"
        assert not loaded & {page_id for copy in plan.copies for page_id in copy}, plan
        for save in plan.saves:
            assert 0 <= save.slot < len(self._slots), save
            assert self._loading[save.slot] <= 0 and self._saving[save.slot] <= 0, f"{save} writes a slot in use"
            content = self._pages[save.page_id]
            assert all(token is not None and token >= 0 for token in content), f"{save} of a page that is not full"
            self._slots[save.slot] = list(content)
            self._saving[save.slot] += 1
        for load in plan.loads:
            assert DUMMY_PAGE < load.page_id <= self._limits.num_pages, load
            assert self._saving[load.slot] <= 0, f"{load} reads a slot before the step that fills it was read"
            assert self._slots[load.slot], f"{load} reads a slot that nothing was saved into"
            assert self._num_users[load.page_id] <= 1, f"{load} writes a page of {self._num_users[load.page_id]} rows"
            self._pages[load.page_id] = list(self._slots[load.slot])
            self._loading[load.slot] += 1
        self.num_saves += len(plan.saves)
        self.num_loads += len(plan.loads)

    def _forget_unseen(self) -> None:
        """Pages that no token to come can see may be another row's from now on."""
        for row in self._rows.values():
            for group, table in zip(self._limits.page_groups, row.tables, strict=True):
                first = min(group.first_column(max(0, row.length), self._limits.page_size), len(table))
                self._num_users.subtract(table[:first])
                table[:first] = [DUMMY_PAGE] * first

    def _forward(self, plan: StepPlan) -> StepResult:
        # All writes first, then all reads: what a row reads of another must have been written by an EARLIER step, and
        # `_start` has checked that before this step writes anything.
        fed: list[tuple[_Row, list[int]]] = []
        for number, position in zip(plan.decode_rows, plan.decode_positions, strict=True):
            row = self._rows[number]
            assert row.last_token is not None, f"row {number} decodes before it has sampled"
            if self._limits.max_row_tokens == 1:
                assert position == row.length, f"row {number} feeds position {position}, its pages hold {row.length}"
            assert position >= row.length, f"the bound of row {number} is {position}, its pages hold {row.length}"
            fed.append((row, [row.last_token]))
        for chunk in plan.chunks:
            fed.append((self._rows[chunk.row], self._start(chunk, plan)))
        for row, token_ids in fed:
            for token_id in token_ids:
                self._write(row, token_id)
        most_of = dict(zip(plan.decode_rows, plan.row_tokens, strict=False))
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        counts: list[int] = []
        drafts: list[list[Drafted]] = []
        for number in plan.sampled_rows:
            row, most = self._rows[number], most_of.get(number, 1)
            before, end = len(tokens), row.length - 1 + most
            if row.drafts is not None:
                assert len(row.drafts) < most, f"{len(row.drafts)} drafts of a row that may draw {most}"
                drafts.append([self._run_drafts(row, row.drafts, tokens, logprobs)])
            elif self._accept is None or not plan.row_tokens:
                count = self._draw_count(most)
                self._draw(row, count, tokens, logprobs)
                drafts.append(_rounds(count, plan))
            else:
                drafts.append(self._run_rounds(row, most, plan, tokens, logprobs))
            counts.append(len(tokens) - before)
            # What a wrong draft wrote is behind the row's length; the last round fed at most `width` tokens.
            self._poison(row, min(end, row.length + plan.width - 1))
        asked = any(entry is not None for entry in logprobs)
        prompt = {c.row: self._prompt_logprobs(c) for c in plan.chunks if c.prompt_logprobs}
        # The hidden state of token t at position p is (t, p, 1).
        sums = {c.row: _hidden_sum(c) for c in plan.chunks if c.pooled}
        return StepResult(
            token_ids=tokens,
            logprobs=logprobs if asked else None,
            prompt_logprobs=prompt if prompt else None,
            hidden_sums=sums if sums else None,
            counts=counts if plan.row_tokens else None,
            drafts=drafts if plan.width > 1 else None,
            num_draining=self._num_draining(len(plan.saves)),
        )

    def _draw(self, row: _Row, count: int, tokens: list[int], logprobs: list[TokenLogprobs | None]) -> None:
        """Draws `count` tokens, the first of them after the token that was fed last."""
        for already_drawn in range(count):
            if already_drawn:
                self._write(row, row.known[-1])
            tokens.append(self._sample(row))
            logprobs.append(self._logprobs(row))

    def _run_drafts(
        self, row: _Row, drafts: tuple[int, ...], tokens: list[int], logprobs: list[TokenLogprobs | None]
    ) -> Drafted:
        """The one round of a row that the host has drafts for: up to the first one that is not drawn, or the end."""
        for place in range(len(drafts) + 1):
            if place:
                self._write(row, row.known[-1])
            self._draw(row, 1, tokens, logprobs)
            if tokens[-1] in row.setup.stop_token_ids or tokens[-1] not in drafts[place : place + 1]:
                return Drafted(len(drafts), place)
        raise AssertionError("behind the last draft no token is one")

    def _run_rounds(
        self, row: _Row, room: int, plan: StepPlan, tokens: list[int], logprobs: list[TokenLogprobs | None]
    ) -> list[Drafted]:
        """Rounds until the row has drawn `room` tokens, or one that ends it, or the step has no more rounds."""
        assert self._accept is not None
        setup, rounds = row.setup, []
        while room and len(rounds) < plan.rounds:
            if rounds:
                self._write(row, row.known[-1])
            drafted = min(plan.width, room) - 1
            accepted = self._accept(setup.request_id, setup.index, row.length, drafted) if drafted else 0
            for place in range(accepted + 1):
                if place:
                    self._write(row, row.known[-1])
                self._draw(row, 1, tokens, logprobs)
                room -= 1
                if tokens[-1] in setup.stop_token_ids and len(row.known) - setup.prompt_len > setup.sampling.min_tokens:
                    accepted, room = place, 0
                    break
            rounds.append(Drafted(drafted, accepted))
        return rounds

    def _poison(self, row: _Row, end: int) -> None:
        """Overwrites the places from the row's length up to `end`, as wrong drafts do. Nobody may read them."""
        for position in range(row.length, end):
            self._put(row, position, _POISON)

    def _start(self, chunk: Chunk, plan: StepPlan) -> list[int]:
        """Checks a chunk against what the row knows and, for its first one, what it claims to be cached."""
        row = self._rows[chunk.row]
        setup, known = row.setup, row.known
        assert chunk.token_ids, chunk
        if row.length < 0:
            assert len(known) in (chunk.start, setup.num_tokens), (
                f"{chunk}: neither a chunk nor the setup brings what is before it: {setup}"
            )
            self._check_context(row, chunk.start, chunk.start)
            row.length = chunk.start
        assert chunk.start == row.length, f"{chunk} starts at {chunk.start}, the pages hold {row.length}"
        end = chunk.start + len(chunk.token_ids)
        if len(known) < setup.num_tokens:
            known += row.seen(chunk.start, chunk.token_ids)
        fed, size = list(chunk.token_ids), self._limits.encoder.page_size
        for place in plan.pictures:
            if place.row == chunk.row:
                for at in range(max(chunk.start, place.start), min(end, place.start + place.length)):
                    page, slot = divmod(at - place.start, size)
                    fed[at - chunk.start] = self._embeddings[place.page_ids[page]][slot]
        assert known[chunk.start : end] == fed, f"{chunk} feeds {fed}, which differs from what is known: {known}"
        assert chunk.sample == (end == setup.num_tokens and chunk.pool is None), f"{chunk} of {setup.num_tokens} tokens"
        return fed

    def _write(self, row: _Row, token_id: int) -> None:
        self._put(row, row.length, token_id)
        row.length += 1

    def _put(self, row: _Row, position: int, token_id: int) -> None:
        assert position < self._limits.max_model_len, (row.setup.request_id, position)
        column, slot = divmod(position, self._limits.page_size)
        for table in row.tables:
            assert column < len(table), f"{row.setup.request_id}: no page for position {position}: {row.tables}"
            page_id, num_users = table[column], self._num_users[table[column]]
            assert page_id != DUMMY_PAGE and num_users == 1, f"page {page_id} is written while {num_users} rows use it"
            self._pages[page_id][slot] = token_id

    def _check_context(self, row: _Row, position: int, end: int) -> None:
        """Asserts that the pages of each group hold those tokens before `end` that one at `position` sees."""
        size = self._limits.page_size
        for group, table in zip(self._limits.page_groups, row.tables, strict=True):
            first = 0 if group.window is None else max(0, position - group.window + 1)
            assert end <= len(table) * size, (end, table)
            assert DUMMY_PAGE not in table[first // size : -(-end // size)], (position, table)
            seen, known = [self._pages[table[p // size]][p % size] for p in range(first, end)], row.known[first:end]
            assert seen == known, f"{row.setup.request_id} reads {seen} from {first} on, expected {known}"

    def _sample(self, row: _Row) -> int:
        setup = row.setup
        context = row.known
        assert row.length == len(context), f"{setup.request_id}/{setup.index} has {row.length} of {len(context)} tokens"
        self._check_context(row, row.length - 1, row.length)
        num_outputs = len(row.known) - setup.prompt_len
        if self._mode == "count":
            token = (row.known[-1] + 1) % self.vocab_size
        else:
            token = hash((setup.seed, *context)) % self.vocab_size
        token = self._forced.get((setup.request_id, setup.index), {}).get(num_outputs, token)
        if allowed := setup.sampling.allowed_token_ids:
            token = token if token in allowed else allowed[token % len(allowed)]
        while num_outputs < setup.sampling.min_tokens and token in setup.stop_token_ids:
            token = (token + 1) % self.vocab_size
        assert bool(row.masks) == (setup.sampling.structured is not None), f"{setup.request_id} has a wrong mask"
        if row.masks:
            mask = row.masks.pop(0)
            token = next(t for t in (*range(token, 8 * len(mask.mask)), *range(token)) if mask.allows(t))
        row.known.append(token)
        row.last_token = token
        return token

    def _logprobs(self, row: _Row) -> TokenLogprobs | None:
        count = row.setup.sampling.logprobs
        return None if count is None else self._entry(row.known[-1], count)

    def _prompt_logprobs(self, chunk: Chunk) -> list[TokenLogprobs]:
        setup = self._rows[chunk.row].setup
        count = setup.sampling.prompt_logprobs
        assert count is not None, f"{chunk} asks for prompt logprobs, the request does not"
        successors = setup.token_ids[chunk.start + 1 : chunk.start + len(chunk.token_ids) + 1][
            : setup.prompt_len - 1 - chunk.start
        ]
        return [self._entry(token_id, count) for token_id in successors]

    def _entry(self, token_id: int, count: int) -> TokenLogprobs:
        """The chosen token at -0.5, and ids after it as the alternatives."""
        top = tuple((token_id + i) % self.vocab_size for i in range(count))
        return TokenLogprobs(token_id, -0.5, 1, top, tuple(-0.5 - i for i in range(count)))


def _rounds(count: int, plan: StepPlan) -> list[Drafted]:
    """The rounds in which a row drew `count` tokens: full ones, then one whose first draft was wrong in the end."""
    rounds = [Drafted(plan.width - 1, plan.width - 1)] * (count // plan.width)
    return [*rounds, Drafted(plan.width - 1, count % plan.width - 1)] if count % plan.width else rounds


def _hidden_sum(chunk: Chunk) -> list[float]:
    positions = chunk.pooled
    token_ids = chunk.token_ids[positions.start - chunk.start : positions.stop - chunk.start]
    return [float(sum(token_ids)), float(sum(positions)), float(len(positions))]


@dataclasses.dataclass(slots=True, kw_only=True)
class Output:
    """The output of one sequence. Mutated only by `drive`."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs | None] = dataclasses.field(default_factory=list)
    prompt: PromptInfo | None = None

    def take(self, event: TokenEvent) -> None:
        """Adds the next event of the request, and checks that none comes after the end."""
        assert self.finish_reason is None, f"an event after the end: {event}"
        assert (event.prompt is not None) == (not self.token_ids), f"prompt info belongs to the first token: {event}"
        self.prompt = event.prompt or self.prompt
        if event.token_id >= 0:
            self.token_ids.append(event.token_id)
        self.logprobs.append(event.logprobs)
        self.finish_reason = event.finish_reason


def drive(
    scheduler: Scheduler,
    runner: Runner,
    requests: Iterable[Request],
    *,
    overlap: bool = True,
    after_step: Callable[[int], None] | None = None,
) -> dict[tuple[str, int], Output]:
    """Adds the requests and runs the loop of the engine until nothing is left.

    `overlap` launches a step before the one before is committed. `after_step` is called with the number of turns done.
    Returns what each (request id, index) produced.
    """
    outputs: dict[tuple[str, int], Output] = {}
    for request in requests:
        scheduler.add(request)
        outputs |= {(request.request_id, i): Output() for i in range(request.sampling.n)}
    flights: collections.deque[tuple[StepPlan, InFlight]] = collections.deque()
    turn = 0
    while scheduler.has_work() or flights:
        plan = scheduler.schedule()
        assert plan is not None or flights, "work is left, nothing is in flight, and nothing is planned"
        if plan is not None:
            flights.append((plan, runner.dispatch(plan)))
        if plan is None or len(flights) > 1 or not overlap:
            done, handle = flights.popleft()
            for event in scheduler.commit(done, handle.result()):
                outputs[event.request_id, event.index].take(event)
        turn += 1
        if after_step is not None:
            after_step(turn)
    return outputs
