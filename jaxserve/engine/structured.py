"""Constrained output in the loop: grammars for requests, and masks and drafts for the rows that draw under a grammar.

Grammars are compiled in `text.grammar`. The scheduler plans a row with a grammar only after its last tokens have been
committed, and so been accepted by its matcher. That is why the host makes the drafts of such a row, where all others
have those of the device: it knows the last token, and what the grammar leaves no choice about needs no guess. Each
draft comes with the mask behind it, so that the row draws at each place under the mask that it would have in a step of
one token. The plan leaves this module complete: a device, a log or another host needs nothing beside it.
"""

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from jaxserve.api import Request, SamplingParams
from jaxserve.engine.lookup import History, LookupOptions
from jaxserve.errors import InvalidRequest, UnsupportedOption
from jaxserve.sched.base import Scheduler, TakesDrafts
from jaxserve.sched.plan import Limits, RowDraft, RowMask, StepPlan
from jaxserve.text.base import Tokenizer
from jaxserve.text.grammar import GrammarCompiler
from jaxserve.values.structured_output import Grammar, Matcher


class Grammars:
    """Compiles the grammars of requests. May be used from several threads."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Tokenizer and vocabulary of the model, which may have more ids than the tokenizer."""
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(i for i in eos_token_ids if i < vocab_size)
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    def compile(
        self, sampling: SamplingParams, prompt_ids: Sequence[int], tokenizer: Tokenizer | None
    ) -> Grammar | None:
        """The grammar of a request; None when it asks for none. Takes milliseconds, at worst some seconds.

        Raises InvalidRequest for a schema or grammar that cannot be compiled, UnsupportedOption for one that takes too
        much to compile, and for a model without a tokenizer or without an end-of-sequence token.
        """
        if sampling.structured is None:
            return None
        if tokenizer is None:
            raise UnsupportedOption("structured output needs a tokenizer, and this engine was started without")
        if not self._eos_token_ids:
            raise UnsupportedOption("structured output needs an end-of-sequence token, and this model has none")
        with self._lock:
            if self._compiler is None or self._compiler.tokenizer is not tokenizer:
                self._compiler = GrammarCompiler(tokenizer, self._vocab_size, self._eos_token_ids)
            compiler = self._compiler
        allowed = sampling.allowed_token_ids
        if allowed is not None and max(allowed) >= self._vocab_size:
            raise InvalidRequest(
                f"allowed_token_ids has token id {max(allowed)}, but the vocabulary ends at {self._vocab_size - 1}"
            )
        return compiler.compile(
            sampling.structured,
            prompt_ids=prompt_ids,
            allowed_token_ids=allowed,
            skip_special_tokens=sampling.skip_special_tokens,
        )


class Matched(Protocol):
    """The part of a live request that masks and drafts need."""

    @property
    def request(self) -> Request: ...

    @property
    def matchers(self) -> Sequence[Matcher]:
        """One for each of the n sequences; empty without a grammar."""
        ...


class _Place:
    """The sequence of a row: where it stands in its grammar, and the drafts of its next tokens. Mutated by RowMasks."""

    __slots__ = ("drafts", "history", "index", "matcher", "num_read", "prompt_len", "request_id")

    def __init__(self, request: Request, index: int, matcher: Matcher, lookup: LookupOptions) -> None:
        self.request_id = request.request_id
        self.index = index
        self.matcher = matcher
        self.prompt_len = len(request.prompt_token_ids)
        self.history = History(request.prompt_token_ids, lookup)
        self.num_read = -1  # tokens of the matcher that drafts were made behind
        self.drafts: list[int] = []

    def foresee(self, most: int) -> bool:
        """Makes up to `most` drafts, if there are tokens that the last ones do not follow. Returns whether it did."""
        tokens = self.matcher.tokens
        if self.num_read == len(tokens):
            return False
        self.history.extend(tokens[max(0, self.num_read) :])
        self.num_read = len(tokens)
        self.drafts = self.matcher.foresee(most, lambda more: self.history.follow(more, most))
        return True


class RowMasks:
    """The rows that draw under a grammar. Mutated by the loop thread."""

    def __init__(self, lookup: LookupOptions = LookupOptions()) -> None:  # noqa: B008 (frozen)
        self._lookup = lookup
        self._places: dict[int, _Place] = {}
        self._limits: Limits | None = None
        self._most_drafts = 0

    def foresee(self, scheduler: Scheduler, limits: Limits, live: Mapping[str, Matched]) -> None:
        """Makes drafts for the rows that drew tokens since, and tells the scheduler how many. Before each plan.

        Until that plan a row has the place of its former request, whose id may be that of another one by now. The time
        is bounded: a row has fewer drafts than the widest step, and its masks are made once it is planned.
        """
        if not self._places or not isinstance(scheduler, TakesDrafts):
            return
        if limits is not self._limits:
            self._limits, self._most_drafts = limits, max(bucket.width for bucket in limits.buckets) - 1
        for place in self._places.values() if self._most_drafts else ():
            found = live.get(place.request_id)
            matchers = () if found is None else found.matchers
            if place.index >= len(matchers) or matchers[place.index] is not place.matcher:
                continue
            if place.foresee(self._most_drafts):
                scheduler.note_drafts(place.request_id, place.index, len(place.drafts))

    def put(self, plan: StepPlan | None, live: Mapping[str, Matched]) -> StepPlan | None:
        """The plan with masks and drafts for each row that needs them; the very plan when none does."""
        if not live:
            self._places.clear()  # the row's former sequence has ended, perhaps before the last plan that could say so
        if plan is None or not (plan.setups or self._places):
            return plan
        for row in plan.freed_rows:
            self._places.pop(row, None)
        for setup in plan.setups:
            found = live.get(setup.request_id)
            if found is not None and found.matchers:
                matcher = found.matchers[setup.index]
                self._places[setup.row] = _Place(found.request, setup.index, matcher, self._lookup)
        if not self._places:
            return plan
        masks: list[RowMask] = []
        drafts: list[RowDraft] = []
        row_tokens = plan.row_tokens or (1,) * len(plan.decode_rows)
        for row, position, most in zip(plan.decode_rows, plan.decode_positions, row_tokens, strict=True):
            if row not in self._places:
                continue
            masks.append(self._mask(row, position + 1))
            if plan.width > 1:
                place = self._places[row]
                behind = place.matcher.masks_after(place.drafts[: most - 1])
                masks += [RowMask.of(row, mask, number) for number, mask in enumerate(behind, start=1)]
                drafts.append(RowDraft(row, tuple(place.drafts[: len(behind)])))
        drawing = [chunk for chunk in plan.chunks if chunk.sample and chunk.row in self._places]
        masks += [self._mask(chunk.row, chunk.start + len(chunk.token_ids)) for chunk in drawing]
        return dataclasses.replace(plan, masks=tuple(masks), drafts=tuple(drafts)) if masks else plan

    def _mask(self, row: int, num_tokens: int) -> RowMask:
        """`num_tokens`: of the sequence, before the one that will be drawn."""
        place = self._places[row]
        taken = len(place.matcher.tokens)
        assert num_tokens - place.prompt_len == taken, (
            f"row {row} draws its output token {num_tokens - place.prompt_len}, its grammar has seen {taken}: a row "
            "with a grammar must wait for the commit of its last token"
        )
        return RowMask.of(row, place.matcher.mask)
