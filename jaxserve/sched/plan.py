"""`StepPlan`: everything that a device needs to execute one step, as a value.

The types of plans and results are here, with their JSON form. Schedulers fill plans, runners execute them. A plan is
the only seam between the two, so the same value drives the device, a fake runner, the simulator, a log, a replay, and
on several hosts a broadcast.

Rules that an executor may rely on:
  * Steps are executed in the order of `step_id`; within a step: `freed_rows`, `setups`, `grants`, `adapters`,
    `saves`, `loads`, `copies`, `encodes`, then the forward pass of `decode_rows` and `chunks`. A page freed after step
    i was planned can therefore be granted in step i+1 even while step i still runs: the device orders the writes. And a
    page that changes hands in a step is saved in the same step, before anything else writes it.
  * A step may be without tokens: it saves pages, or waits for pages of steps before it to reach their slots.
  * A slot of host memory is written by one save, and read by loads of later steps. It is written again only after the
    results of all steps that loaded it have been read.
  * Page 0 is the dummy page: never granted, the target of padding. So is page 0 of the encoder's pool.
  * A chunk with placeholders of a picture finds all embeddings of the picture in the pages that `pictures` name: put
    there by an encode of this step or of one before, and overwritten in this step by none.
  * The slot of an adapter that a row names has the weights of that adapter: put there by a load of this step or of one
    before. Of several loads of a slot in one step the last one counts.
  * A row belongs to one sequence from its `RowSetup` until it stands in `freed_rows`.
  * A row that draws under a mask draws a token of it. The mask holds for this step alone. Such a row takes part in the
    first round alone; it feeds the drafts that the plan has for it, and draws at each place under the mask of that.
  * `decode_rows` read their input token and their length from the device (`last_token[row]`, `length[row]`), `chunks`
    carry theirs. What the plan says of the length of a decode row is an upper bound.
  * A decode row feeds and draws one token or more, up to `row_tokens`, and its result says how many. The next token of
    the row follows the last one that it drew. The pages that the row was granted hold all that it may feed.
  * A step of `rounds` rounds of `width` lets a decode row feed its last token and up to width - 1 drafted ones, in each
    round. The row draws at each of these places as if the drafts before it had been drawn, and keeps what it drew up
    to the first draft that differs from it, that draw included: so drafts never change a token.
"""

import base64
import dataclasses
import enum
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

from jaxserve.api import SamplingParams, TokenLogprobs
from jaxserve.sched import codec
from jaxserve.values.content import Adapter, Picture, PlacedPicture

__all__ = [
    "AdapterLoad",
    "Bucket",
    "Chunk",
    "Drafted",
    "Encode",
    "EncoderPool",
    "HostSlots",
    "Limits",
    "PageCopy",
    "PageGrant",
    "PageGroup",
    "PageLoad",
    "PageSave",
    "Parts",
    "PicturePlace",
    "PoolSpan",
    "RowDraft",
    "RowMask",
    "RowPicture",
    "RowSetup",
    "StepPlan",
    "StepResult",
    "reads_history",
]

DUMMY_PAGE = 0
_NO_LIMIT = 1 << 62


class PageGroup(NamedTuple):
    """Layers that share a block table, since they reach back equally far.

    `window`: a token at position p sees positions p - window + 1 .. p; None: all before it. Pages that no token to come
    can see are given back, so a group with a window holds few, however long the sequence is.
    """

    window: int | None = None

    def first_column(self, position: int, page_size: int) -> int:
        """The first column of the block table that a token at `position`, or a later one, can see."""
        return 0 if self.window is None else max(0, position - self.window + 1) // page_size

    def most_columns(self, chunk: int, page_size: int) -> int:
        """The most columns that `chunk` tokens fed in one step can see."""
        if self.window is None:
            return _NO_LIMIT
        # They see window - 1 + chunk positions in a row; n positions in a row lie in (n + page_size - 2) // page_size
        # + 1 pages at most.
        return (self.window + chunk - 3) // page_size + 2


class HostSlots(NamedTuple):
    """Host memory behind the device's pages: slots of one page each, numbered from 0.

    Attributes:
      num_slots: 0: there is no such memory.
      max_draining: pages that may be on their way to their slots at once.
      max_loads: pages that a step which computes something else may load.
      load_ms, save_ms: of a page, measured before the first step; 0 where nobody has measured it.
      page_bytes: of a page on all devices together.
    """

    num_slots: int = 0
    max_draining: int = 0
    max_loads: int = 0
    load_ms: float = 0.0
    save_ms: float = 0.0
    page_bytes: int = 0


