"""The device's side of a plan: pack, transfer, launch.

It holds the arrays of the devices and the compiled executables, and executes plans in order; a plan without a compiled
shape is an error. Runs on the engine's loop thread alone.

A pipeline runs a plan as several parts (`pipeline.split_plan`): while the second stage works on one, the first works
on the next, also across steps. Launches return at once and devices work through them in order, so what stands here is
only who hands what to whom. Where the stages are of several processes, each has a runner that gets all plans and
launches what its own stage does; `stage_links` are the programs that they launch together.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from jaxserve.api import TokenLogprobs
from jaxserve.errors import CapacityError, MissingBucket
from jaxserve.runtime.adapters import AdapterWriter
from jaxserve.runtime.host_slots import SlotBytes
from jaxserve.runtime.pack import NUM_STOPS, Layout, following_tokens, pack, split_grants
from jaxserve.runtime.page_moves import LOADING_LAUNCHES, pages_of_launch
from jaxserve.runtime.picture_inputs import PictureRows
from jaxserve.runtime.pipeline import launch_order, split_plan
from jaxserve.runtime.row_state import (
    NO_TOKEN,
    NUM_ROW_FIELDS,
    Field,
    encode_row,
    encode_row_state,
    encode_stops,
    mask_words,
    needs_row_state,
)
from jaxserve.runtime.sampling import Logprobs
from jaxserve.runtime.stage_links import StageLinks
from jaxserve.runtime.step import DeviceState
from jaxserve.runtime.step_output import NOT_TAKEN, StepOutput
from jaxserve.runtime.towers import HostEmbeddings, Tower
from jaxserve.sched.base import InFlight
from jaxserve.sched.plan import (
    DUMMY_PAGE,
    AdapterLoad,
    Bucket,
    Drafted,
    Encode,
    Limits,
    PageLoad,
    PageSave,
    RowMask,
    RowSetup,
    StepPlan,
    StepResult,
)

Move = TypeVar("Move", PageSave, PageLoad)

Weights = Sequence[tuple[jax.Array, ...]]  # of each stage, as its executables take them

COPY_SLOTS = 16  # page copies of one launch; more take several
TABLE_SLOTS = 1024  # block table entries of one `write_tables` launch
MASK_SLOTS = 16  # masks of one `write_masks` launch
_TIMED_STEPS = 4
_WARM_STEPS = 3  # XLA runs the first step kernel by kernel, makes its graph in the second, and launches it in the third
ROW_SLOTS = 16  # rows of one `enter_rows` or `leave_rows` launch
TOLD_SLOTS = 512  # tokens of one `tell_tokens` launch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Executables:
    """What `runtime.build` compiled for one stage. Only the last stage of a pipeline samples.

    `steps` gains entries through `DeviceRunner.add_bucket` alone.
    """

    steps: dict[Bucket, jax.stages.Compiled]
    copy_pages: jax.stages.Compiled
    write_tables: jax.stages.Compiled
    configure_row: jax.stages.Compiled | None
    write_masks: jax.stages.Compiled | None
    tell_tokens: jax.stages.Compiled | None
    enter_rows: jax.stages.Compiled | None
    leave_rows: jax.stages.Compiled | None
    gather_pages: Mapping[int, jax.stages.Compiled]  # by their number of pages; empty without host slots
    scatter_pages: Mapping[int, jax.stages.Compiled]
    write_embeddings: Mapping[int, jax.stages.Compiled]  # by their number of lines; empty without pictures
    write_adapter: AdapterWriter | None = None  # None without adapters


@dataclasses.dataclass(slots=True, kw_only=True)
class Stage:
    """The layers that one mesh holds. `state` is replaced by each launch, and `weights` by others of the same shapes,
    by the runner alone.

    `sharding` places what every device of the stage needs whole. `make_state` makes the first state.
    """

    executables: Executables
    weights: tuple[jax.Array, ...]
    make_state: Callable[[], DeviceState]
    state: DeviceState
    sharding: jax.sharding.Sharding


class DeviceRunner:
    """A `sched.base.Runner` on JAX devices. Mutated by the thread that dispatches."""

    def __init__(
        self,
        *,
        limits: Limits,
        layouts: Mapping[Bucket, Layout],
        stages: Sequence[Stage | None],
        links: StageLinks | None = None,
        num_parts: int,
        vocab_size: int,
        on_buffer: Callable[[np.ndarray], None] = lambda buffer: None,
        slots: SlotBytes | None = None,
        tower: Tower | None = None,
        pictures: PictureRows | None = None,
    ) -> None:
        """`layouts`: of all buckets, also of those to come. `stages`: None for those of other processes, to which
        `links` lead. `num_parts`: of a plan in the pipeline.
        `vocab_size`: with padding. `on_buffer` sees all integers that go to the devices, once each. `slots`: host
        memory for pages, where `limits` have slots. `tower`, `pictures`: of a model that takes pictures."""
        assert (tower is None) == (pictures is None) == (limits.encoder.num_pages == 0), limits.encoder
        self._tower = tower
        self._host_embeddings = HostEmbeddings()
        self._pictures = pictures
        assert (slots is not None) == (limits.slots.num_slots > 0), limits.slots
        self._slots = slots
        self._loading: collections.deque[list[jax.Array]] = collections.deque()  # of each launch that loads pages
        self._limits = limits
        self._layouts = layouts
        assert (links is not None) == (None in stages), "links are between processes"
        self._stages = tuple(stages)
        self._here = tuple(stage for stage in stages if stage is not None)
        self._links = links
        self._num_parts = num_parts
        self._vocab_size = vocab_size
        self._on_buffer = on_buffer
        self._num_places = max(bucket.width for bucket in layouts)  # masks of each row
        self._step_ms: dict[Bucket, float] = {}
        self._kept: list[list[tuple[np.ndarray, jax.sharding.Sharding]]] | None = None  # of each stage, while it sleeps
        self._last_tokens = _LastTokens(limits.max_rows, num_parts)
        num_fields = next(iter(layouts.values())).num_params
        self._row_params = np.zeros((limits.max_rows + 1, num_fields), np.int32)
        self._row_stops = np.full((limits.max_rows + 1, NUM_STOPS), NO_TOKEN, np.int32)
        self._row_logprobs: dict[int, int] = {}  # row -> alternatives asked for
        self._row_prompt_logprobs: dict[int, int] = {}
        self._row_prompts: dict[int, np.ndarray] = {}

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def slots(self) -> SlotBytes | None:
        """Host memory for pages; None where there is none."""
        return self._slots

    def add_bucket(self, bucket: Bucket, step: jax.stages.Compiled) -> Limits:
        """One more shape, from the next plan on. Returns the new limits. Not for a pipeline, whose stages all need it.

        Called on the thread that dispatches, between two steps.
        """
        assert len(self._stages) == 1, "a pipeline has all its buckets from the start"
        assert bucket in self._layouts and bucket not in self._limits.buckets, bucket
        self._here[0].executables.steps[bucket] = step
        if self._step_ms:
            self._step_ms[bucket] = self._time(bucket)
        self._limits = self._limits.with_buckets((*self._limits.buckets, bucket), self._step_ms)
        return self._limits

    def close(self) -> Weights:
        """Gives back the memory that only this runner has, its pages and host slots, as soon as the devices use it no
        more. It runs no further plan. Any thread: the one that dispatches may hang. Returns the weights."""
        for stage in self._here:
            del stage.state
        self._loading.clear()
        self._host_embeddings = HostEmbeddings()
        if self._slots is not None:
            self._slots.close()
        return [stage.weights for stage in self._here]

    def warm_up(self) -> None:
        """Runs each step some times on padding rows alone, which changes no page: what a device does at a first run,
        such as loading the program, meeting the other devices and making a graph, is done before a request waits for
        it. Before the first plan."""
        for bucket in self._limits.buckets:
            buffer = self._only_padding(bucket)
            for _ in range(_WARM_STEPS):
                left: Any = None
                for number, stage in enumerate(self._stages):
                    if stage is not None:
                        if number == 0 and len(self._stages) > 1:
                            left = self._put(self._last_tokens.after(()), stage)
                        step, there = stage.executables.steps[bucket], self._put(buffer, stage)
                        left, stage.state = step(stage.weights, stage.state, there, left)
                    left = self._hand_on(number, bucket, left)
                jax.block_until_ready(left)

    def _only_padding(self, bucket: Bucket) -> np.ndarray:
        """The buffer of a step without a row."""
        nothing = StepPlan(step_id=0, width=bucket.width)
        return pack(nothing, self._layouts[bucket], self._row_params, self._row_stops, {}, (), self._pictures)

    def release(self) -> None:
        """See `Releasable`. A runner that was made of its weights by `renew` has none either."""
        states = jax.tree.leaves([stage.state for stage in self._here])
        for weights in (states, *self.close()):
            _free(weights)
        self._kept = None
        if self._tower is not None:
            _free(jax.tree.leaves(self._tower.weights))

    def time_steps(self) -> Limits:
        """Measures one round of each decode step, and of all that come later, for a scheduler that chooses among them.
        Returns the new limits. Before the first plan, and not for a pipeline."""
        assert len(self._stages) == 1, "the stages of a pipeline have one kind of step"
        self._step_ms = {bucket: self._time(bucket) for bucket in self._limits.buckets if bucket.decode_only}
        self._limits = self._limits.with_buckets(self._limits.buckets, self._step_ms)
        return self._limits

    def use_weights(self, weights: Weights) -> None:
        """See `Renewable`. The arrays are the runner's from now on."""
        for stage, new in zip(self._here, weights, strict=True):
            shapes = [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in new]
            assert self._kept is not None or shapes == [(old.shape, old.dtype, old.sharding) for old in stage.weights]
            _free(stage.weights)
            stage.weights = new
        self._kept = None

    def sleep(self, *, keep_weights: bool) -> None:
        """See `Renewable`."""
        assert self._kept is None, "it sleeps already"
        self._kept = [
            [(np.array(leaf), leaf.sharding) for leaf in (stage.weights if keep_weights else ())]
            for stage in self._here
        ]
        self._loading.clear()
        for stage in self._here:
            _free(stage.weights)
            _free(jax.tree.leaves(stage.state))

    def wake_up(self, weights: Weights | None) -> None:
        """See `Renewable`."""
        assert self._kept is not None, "it does not sleep"
        states: list[DeviceState] = []
        made: list[tuple[jax.Array, ...]] = []
        try:
            states += [stage.make_state() for stage in self._here]
            if weights is None:
                made += [tuple(jax.device_put(array, where) for array, where in kept) for kept in self._kept]
            jax.block_until_ready((states, made))  # else a later step would meet the error
        except jax.errors.JaxRuntimeError as error:
            if not is_full(error):
                raise
            _free(jax.tree.leaves((states, made)))
            raise CapacityError(
                f"the device has no room for the weights and the pages that this engine had before it slept, and it "
                f"sleeps on; free memory of the device, then wake it up again: {error}"
            ) from error
        for stage, state in zip(self._here, states, strict=True):
            stage.state = state
        self._last_tokens = _LastTokens(self._limits.max_rows, self._num_parts)
        self.use_weights(made if weights is None else weights)

    def _time(self, bucket: Bucket) -> float:
        """Milliseconds of a round in which all rows are the padding row, which has the dummy page; the best of some,
        since a machine with other work only ever takes longer."""
        [stage] = self._here
        if not bucket.decode_only:
            return 0.0
        buffer = self._only_padding(bucket)
        view = self._layouts[bucket].views(buffer)
        if bucket.plain:
            view["context_lens"][:] = 1
        else:
            view["room"][:] = 1
        seconds = []
        for _ in range(_TIMED_STEPS):
            begin_s = time.perf_counter()
            output, stage.state = stage.executables.steps[bucket](
                stage.weights, stage.state, self._put(buffer, stage), None
            )
            jax.block_until_ready(output.token_ids)
            seconds.append(time.perf_counter() - begin_s)
        return min(seconds) * 1000

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Launches the step and returns at once. Raises MissingBucket when no compiled shape fits."""
        parts = split_plan(plan, self._num_parts)
        buckets = [self._bucket(part) for part in parts]
        own, no_row = self._here[0].executables, self._limits.max_rows
        if plan.freed_rows and own.leave_rows is not None:
            prompt_lens = self._row_params[list(plan.freed_rows), Field.PROMPT_LEN].tolist()
            rows = list(zip(plan.freed_rows, prompt_lens, strict=True))
            self._launch(self._here, lambda of: of.leave_rows, rows, slots=ROW_SLOTS, blank=no_row)
        for row in plan.freed_rows:
            self._forget(row)
        for setup in plan.setups:
            self._set_up(setup)
        if plan.setups and own.enter_rows is not None:
            halves = [np.array([setup.origin], "<u8").view("<i4").tolist() for setup in plan.setups]
            rows = [(setup.row, *half) for setup, half in zip(plan.setups, halves, strict=True)]
            self._launch(self._here, lambda of: of.enter_rows, rows, slots=ROW_SLOTS, blank=no_row)
        if plan.setups and own.tell_tokens is not None:
            told = _told_tokens(plan)
            self._launch(self._here, lambda of: of.tell_tokens, told, slots=TOLD_SLOTS, blank=no_row)
        if plan.adapters:
            self._load_adapters(plan.adapters)
        if self._slots is not None:
            self._save_pages(self._slots, plan.saves)
            self._load_pages(self._slots, plan.loads)
        if plan.copies:
            self._launch(self._here, lambda of: of.copy_pages, plan.copies, slots=COPY_SLOTS)
        if plan.masks:
            lines, no_line = self._mask_lines(plan.masks), no_row * self._num_places
            self._launch(self._stages[-1:], lambda of: of.write_masks, lines, slots=MASK_SLOTS, blank=no_line)
        if plan.encodes:
            self._encode(plan.encodes)
        buffers: list[np.ndarray] = []
        for part, bucket in zip(parts, buckets, strict=True):
            layout = self._layouts[bucket]
            grants, rest = split_grants(part.grants, layout.max_grants, layout.max_rows)
            if rest:
                self._launch(self._here, lambda of: of.write_tables, rest, slots=TABLE_SLOTS, blank=no_row)
            buffer = pack(part, layout, self._row_params, self._row_stops, self._row_prompts, grants, self._pictures)
            self._on_buffer(buffer)
            buffers.append(buffer)
        launched: list[_Part] = []
        carried: list[Any] = [None] * len(parts)  # what each part has left in the stage before
        for now in launch_order(len(parts), len(self._stages)):
            for number, at in now:
                if (stage := self._stages[number]) is None:
                    continue
                if number == 0 and len(self._stages) > 1:
                    carried[at] = self._put(self._last_tokens.after(parts[at].decode_rows), stage)
                step, buffer = stage.executables.steps[buckets[at]], self._put(buffers[at], stage)
                carried[at], stage.state = step(stage.weights, stage.state, buffer, carried[at])
            for number, at in reversed(now):  # the oldest part first: its tokens are waited for
                carried[at] = self._hand_on(number, buckets[at], carried[at])
                if number == len(self._stages) - 1:
                    launched.append(self._part(parts[at], carried[at]))
        return DeviceInFlight(plan.sampled_rows, launched, self._slots)

    def _hand_on(self, number: int, bucket: Bucket, left: Any) -> Any:
        """What a stage has left, where the next one needs it; of the last one, what everybody reads."""
        is_last = number == len(self._stages) - 1
        if self._links is not None:
            return self._links.share(bucket, left) if is_last else self._links.forward(number, bucket.tokens, left)
        if is_last:
            return left
        stage = self._stages[number + 1]
        assert stage is not None, "links lead to other processes"
        return self._put(left, stage)

    def _bucket(self, plan: StepPlan) -> Bucket:
        bucket = self._limits.bucket_of(plan)
        if bucket is None or bucket not in self._layouts:
            raise MissingBucket(
                f"step {plan.step_id} has {plan.num_tokens} tokens of {plan.num_rows} rows; compiled are "
                f"{', '.join(f'{b.tokens}x{b.rows}' for b in self._limits.buckets)}; nothing compiles after start"
            )
        return bucket

    def _logprobs_of(self, plan: StepPlan) -> tuple[int | None, ...]:
        """Alternatives that each sampled row asked for; empty when nobody did."""
        return tuple([self._row_logprobs.get(row) for row in plan.sampled_rows]) if self._row_logprobs else ()

    def _part(self, plan: StepPlan, output: StepOutput) -> "_Part":
        if output.last_token is not None:
            self._last_tokens.add(plan.sampled_rows, output.last_token)
        sampled = tuple(range(len(plan.decode_rows))) + tuple(
            i for i, chunk in enumerate(plan.chunks, start=len(plan.decode_rows)) if chunk.sample
        )
        prompts: list[_PromptSpan] = []
        pooled: list[tuple[int, int]] = []
        at = len(plan.decode_rows)
        for number, chunk in enumerate(plan.chunks, start=at):
            if chunk.pooled:
                pooled.append((chunk.row, number))
            if chunk.prompt_logprobs:
                targets = following_tokens(chunk, self._row_prompts[chunk.row])
                prompts.append(_PromptSpan(chunk.row, at, targets, self._row_prompt_logprobs[chunk.row]))
            at += len(chunk.token_ids)
        return _Part(
            rows=plan.sampled_rows,
            output=output,
            sampled=sampled,
            logprobs=self._logprobs_of(plan),
            prompts=tuple(prompts),
            pooled=tuple(pooled),
            tells_drafts=plan.width > 1,
        )

    def _set_up(self, setup: RowSetup) -> None:
        row = setup.row
        self._forget(row)
        if self._pictures is not None:
            self._pictures.set_up(setup)
        self._row_params[row, :NUM_ROW_FIELDS] = encode_row(setup)
        if self._limits.adapter_slots:
            self._row_params[row, Field.ADAPTER] = setup.adapter
        self._row_stops[row] = encode_stops(setup)[:NUM_STOPS]
        if setup.sampling.logprobs is not None:
            self._row_logprobs[row] = setup.sampling.logprobs
        if setup.sampling.prompt_logprobs is not None:
            self._row_prompt_logprobs[row] = setup.sampling.prompt_logprobs
            self._row_prompts[row] = np.asarray(setup.token_ids[: setup.prompt_len], np.int32)
        if needs_row_state(setup):
            payload = encode_row_state(setup, self._vocab_size)
            self._on_buffer(payload)
            if (last := self._stages[-1]) is None:
                return
            configure = last.executables.configure_row
            assert configure is not None, "the last stage samples"
            last.state = configure(last.state, self._put(np.int32(row), last), self._put(payload, last))

    def _forget(self, row: int) -> None:
        self._row_params[row] = 0
        self._row_stops[row] = NO_TOKEN
        self._row_logprobs.pop(row, None)
        self._row_prompt_logprobs.pop(row, None)
        self._row_prompts.pop(row, None)
        if self._pictures is not None:
            self._pictures.forget(row)

    def _load_adapters(self, loads: tuple[AdapterLoad, ...]) -> None:
        [stage] = self._here
        writer = stage.executables.write_adapter
        assert writer is not None, "the scheduler plans adapters for engines with slots"
        for load in loads:
            assert load.adapter is not None, f"the adapter {load.name!r} came without its weights"
            slot = np.int32(load.slot)
            assert stage.state.adapters is not None, "the writer writes into these"
            written = writer.write(stage.state.adapters, self._put(slot, stage), load.adapter.weights)
            stage.state = dataclasses.replace(stage.state, adapters=written)

    def _encode(self, encodes: tuple[Encode, ...]) -> None:
        """Puts the embeddings of each picture into the pool: from the tower, or from host memory."""
        tower, rows, first = self._tower, self._pictures, self._here[0]
        assert tower is not None and rows is not None, "the scheduler plans pictures for models with a tower"
        self._host_embeddings.begin_step()
        for encode in encodes:
            if encode.load:
                embeddings = tower.place(self._host_embeddings.load(encode.host_id))
            else:
                assert encode.pixels, f"the picture {encode.digest} has no pixels"
                embeddings = tower.encode(encode.picture)
                self._host_embeddings.drop(encode.drops)
                if encode.host_id:
                    self._host_embeddings.keep(encode.host_id, embeddings, encode.num_tokens)
            lines = np.zeros(embeddings.shape[0], np.int32)  # line 0 is of the dummy page
            lines[: encode.num_tokens] = rows.lines(encode.page_ids, encode.num_tokens)
            self._on_buffer(lines)
            write = first.executables.write_embeddings[len(lines)]
            first.state = write(first.state, embeddings, self._put(lines, first))

    def _mask_lines(self, masks: tuple[RowMask, ...]) -> np.ndarray:
        """Line of the masks on the device, and the mask: int32 [masks, 1 + words of the vocabulary]."""
        lines = np.zeros((len(masks), 1 + mask_words(self._vocab_size)), np.int32)
        for line, mask in zip(lines, masks, strict=True):
            words = np.frombuffer(mask.mask, "<i4")
            line[0] = mask.row * self._num_places + mask.place
            line[1 : 1 + len(words)] = words
        return lines

    def _launch(
        self,
        stages: Sequence[Stage | None],
        program: Callable[[Executables], jax.stages.Compiled | None],
        lines: Sequence[tuple[int, ...]] | np.ndarray,
        *,
        slots: int,
        blank: int = 0,
    ) -> None:
        """Launches a program that changes the state of `stages` as often as these lines take, `slots` in each launch.

        `blank`: the first number of a line that changes nothing; its others are 0. The buffers go to the followers
        whether or not a stage is in this process.
        """
        for start in range(0, len(lines), slots):
            block = np.zeros((slots, len(lines[0])), np.int32)
            block[:, 0] = blank
            part = lines[start : start + slots]
            block[: len(part)] = part
            self._on_buffer(block)
            for stage in stages:
                if stage is not None:
                    change = program(stage.executables)
                    assert change is not None, "this stage has the program"
                    stage.state = change(stage.state, self._put(block, stage))

    def _save_pages(self, slots: SlotBytes, saves: tuple[PageSave, ...]) -> None:
        for part, ids in self._launches(saves, [save.page_id for save in saves]):
            packed = [
                stage.executables.gather_pages[len(ids)](stage.state, self._put(ids, stage)) for stage in self._here
            ]
            slots.save([save.slot for save in part], packed)

    def _load_pages(self, slots: SlotBytes, loads: tuple[PageLoad, ...]) -> None:
        for part, ids in self._launches(loads, [load.page_id for load in loads]):
            while len(self._loading) >= LOADING_LAUNCHES:  # so many have room on the device
                jax.block_until_ready(self._loading.popleft())
            done: list[jax.Array] = []
            staged = slots.staged([load.slot for load in part], len(ids))
            for stage, packed in zip(self._here, staged, strict=True):
                scatter = stage.executables.scatter_pages[len(ids)]
                stage.state, scattered = scatter(stage.state, self._put(ids, stage), packed)
                done.append(scattered)
            self._loading.append(done)

    def _launches(self, moves: tuple[Move, ...], page_ids: list[int]) -> Iterator[tuple[tuple[Move, ...], np.ndarray]]:
        """The moves of each launch, and the ids of their pages, padded to what is compiled."""
        counts = sorted(self._here[0].executables.gather_pages)
        start = 0
        while start < len(moves):
            count = pages_of_launch(len(moves) - start, counts)
            yield moves[start : start + count], self._ids(page_ids[start : start + count], count)
            start += count

    def _ids(self, page_ids: list[int], count: int) -> np.ndarray:
        ids = np.full(count, DUMMY_PAGE, np.int32)
        ids[: len(page_ids)] = page_ids
        self._on_buffer(ids)
        return ids

    def time_moves(self) -> Limits:
        """Measures the largest launches that save and load pages, all of them the dummy page. Returns the new limits.
        Before the first plan."""
        slots = self._slots
        assert slots is not None
        count = min(max(self._here[0].executables.scatter_pages), self._limits.slots.num_slots)
        saves = tuple(PageSave(DUMMY_PAGE, slot) for slot in range(count))
        loads = tuple(PageLoad(slot, DUMMY_PAGE) for slot in range(count))
        times_ms = []
        for _ in range(_TIMED_STEPS):
            begin_s = time.perf_counter()
            self._save_pages(slots, saves)
            slots.wait_for(range(count))
            saved_s = time.perf_counter()
            self._load_pages(slots, loads)
            jax.block_until_ready(self._loading[-1])
            times_ms.append(((saved_s - begin_s) * 1000 / count, (time.perf_counter() - saved_s) * 1000 / count))
        save_ms, load_ms = (min(times) for times in zip(*times_ms, strict=True))
        moved = self._limits.slots._replace(save_ms=save_ms, load_ms=load_ms)
        self._limits = dataclasses.replace(self._limits, slots=moved)
        return self._limits

    def _put(self, array: np.ndarray | np.int32 | jax.Array, stage: Stage) -> jax.Array:
        if stage.sharding.is_fully_addressable:
            return jax.device_put(array, stage.sharding)
        if isinstance(array, jax.Array):
            assert array.sharding == stage.sharding, "links have put it there"
            return array
        # Over several processes `device_put` would first compare their values with a collective of its own.
        array = np.asarray(array)
        shards = [jax.device_put(array, device) for device in sorted(stage.sharding.addressable_devices, key=_number)]
        return jax.make_array_from_single_device_arrays(array.shape, stage.sharding, shards)


def _told_tokens(plan: StepPlan) -> list[tuple[int, int, int]]:
    """The tokens of new rows that are in their pages already, for the drafter: row, position and token."""
    starts = {chunk.row: chunk.start for chunk in reversed(plan.chunks)}  # a row's first chunk counts
    return [
        (setup.row, position, token_id)
        for setup in plan.setups
        for position, token_id in enumerate(setup.token_ids[: starts[setup.row]])
    ]


def is_full(error: Exception) -> bool:
    """Whether an error of JAX says that the memory of a device has no room."""
    return "RESOURCE_EXHAUSTED" in str(error)


def _free(arrays: Iterable[jax.Array]) -> None:
    """At once, whoever else still refers to them."""
    for array in arrays:
        array.delete()


def _number(device: jax.Device) -> int:  # pyright: ignore[reportInvalidTypeForm]
    return device.id


class _LastTokens:
    """The last tokens of all rows, as they were after each of the latest parts. Mutated by the runner.

    The first stage may start on a part as soon as the tokens of its own rows are known; taking the newest array would
    make it wait for parts that are still on their way. Each array holds what all earlier parts drew, too.
    """

    def __init__(self, max_rows: int, num_parts: int) -> None:
        self._arrays: list[Any] = [np.zeros(max_rows + 1, np.int32)]
        self._oldest = 0  # number of the part of the first array
        self._part_of_row = np.zeros(max_rows + 1, np.int64)
        self._kept = num_parts + 1

    def after(self, rows: Sequence[int]) -> Any:
        """The oldest array that has the last tokens of `rows`."""
        needed = int(self._part_of_row[list(rows)].max()) if rows else 0
        return self._arrays[max(0, needed - self._oldest)]

    def add(self, rows: Sequence[int], array: jax.Array) -> None:
        """What the newest part left, which drew tokens for `rows`."""
        self._arrays.append(array)
        self._part_of_row[list(rows)] = self._oldest + len(self._arrays) - 1
        if len(self._arrays) > self._kept:
            self._arrays.pop(0)
            self._oldest += 1


@dataclasses.dataclass(frozen=True, slots=True)
class _PromptSpan:
    """Where a chunk's prompt log-probabilities lie: tokens [start, start + len(targets)) of the step."""

    row: int
    start: int
    targets: np.ndarray
    num_top: int


