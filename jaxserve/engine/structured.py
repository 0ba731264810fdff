"""Constrained output in the loop: grammars for requests, and masks for the rows that draw under a grammar.

Grammars are compiled in `text.grammar`. The scheduler plans a row with a grammar only after its last token has been
committed, and so been accepted by its matcher. The plan leaves this module complete: a device, a log or another host
needs nothing beside it.
"""

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from jaxserve.api import SamplingParams
from jaxserve.errors import InvalidRequest, UnsupportedOption
from jaxserve.sched.plan import RowMask, StepPlan
from jaxserve.structured_output import Grammar, Matcher
from jaxserve.text.base import Tokenizer
from jaxserve.text.grammar import GrammarCompiler


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
    """The part of a live request that masks need."""

    @property
    def matchers(self) -> Sequence[Matcher]:
        """One for each of the n sequences; empty without a grammar."""
        ...


class _Place:
    """A matcher and the prompt of its sequence. Never changed."""

    __slots__ = ("matcher", "prompt_len")

    def __init__(self, matcher: Matcher, prompt_len: int) -> None:
        self.matcher = matcher
        self.prompt_len = prompt_len


class RowMasks:
    """The rows that draw under a grammar. Mutated by the loop thread."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}

    def put(self, plan: StepPlan | None, live: Mapping[str, Matched]) -> StepPlan | None:
        """The plan with a mask for each row that needs one; the very plan when none does."""
        if not live:
            self._places.clear()  # the row's former sequence has ended, perhaps before the last plan that could say so
        if plan is None or not (plan.setups or self._places):
            return plan
        for row in plan.freed_rows:
            self._places.pop(row, None)
        for setup in plan.setups:
            found = live.get(setup.request_id)
            if found is not None and found.matchers:
                self._places[setup.row] = _Place(found.matchers[setup.index], setup.prompt_len)
        if not self._places:
            return plan
        masks = [
            self._mask(row, position + 1)
            for row, position in zip(plan.decode_rows, plan.decode_positions, strict=True)
            if row in self._places
        ]
        drawing = [chunk for chunk in plan.chunks if chunk.sample and chunk.row in self._places]
        masks += [self._mask(chunk.row, chunk.start + len(chunk.token_ids)) for chunk in drawing]
        return dataclasses.replace(plan, masks=tuple(masks)) if masks else plan

    def _mask(self, row: int, num_tokens: int) -> RowMask:
        """`num_tokens`: of the sequence, before the one that will be drawn."""
        place = self._places[row]
        taken = place.matcher.num_tokens
        assert num_tokens - place.prompt_len == taken, (
            f"row {row} draws its output token {num_tokens - place.prompt_len}, its grammar has seen {taken}: a row "
            "with a grammar must wait for the commit of its last token"
        )
        return RowMask.of(row, place.matcher.mask)
