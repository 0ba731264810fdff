"""Constrained output: schemas, regexes, choices and grammars, compiled for one vocabulary by llguidance.

The bytes of every token as the grammar sees them, a bounded cache of compiled grammars, and the matcher of one sequence
are here. Rows and steps are in `engine.structured`; a mask here is bytes.

The grammar describes the text that follows the prompt, byte for byte. Where a tokenizer drops a space at the very
beginning of a text and the prompt has no text, tokens that begin with a space may not come first.
"""

import collections
import dataclasses
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from jaxserve.errors import InvalidRequest, UnsupportedOption
from jaxserve.text.base import Tokenizer
from jaxserve.text.json_schema import enforceable, name_of, schemas_in, white_space
from jaxserve.text.schema_fault import find_fault
from jaxserve.text.trial import Trial
from jaxserve.values.structured_output import StructuredOutput

_CACHED_GRAMMARS = 64
_EMBEDDED = "%json "  # before a schema within a grammar
_ANY_OBJECT = '{"type":"object"}'
_ANCHORS = ("\n", "a", ".")  # many tokenizers put a space before the first word, and none after one of these
_LONGEST_PIECE = 128
_SPELLED_CHARS = 200
_PUNCTUATION = frozenset("\\.+*?()|[]{}^$#&-~/")
# An object of 1000 optional members needs 3999. The worst grammars take the loop 70 ms a token then; with 10,000, 750.
_MAX_ITEMS_IN_ROW = 4000
_MAX_LEXER_STATES = 50_000  # about 2 kB each, for every running sequence
_TRIAL_S = 3.0  # of processor time; the largest schemas in use take half a second