class DeviceInFlight:
    """A launched step. `result` may be called once."""

    __slots__ = ("_parts", "_rows", "_slots")

    def __init__(self, rows: tuple[int, ...], parts: Sequence["_Part"], slots: SlotBytes | None = None) -> None:
        self._rows = rows
        self._parts = parts
        self._slots = slots

    def result(self) -> StepResult:
        """Waits for the step and reads what was asked for."""
        result = self._read()
        if self._slots is None or not (num_draining := self._slots.num_draining):
            return result
        return dataclasses.replace(result, num_draining=num_draining)

    def _read(self) -> StepResult:
        if len(self._parts) == 1:
            return self._parts[0].result()
        token_ids: dict[int, int] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        prompts: dict[int, list[TokenLogprobs]] = {}
        sums: dict[int, list[float]] = {}
        for part in self._parts:
            found = part.result()
            token_ids.update(zip(part.rows, found.token_ids, strict=True))
            for row, entry in zip(part.rows, found.logprobs or (), strict=False):
                if entry is not None:
                    logprobs[row] = entry
            for row, entries in (found.prompt_logprobs or {}).items():
                prompts.setdefault(row, []).extend(entries)
            for row, values in (found.hidden_sums or {}).items():
                sums[row] = [a + b for a, b in zip(sums[row], values, strict=True)] if row in sums else values
        return StepResult(
            token_ids=[token_ids[row] for row in self._rows],
            logprobs=[logprobs.get(row) for row in self._rows] if logprobs else None,
            prompt_logprobs=prompts or None,
            hidden_sums=sums or None,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Drawn:
    """The tokens of all rows of a part, behind each other; `counts` and `drafts` as in `StepResult`."""

    token_ids: list[int]
    counts: list[int] | None = None
    drafts: list[list[Drafted]] | None = None


@dataclasses.dataclass(slots=True, kw_only=True)
class _Part:
    """What one launch left on the device. `result` may be called once.

    Attributes:
      rows: those that drew, whose lines in the batch are `sampled`.
      logprobs: alternatives that each of them asked for; empty when nobody did.
      pooled: rows whose hidden states were summed, and where their sums lie.
      tells_drafts: the result says what became of drafts.
    """

    rows: tuple[int, ...]
    output: StepOutput
    sampled: tuple[int, ...]
    logprobs: tuple[int | None, ...]
    prompts: tuple[_PromptSpan, ...]
    pooled: tuple[tuple[int, int], ...]
    tells_drafts: bool

    def __post_init__(self) -> None:
        output = self.output
        for leaf in (output.token_ids, output.drafted, output.accepted):
            if leaf is not None:
                leaf.copy_to_host_async()  # on its way while the host plans the next step

    def result(self) -> StepResult:
        """Waits for the launch and reads what was asked for."""
        token_ids, accepted = np.asarray(self.output.token_ids), self.output.accepted
        if accepted is None:
            drawn = _Drawn(token_ids[0, list(self.sampled), 0].tolist())
        else:
            drawn = self._read_rounds(token_ids, np.asarray(accepted))
        asked = any(num_top is not None for num_top in self.logprobs)
        return StepResult(
            token_ids=drawn.token_ids,
            logprobs=self._read_logprobs(drawn) if asked else None,
            prompt_logprobs={span.row: self._read_prompt(span) for span in self.prompts} if self.prompts else None,
            hidden_sums=self._read_sums() if self.pooled else None,
            counts=drawn.counts,
            drafts=drawn.drafts if self.tells_drafts else None,
        )

    def _read_rounds(self, token_ids: np.ndarray, accepted: np.ndarray) -> _Drawn:
        """`token_ids` [K, R, W], `accepted` [K, R]."""
        assert self.output.drafted is not None, "rounds say what they drafted"
        drafted = np.asarray(self.output.drafted)
        drawn: list[int] = []
        counts: list[int] = []
        drafts: list[list[Drafted]] = []
        for line in self.sampled:
            before, rounds = len(drawn), np.flatnonzero(accepted[:, line] != NOT_TAKEN).tolist()
            for number in rounds:
                drawn += token_ids[number, line, : accepted[number, line] + 1].tolist()
            counts.append(len(drawn) - before)
            drafts.append([Drafted(int(drafted[number, line]), int(accepted[number, line])) for number in rounds])
        return _Drawn(drawn, counts, drafts)

    def _read_logprobs(self, drawn: _Drawn) -> list[TokenLogprobs | None]:
        """In the order of `drawn`: row by row, round by round, place by place."""
        rounds = _to_host(self.output.logprobs, slice(None))
        by_round = [jax.tree.map(lambda a, k=k: a[k], rounds) for k in range(rounds.rank.shape[0])]
        width, taken = self.output.token_ids.shape[2], self.output.accepted
        accepted = np.zeros(self.output.token_ids.shape[:2], np.int32) if taken is None else np.asarray(taken)
        token_ids, found = iter(drawn.token_ids), []
        for line, num_top in zip(self.sampled, self.logprobs, strict=True):
            for number, last in enumerate(accepted[:, line].tolist()):
                for place in range(last + 1):
                    token_id = next(token_ids)
                    entry = None
                    if num_top is not None:
                        entry = _read_entry(by_round[number], line * width + place, token_id, num_top)
                    found.append(entry)
        return found

    def _read_sums(self) -> dict[int, list[float]]:
        assert self.output.hidden_sums is not None, "a decode step has no prompt tokens"
        sums = np.asarray(self.output.hidden_sums)
        return {row: sums[at].tolist() for row, at in self.pooled}

    def _read_prompt(self, span: _PromptSpan) -> list[TokenLogprobs]:
        assert self.output.prompt is not None, "a decode step has no prompt tokens"
        logprobs = _to_host(self.output.prompt, slice(span.start, span.start + len(span.targets)))
        return [_read_entry(logprobs, i, int(target), span.num_top) for i, target in enumerate(span.targets)]


def _to_host(logprobs: Logprobs, where: slice) -> Logprobs:
    """The lines of `where`, as numpy."""
    return jax.tree.map(lambda a: np.asarray(a)[where], logprobs)


def _read_entry(logprobs: Logprobs, i: int, token_id: int, num_top: int) -> TokenLogprobs:
    """Line `i` as clients see it."""
    return TokenLogprobs(
        token_id,
        float(logprobs.logprob[i]),
        int(logprobs.rank[i]),
        tuple(logprobs.top_ids[i, :num_top].tolist()),
        tuple(logprobs.top_logprobs[i, :num_top].tolist()),
    )