NO_SLOTS = HostSlots()


class EncoderPool(NamedTuple):
    """Device memory for the embeddings of pictures.

    Attributes:
      num_pages: that can be given to pictures (the dummy page not counted); ids 1..num_pages. 0: the model takes none.
      page_size: embeddings of a page.
      max_patches: that a step encodes at most, so that rows that decode do not wait long; one picture that has more is
        encoded in a step of its own.
      host_embeddings: that host memory keeps behind it, for pictures that lost their pages; 0: none.
    """

    num_pages: int = 0
    page_size: int = 64
    max_patches: int = 0
    host_embeddings: int = 0

    def pages_of(self, num_embeddings: int) -> int:
        """Pages of a picture."""
        return -(-num_embeddings // self.page_size)


NO_ENCODER = EncoderPool()


class Bucket(NamedTuple):
    """One compiled step shape: room for `tokens` flat tokens of `rows` rows.

    `decode_only` buckets take no chunk, and `width` tokens of each row (tokens == rows * width) in each of up to
    `rounds` rounds. All others have one round, in which a row that decodes feeds one token.
    """

    tokens: int
    rows: int
    decode_only: bool
    width: int = 1
    rounds: int = 1

    @property
    def plain(self) -> bool:
        """One round, in which a row that decodes feeds one token."""
        return self.width == self.rounds == 1

    def holds(self, num_tokens: int, num_rows: int, decode_only: bool, width: int, rounds: int) -> bool:
        """Whether a step of these sizes can run in this shape. A plain decode-only step may run in a mixed one."""
        if width == rounds == 1:
            fits = self.plain and (decode_only or not self.decode_only)
        else:
            fits = self.width == width and self.rounds >= rounds
        return fits and self.tokens >= num_tokens and self.rows >= num_rows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The facts about the device that a policy may use.

    Attributes:
      max_rows: rows that can run at once.
      num_pages: pages that can be granted (the dummy page not counted); ids 1..num_pages.
      page_size: tokens a page holds.
      page_groups: the block tables of a row. A page holds `page_size` tokens of the layers of one group, and its bytes
        are the same in all groups, so that any group may have any page.
      max_model_len: tokens a sequence may have, prompt and output.
      buckets: compiled shapes, ascending; a plan must fit one of them. Later limits of the same device may have more,
        never fewer, and the largest mixed one is there from the start: a plan that fits one of the lists fits the
        other, perhaps with more padding.
      step_ms: of each of `buckets`, the milliseconds of one round on this device; 0 where nobody has measured it, and
        empty where that is so of all. For the choice of widths and rounds alone.
      max_mixed_tokens: tokens of a step with prompts beside decode rows, so that it is not much longer than a step
        without prompts; None: no limit. It is a recommendation; every plan that fits a bucket runs.
      slots: host memory for pages that the device gives up.
      encoder: memory for embeddings of pictures.
      adapter_slots: adapters that a step can have; 0: none.
    """

    max_rows: int
    num_pages: int
    page_size: int
    max_model_len: int
    buckets: tuple[Bucket, ...]
    max_mixed_tokens: int | None = None
    page_groups: tuple[PageGroup, ...] = (PageGroup(),)
    step_ms: tuple[float, ...] = ()
    slots: HostSlots = NO_SLOTS
    encoder: EncoderPool = NO_ENCODER
    adapter_slots: int = 0

    def with_buckets(self, buckets: Iterable[Bucket], step_ms: Mapping[Bucket, float] | None = None) -> "Limits":
        """These limits with another list of buckets, in any order, and the times of those that are known."""
        found, times = tuple(sorted(buckets)), step_ms or {}
        known = tuple(times.get(bucket, 0.0) for bucket in found) if times else ()
        return dataclasses.replace(self, buckets=found, step_ms=known)

    @property
    def max_row_tokens(self) -> int:
        """Tokens that a decode row may draw in one step."""
        return max(b.width * b.rounds for b in self.buckets)

    def pages_of(self, num_tokens: int, chunk: int = 1) -> int:
        """The most pages that a sequence of `num_tokens` holds at once, where a step feeds at most `chunk` of them."""
        columns = -(-num_tokens // self.page_size)
        return sum(min(columns, group.most_columns(chunk, self.page_size)) for group in self.page_groups)

    @property
    def max_step_tokens(self) -> int:
        """Tokens of the largest bucket."""
        return max(b.tokens for b in self.buckets)

    def find_bucket(
        self, num_tokens: int, num_rows: int, decode_only: bool, width: int = 1, rounds: int = 1
    ) -> Bucket | None:
        """The cheapest bucket that holds the step, or None."""
        fitting = [b for b in self.buckets if b.holds(num_tokens, num_rows, decode_only, width, rounds)]
        return min(fitting, key=lambda b: (b.tokens, b.rows, not b.decode_only), default=None)

    def bucket_of(self, plan: "StepPlan") -> Bucket | None:
        """The cheapest bucket that runs `plan`, or None."""
        return self.find_bucket(plan.num_tokens, plan.num_rows, plan.decode_only, plan.width, plan.rounds)


class RowPicture(NamedTuple):
    """A picture of a row's prompt, at positions [start, start + length). `digest` is in hexadecimal."""

    start: int
    length: int
    grid: tuple[int, ...]
    digest: str

    @classmethod
    def of(cls, placed: PlacedPicture) -> "RowPicture":
        picture = placed.picture
        return cls(placed.start, picture.num_tokens, picture.grid, picture.digest.hex())

    @property
    def placed(self) -> PlacedPicture:
        """The picture in the prompt, without pixels."""
        return PlacedPicture(_picture(self.digest, self.grid, self.length, b""), self.start)


def _picture(digest: str, grid: tuple[int, ...], num_tokens: int, pixels: bytes) -> Picture:
    frames, rows, columns = grid
    return Picture(digest=bytes.fromhex(digest), grid=(frames, rows, columns), num_tokens=num_tokens, pixels=pixels)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowSetup:
    """A row is given to a sequence. Carries all the per-row state of sampling.

    `seed` is the sequence's own (already distinct for each of the n sequences). `prompt_len` tells prompt from output
    when a preempted sequence is computed again: tokens from `prompt_len` on count as output for penalties.
    `origin` is equal for sequences that may learn from each other: those of one tenant and cache salt.
    `num_tokens` are known so far (prompt, then output after a preemption). `token_ids` are the first of them: those
    that no chunk will bring, since they are in the row's pages already; all of them where `reads_history`.
    `pictures` are all those of the prompt, whatever of it a cache has. `adapter` is the slot of its adapter, counted
    from 1; 0: it has none.
    """

    row: int
    request_id: str
    index: int
    seed: int
    prompt_len: int
    num_tokens: int
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    bad_word_ids: tuple[tuple[int, ...], ...]
    origin: int = 0
    pictures: tuple[RowPicture, ...] = ()
    adapter: int = 0


def reads_history(sampling: SamplingParams, bad_word_ids: tuple[tuple[int, ...], ...]) -> bool:
    """Whether sampling reads tokens before the last: the device then gets all of them with the row."""
    penalised = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
    return bool(penalised or bad_word_ids) or sampling.prompt_logprobs is not None


class PageGrant(NamedTuple):
    """Columns [first, first + len(page_ids)) of the row's block table of `group` become `page_ids`."""

    row: int
    first: int
    page_ids: tuple[int, ...]
    group: int = 0


class PageCopy(NamedTuple):
    """Copy-on-write: all bytes of page `source` go to page `target`, in every layer of its group."""

    source: int
    target: int


class PageSave(NamedTuple):
    """All bytes of page `page_id`, in every layer of its group, go to host slot `slot`."""

    page_id: int
    slot: int


class PageLoad(NamedTuple):
    """The bytes of host slot `slot` go to page `page_id`, which gets what some page held when it was saved."""

    slot: int
    page_id: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoad:
    """The weights of an adapter go to a slot of the device, whatever it held. Slots count from 1.

    `digest` is in hexadecimal, for logs; `adapter` is for the runner, and not written to them.
    """

    slot: int
    name: str
    digest: str
    adapter: Adapter | None = dataclasses.field(default=None, repr=False, compare=False, metadata=codec.UNWRITTEN)

    @classmethod
    def of(cls, slot: int, adapter: Adapter) -> Self:
        return cls(slot=slot, name=adapter.name, digest=adapter.digest.hex(), adapter=adapter)


class PoolSpan(NamedTuple):
    """Positions [first, end) of a prompt whose final hidden states are asked for."""

    first: int
    end: int


class Chunk(NamedTuple):
    """Tokens of one row whose values the host knows: a piece of a prompt, or of a recomputation.

    `start` is the position of the first token. `sample` is True for the last piece: it yields a token.
    `prompt_logprobs` asks for log-probabilities of the tokens that follow each of these. `pool` asks for the sum of the
    final hidden states of those that lie in the span, which is the same for all chunks of a prompt; None for nothing.
    """

    row: int
    start: int
    token_ids: tuple[int, ...]
    sample: bool
    prompt_logprobs: bool = False
    pool: PoolSpan | None = None

    @property
    def pooled(self) -> range:
        """Positions of this chunk whose hidden states are summed; empty where none is."""
        if self.pool is None:
            return range(0)
        return range(max(self.start, self.pool.first), min(self.start + len(self.token_ids), self.pool.end))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Encode:
    """The vision tower turns a picture into embeddings, which go to `page_ids` of the encoder's pool, in order.

    `digest` is in hexadecimal. The pixels are no part of the JSON, so a plan that was read from a log has none.

    Host memory keeps embeddings by `host_id`, a number that is given once; 0: it does not keep these. With `load` they
    are there, and come from there instead of the tower. Behind that the embeddings of the numbers in `drops` are
    forgotten, and then those of the tower are kept.
    """

    digest: str
    grid: tuple[int, ...]
    num_tokens: int
    page_ids: tuple[int, ...]
    host_id: int = 0
    load: bool = False
    drops: tuple[int, ...] = ()
    pixels: bytes = dataclasses.field(default=b"", repr=False, compare=False, metadata=codec.UNWRITTEN)

    @classmethod
    def of(
        cls,
        picture: Picture,
        page_ids: tuple[int, ...],
        *,
        host_id: int = 0,
        load: bool = False,
        drops: tuple[int, ...] = (),
    ) -> "Encode":
        return cls(
            digest=picture.digest.hex(),
            grid=picture.grid,
            num_tokens=picture.num_tokens,
            page_ids=page_ids,
            host_id=host_id,
            load=load,
            drops=drops,
            pixels=picture.pixels,
        )

    @property
    def num_patches(self) -> int:
        """That the tower has to do with: none for a load."""
        return 0 if self.load else self.picture.num_patches

    @property
    def picture(self) -> Picture:
        return _picture(self.digest, self.grid, self.num_tokens, self.pixels)


class PicturePlace(NamedTuple):
    """Positions [start, start + length) of `row` are a picture, whose embeddings are in these pages of the encoder's
    pool, in order."""

    row: int
    start: int
    length: int
    page_ids: tuple[int, ...]


class RowMask(NamedTuple):
    """The tokens that `row` may draw in this step: one bit each, lowest first, in base64.

    `place`: 0 for the token behind those that are known, i for the one behind the i-th draft of the row.
    """

    row: int
    bits: str
    place: int = 0

    @classmethod
    def of(cls, row: int, mask: bytes, place: int = 0) -> "RowMask":
        """The mask of a row, from its bytes: bit i of the little-endian words allows token i."""
        return cls(row, base64.b64encode(mask).decode(), place)

    @property
    def mask(self) -> bytes:
        """Whole little-endian 32-bit words; tokens beyond their end are forbidden."""
        return base64.b64decode(self.bits)

    def allows(self, token_id: int) -> bool:
        """Whether the row may draw this token."""
        mask = self.mask
        return token_id >> 3 < len(mask) and bool(mask[token_id >> 3] >> (token_id & 7) & 1)


class RowDraft(NamedTuple):
    """The drafts that `row` feeds in this step, in place of those that the device would make; perhaps none.

    They are fewer than `StepPlan.width`, and than the tokens that the row may draw.
    """

    row: int
    token_ids: tuple[int, ...]


class Drafted(NamedTuple):
    """One round of one row: how many drafts it fed, and how many of the first of them were drawn as well."""

    drafted: int
    accepted: int


class Parts(enum.Enum):
    """How a field is split when a pipeline runs a plan in parts, one after the other."""

    FIRST = "first"  # concerns the whole step, and comes before all of it: the first part has it, the others nothing
    EACH = "each"  # is the same in all parts
    DEALT = "dealt"  # has an entry for each decode row, which goes where the row goes
    CUT = "cut"  # the chunks, cut in the order of their tokens

    @property
    def field(self) -> dict[str, "Parts"]:
        """The metadata of a dataclass field of this kind; without any it is FIRST."""
        return {"parts": self}

    @classmethod
    def of(cls, field: "dataclasses.Field[Any]") -> "Parts":
        return field.metadata.get("parts", cls.FIRST)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. Rows of the batch are `decode_rows` first, then one per chunk, in this order.

    `decode_positions[i]` is the position of the token that `decode_rows[i]` feeds (= tokens already in its pages), or
    more: as long as the result of an earlier step may say that the row drew fewer tokens than it could.
    `row_tokens[i]` is how many tokens `decode_rows[i]` may draw, 1 or more, in all rounds together; one each where
    `row_tokens` is empty. `width` is how many tokens a decode row may feed in each of the `rounds`; a row ends its part
    in them by itself when it has drawn `row_tokens[i]` tokens, or one that ends its sequence.
    `masks` are put in by the engine, for each row that draws under `SamplingParams.structured` one, and one for each of
    its drafts. So are `drafts`, an entry for each of these rows that decodes in a step of a width above 1.
    `pictures` are those with a placeholder in a chunk of this step.

    A field is declared here and nowhere else: its JSON, step logs, replays and other processes follow from the class,
    and the parts of a pipeline from its metadata (`Parts`).
    """

    step_id: int = dataclasses.field(metadata=Parts.EACH.field)
    decode_rows: tuple[int, ...] = dataclasses.field(default=(), metadata=Parts.DEALT.field)
    decode_positions: tuple[int, ...] = dataclasses.field(default=(), metadata=Parts.DEALT.field)
    chunks: tuple[Chunk, ...] = dataclasses.field(default=(), metadata=Parts.CUT.field)
    setups: tuple[RowSetup, ...] = ()
    grants: tuple[PageGrant, ...] = ()
    saves: tuple[PageSave, ...] = ()
    loads: tuple[PageLoad, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    freed_rows: tuple[int, ...] = ()
    masks: tuple[RowMask, ...] = ()
    row_tokens: tuple[int, ...] = dataclasses.field(default=(), metadata=Parts.DEALT.field)
    width: int = dataclasses.field(default=1, metadata=Parts.EACH.field)
    rounds: int = dataclasses.field(default=1, metadata=Parts.EACH.field)
    drafts: tuple[RowDraft, ...] = ()
    encodes: tuple[Encode, ...] = ()
    pictures: tuple[PicturePlace, ...] = dataclasses.field(default=(), metadata=Parts.EACH.field)
    adapters: tuple[AdapterLoad, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Places of the step in a bucket, padding left out: `width` for each decode row, one for a token of a chunk."""
        return len(self.decode_rows) * self.width + sum(len(c.token_ids) for c in self.chunks)

    @property
    def num_rows(self) -> int:
        """Rows that take part in the step."""
        return len(self.decode_rows) + len(self.chunks)

    @property
    def decode_only(self) -> bool:
        """Each row begins with one token, which the device drew itself."""
        return not self.chunks

    @property
    def sampled_rows(self) -> tuple[int, ...]:
        """Rows that yield a token, in batch order: the order of `StepResult.token_ids`."""
        return self.decode_rows + tuple(c.row for c in self.chunks if c.sample)

    def to_json(self) -> str:
        """One line, without the fields that hold their defaults. `from_json(plan.to_json()) == plan`."""
        return codec.dumps(self)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """The plan that `to_json` wrote."""
        return cls.from_fields(json.loads(line))

    @classmethod
    def from_fields(cls, raw: dict[str, Any]) -> Self:
        """The plan of a JSON object, already parsed: for lines that hold more than a plan."""
        return codec.load(cls, raw)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of the device for one plan.

    Attributes:
      token_ids: of `StepPlan.sampled_rows`, in that order; one of each row, or as many as `counts` says. NOT_FINITE
        of a row whose numbers were not.
      logprobs: the same length as `token_ids`, entries None for rows that did not ask; None when no row asked.
      prompt_logprobs: row -> one entry per token of its chunk whose successor lies in the prompt.
      hidden_sums: row -> sum of the final hidden states [D] at `Chunk.pooled`, for each chunk where that is not empty.
      counts: how many tokens each of `sampled_rows` drew, 1 or more; None: one each. There wherever the plan has
        `row_tokens`.
      drafts: what became of the drafts of each of `sampled_rows`, round by round; None where none were asked for.
      num_draining: pages that plans up to this one save, and that had not reached their slots when it was read.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None
    hidden_sums: dict[int, list[float]] | None = None
    counts: list[int] | None = None
    drafts: "list[list[Drafted]] | None" = None
    num_draining: int = 0