class Vocabulary:
    """A tokenizer in the form that llguidance needs. Immutable; making one takes up to a second for large vocabularies.

    Raises UnsupportedOption for a tokenizer whose tokens have no exact bytes.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """`vocab_size`: of the model; ids that the tokenizer does not know are never allowed."""
        assert eos_token_ids, "nothing could end a text"
        pieces = [tokenizer.token_bytes(i) if i < tokenizer.vocab_size else b"" for i in range(vocab_size)]
        special = sorted(i for i in tokenizer.special_ids.union(eos_token_ids) if i < vocab_size)
        hidden = set(special)
        plain = {piece: i for i, piece in reversed([*enumerate(pieces)]) if piece and i not in hidden}
        source = _TokenSource(tokenizer, pieces, special, plain, eos_token_ids[0])
        self.num_words = -(-vocab_size // 32)
        self.backend = LLTokenizer(TokenizerWrapper(source), eos_token=list(eos_token_ids))
        self.not_first = 0  # bits of the tokens that a text cannot begin with
        spaced = [i for i, piece in enumerate(pieces) if piece.startswith(b" ") and i not in special]
        if spaced and not tokenizer.decode([spaced[0]]).startswith(" "):
            self.not_first = token_bits(spaced)


@dataclasses.dataclass(frozen=True, slots=True)
class _TokenSource:
    """The methods that llguidance calls: it asks for the tokens of text that a grammar leaves no choice about.

    `plain`: the lowest id for each run of bytes, without special tokens.
    """

    tokenizer: Tokenizer
    tokens: list[bytes]
    special_token_ids: list[int]
    plain: dict[bytes, int]
    eos_token_id: int
    bos_token_id: int | None = None

    def __call__(self, text: str) -> list[int]:
        """Ids whose bytes are those of `text` in the middle of a text; the tokenizer's own ids where their bytes agree.

        Of a long text only the beginning is encoded: the next call comes after each token, on the loop's thread.
        """
        if len(text) > _SPELLED_CHARS:
            return self(text[:_SPELLED_CHARS])[:-1]  # the last one may be cut where the text is
        wanted = text.encode()
        for anchor in ("", *_ANCHORS):
            before = self.tokenizer.encode(anchor, add_special_tokens=False) if anchor else []
            both = self.tokenizer.encode(anchor + text, add_special_tokens=False)
            ids = both[len(before) :]
            if both[: len(before)] == before and self._spells(ids, wanted):
                return ids
        return self._longest_first(wanted)

    def _spells(self, ids: Sequence[int], wanted: bytes) -> bool:
        tokens, plain = self.tokens, self.plain
        pieces = [tokens[i] if i < len(tokens) else b"" for i in ids]
        return b"".join(pieces) == wanted and all(piece in plain for piece in pieces)

    def _longest_first(self, wanted: bytes) -> list[int]:
        ids: list[int] = []
        start = 0
        while start < len(wanted):
            end = min(len(wanted), start + _LONGEST_PIECE)
            while end > start and wanted[start:end] not in self.plain:
                end -= 1
            if end == start:
                break  # no token begins so: the part before it is the answer
            ids.append(self.plain[wanted[start:end]])
            start = end
        return ids


def token_bits(token_ids: Sequence[int]) -> int:
    """A number with these bits set."""
    size = max(token_ids, default=-1) // 8 + 1
    found = bytearray(size)
    for token_id in token_ids:
        found[token_id >> 3] |= 1 << (token_id & 7)
    return int.from_bytes(found, "little")


class TextMatcher:
    """A `Matcher` of `structured_output`. Mutated by the engine's loop, through `accept` alone."""

    __slots__ = ("_backend", "_ends", "_kept", "_size", "mask", "tokens")

    def __init__(self, backend: LLMatcher, mask: bytes, kept: int | None, ends: frozenset[int]) -> None:
        """`kept`: bits of the tokens that may be generated at all; None: any. `ends`: tokens that end a text."""
        self._backend = backend
        self._ends = ends
        self._kept = kept
        self._size = len(mask)
        self.mask = mask if kept is None else _common(mask, kept, 0)
        self.tokens: list[int] = []

    def accept(self, token_id: int) -> None:
        """See `Matcher.accept`."""
        assert _allows(self.mask, token_id), f"token {token_id} is not in the grammar"
        self._backend.consume_token(token_id)
        self.tokens.append(token_id)
        self.mask = self._read_mask(self._backend, len(self.tokens))

    def take_known(self, token_ids: Sequence[int]) -> None:
        """See `Matcher.take_known`. One mask for all of them: each costs more than its token."""
        if not token_ids:
            return
        taken = self._backend.try_consume_tokens(list(token_ids))
        if taken < len(token_ids):
            raise InvalidRequest(
                f"resume has token {token_ids[taken]} after {taken} others, which the structured output does not "
                "allow; send the options with which the request began"
            )
        self.tokens += token_ids
        self.mask = self._read_mask(self._backend, len(self.tokens))

    def _read_mask(self, backend: LLMatcher, num_tokens: int) -> bytes:
        mask = _read_mask(backend, self._size, f"after {num_tokens} tokens")
        return mask if self._kept is None else _common(mask, self._kept, num_tokens)

    def foresee(self, most: int, follow: Callable[[Sequence[int]], Sequence[int]]) -> list[int]:
        """See `Matcher.foresee`. On a copy: a grammar that could not go on behind a guess goes on behind others."""
        ahead = self._backend.deep_copy()
        found: list[int] = []
        while len(found) < most and not ahead.is_stopped():
            guesses = [*(ahead.compute_ff_tokens() or follow(found))][: most - len(found)]
            guesses = guesses[: next((at for at, guess in enumerate(guesses) if guess in self._ends), None)]
            taken = ahead.try_consume_tokens(guesses)
            if not taken:
                break
            found += guesses[:taken]
        return found

    def masks_after(self, token_ids: Sequence[int]) -> list[bytes]:
        """See `Matcher.masks_after`."""
        ahead, mask, found = self._backend.deep_copy(), self.mask, []
        for token_id in token_ids:
            if not _allows(mask, token_id):
                break
            ahead.consume_token(token_id)
            try:
                mask = self._read_mask(ahead, len(self.tokens) + len(found) + 1)
            except InvalidRequest:
                break
            found.append(mask)
        return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextGrammar:
    """A `Grammar` of `structured_output`: an initial matcher, to be copied."""

    backend: LLMatcher
    first_mask: bytes
    ends: frozenset[int]
    kept: int | None = None

    def start(self) -> TextMatcher:
        """See `Grammar.start`."""
        return TextMatcher(self.backend.deep_copy(), self.first_mask, self.kept, self.ends)


class GrammarCompiler:
    """Compiles for one tokenizer, and remembers. May be used from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """`vocab_size` and `eos_token_ids`: of the model."""
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None  # made by the first request that needs it
        self._trial = Trial(seconds=_TRIAL_S, max_items_in_row=_MAX_ITEMS_IN_ROW, max_lexer_states=_MAX_LEXER_STATES)
        # An error is the reason why there is no grammar: finding it out again would hold up other requests.
        self._cache: collections.OrderedDict[StructuredOutput, TextGrammar | InvalidRequest] = collections.OrderedDict()

    def compile(
        self,
        structured: StructuredOutput,
        *,
        prompt_ids: Sequence[int] = (),
        allowed_token_ids: Sequence[int] | None = None,
        skip_special_tokens: bool = True,
    ) -> TextGrammar:
        """The grammar of one request. Takes milliseconds, at worst some seconds.

        Raises InvalidRequest with llguidance's words for what cannot be compiled or begins with no token that is
        allowed, UnsupportedOption for grammars that take too much to compile and for a vocabulary that cannot be
        constrained.
        """
        vocabulary = self._find_vocabulary()
        grammar = self._find(structured, vocabulary)
        special = self.tokenizer.special_ids if skip_special_tokens else frozenset()
        if vocabulary.not_first and all(i in special for i in prompt_ids):
            first = int.from_bytes(grammar.first_mask, "little") & ~vocabulary.not_first
            if first:  # else the grammar wants a space, which this tokenizer will not show
                grammar = dataclasses.replace(grammar, first_mask=first.to_bytes(len(grammar.first_mask), "little"))
        if allowed_token_ids is None:
            return grammar
        kept = token_bits((*allowed_token_ids, *self._eos_token_ids))
        _common(grammar.first_mask, kept, 0)
        return dataclasses.replace(grammar, kept=kept)

    def _find_vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self.tokenizer, self._vocab_size, self._eos_token_ids)
            return self._vocabulary

    def _find(self, structured: StructuredOutput, vocabulary: Vocabulary) -> TextGrammar:
        with self._lock:
            known = self._cache.get(structured)
            if known is not None:
                self._cache.move_to_end(structured)
        if known is None:
            try:
                known = self._compile(structured, vocabulary)
            except InvalidRequest as error:
                known = error
            with self._lock:
                self._cache[structured] = known
                if len(self._cache) > _CACHED_GRAMMARS:
                    self._cache.popitem(last=False)
        if isinstance(known, InvalidRequest):
            raise type(known)(str(known))
        return known

    def _compile(self, structured: StructuredOutput, vocabulary: Vocabulary) -> TextGrammar:
        try:
            source = self._source(structured)
        except UnsupportedOption as error:
            fault = self._find_fault(structured, vocabulary, whole_schemas=True)
            raise error if fault is None else UnsupportedOption(fault) from error
        backend = _matcher(vocabulary, source)
        try:
            if backend.is_error():
                raise InvalidRequest(f"the {_kind(structured)} cannot be compiled: {_reason(backend)}")
            first_mask = _read_mask(backend, vocabulary.num_words * 4, "at its beginning")
        except InvalidRequest as error:
            fault = self._find_fault(structured, vocabulary)
            raise error if fault is None else InvalidRequest(fault) from error
        return TextGrammar(backend=backend, first_mask=first_mask, ends=frozenset(self._eos_token_ids))

    def _find_fault(
        self, structured: StructuredOutput, vocabulary: Vocabulary, *, whole_schemas: bool = False
    ) -> str | None:
        """Words for the schema in a form that cannot be compiled, and for the place in it; None: there is no such.

        `whole_schemas`: places are not looked for, since each trial may take as long as the one that failed.
        """

        def reason_of(schema: str) -> str | None:
            try:
                source = self._trial.check("schema", _schema_source(schema))
            except UnsupportedOption as error:
                return str(error)
            backend = _matcher(vocabulary, source)
            if not backend.is_error():
                backend.compute_bitmask()  # some faults are found at the first token
            return _reason(backend) if backend.is_error() else None

        schemas = _schemas_of(structured)
        for name, schema in schemas:
            if whole_schemas:
                reason = reason_of(json.dumps(schema)) if len(schemas) > 1 or structured.grammar else None
                if reason is not None:
                    return f"the {name} cannot be compiled: {reason}"
            elif (fault := find_fault(schema, reason_of)) is not None:
                return f"the {name} cannot be compiled at #{fault.place}: {fault.reason}"
        if not schemas or structured.grammar is None:
            return None
        return f"the {schemas[0][0]} and what surrounds it cannot be compiled together; give a simpler one"

    def _source(self, structured: StructuredOutput) -> str:
        """The source for llguidance, known to compile in bounded time. Raises InvalidRequest when it cannot be read."""
        kind = _kind(structured)
        if structured.choice:
            # One expression, which becomes one automaton; as alternatives of a grammar, thousands would be too many.
            return LLMatcher.grammar_from_regex("|".join(map(_escaped, structured.choice)))  # linear time
        if structured.regex is not None:
            return self._trial.check(kind, LLMatcher.grammar_from_regex(structured.regex))
        if structured.grammar is not None:
            if "::=" in structured.grammar:
                return self._trial.check(kind, structured.grammar, is_gbnf=True)
            return self._trial.check(kind, LLMatcher.grammar_from_lark(structured.grammar))
        source = _schema_source(enforceable(structured.json_schema or _ANY_OBJECT))
        return source if structured.json_object else self._trial.check(kind, source)


def _matcher(vocabulary: Vocabulary, source: str) -> LLMatcher:
    limits = LLParserLimits(
        max_items_in_row=_MAX_ITEMS_IN_ROW, max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
    )
    return LLMatcher(vocabulary.backend, source, log_level=0, limits=limits)


def _schema_source(schema: str) -> str:
    """Raises InvalidRequest for a text that is no schema."""
    try:
        has_options = '"x-guidance"' in schema
        defaults: Any = white_space(json.loads(schema) if has_options else None)
        return LLMatcher.grammar_from_json_schema(schema, defaults=defaults)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the json_schema cannot be read: {error}") from error


def _schemas_of(structured: StructuredOutput) -> list[tuple[str, dict[str, Any]]]:
    """The schemas of a form with their names for messages: those that were named, else the whole one.

    A grammar of a client has none: its own text is the best place to look.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    for root in _roots(structured):
        inner_first = sorted(schemas_in(root), key=lambda each: -each[0].count("/"))
        named = [(name, part) for _, part in inner_first if (name := name_of(part)) is not None]
        if structured.json_schema is not None and not named and isinstance(root, dict):
            named = [(_kind(structured), root)]
        found += named
    return found


def _roots(structured: StructuredOutput) -> Iterator[Any]:
    if structured.json_schema is not None:
        try:
            yield json.loads(enforceable(structured.json_schema))
        except (ValueError, RecursionError):
            return  # llguidance has said why
    for place in re.finditer(re.escape(_EMBEDDED), structured.grammar or ""):
        try:
            yield json.JSONDecoder().raw_decode(place.string, place.end())[0]
        except (ValueError, RecursionError):
            continue


def _escaped(text: str) -> str:
    """A regular expression that matches `text` alone."""
    return "".join(f"\\{c}" if c in _PUNCTUATION else c for c in text)


def _kind(structured: StructuredOutput) -> str:
    names = ("json_schema", "regex", "choice", "grammar", "json_object")
    return next(name for name in names if getattr(structured, name))


def _reason(backend: LLMatcher) -> str:
    """llguidance's message, without the parts that only its authors understand."""
    text = backend.get_error().removesuffix("<non-verbose/>").partition("\n  while processing ")[0].strip()
    return "no text fits it; look for a reference to itself" if text == "NoExtensionBias" else text


def _allows(mask: bytes, token_id: int) -> bool:
    return token_id >> 3 < len(mask) and bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def _read_mask(backend: LLMatcher, size: int, where: str) -> bytes:
    mask = backend.compute_bitmask()
    if backend.is_error():
        raise InvalidRequest(f"the structured output cannot go on {where}: {_reason(backend)}")
    # llguidance has room for one token more, which is a word more where the vocabulary fills its last one.
    assert len(mask) in (size, size + 4) and not any(mask[size:]), (len(mask), size)
    return mask[:size]


def _common(mask: bytes, kept: int, num_tokens: int) -> bytes:
    both = int.from_bytes(mask, "little") & kept
    if not both:
        raise InvalidRequest(
            f"allowed_token_ids has no token that the structured output could go on with after {num_tokens} tokens; "
            "allow more tokens, or leave one of the two out"
        )
    return both.to_bytes(len(mask), "little")
