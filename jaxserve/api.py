"""The values that all packages exchange: `SamplingParams`, `RequestOptions`, `Request`, `Resume`, `TokenEvent`, ...

They are frozen, and checking a value against itself is the only logic here. Limits of a particular server are checked
where they are known (`engine`), limits of the device where they are known (`sched`).

Letters used for shapes in the whole package:

    T tokens in a step      R request rows         P pages per row        S context length
    D model width           F feed-forward width   N query heads          K key/value heads
    G = N / K               H head dim             V vocabulary           L layers      E experts
"""

import dataclasses
import difflib
import enum
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from jaxserve.errors import InvalidRequest, UnsupportedOption
from jaxserve.values.content import MAX_DIGEST_BYTES, Adapter, ContentSpan, PlacedPicture
from jaxserve.values.structured_output import Grammar, StructuredFields, StructuredOutput

__all__ = [
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_LEN",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_STOP_TOKEN_IDS",
    "NO_OPTIONS",
    "FinishReason",
    "Known",
    "Pooling",
    "PromptInfo",
    "Request",
    "RequestOptions",
    "Resume",
    "ResumeReason",
    "SamplingParams",
    "StructuredOutput",
    "TokenEvent",
    "TokenLogprobs",
    "check_request",
]

MAX_LOGPROBS = 20  # entries of the fixed top-k that the compiled step returns
MAX_STOP_TOKEN_IDS = 32  # per-row device slots, the end-of-sequence ids of the model included
MAX_LOGIT_BIAS = 512  # per-row device slots; OpenAI documents 300
MAX_BAD_WORDS = 32  # per-row device slots, a token sequence each; most words need two, with and without a space
MAX_BAD_WORD_LEN = 8  # tokens of one bad word
_MAX_BAD_WORD_CHARS = 1024  # more than so many tokens spell; each word is encoded several times to find them


class FinishReason(enum.StrEnum):
    """Why a sequence ended, in the words of the OpenAI API."""

    STOP = "stop"  # end-of-sequence, a stop token id or a stop string
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # cancelled by the client, a deadline or shutdown
    ERROR = "error"


MAX_AGE_S = 600.0  # the age is what a caller says, and nobody may wait without end for those who exaggerate


class ResumeReason(enum.StrEnum):
    """Why a request left the engine that had begun with it."""

    CLIENT = "client"  # its client lost the connection
    DIED = "died"  # its replica died, or answered no more
    DRAINED = "drained"  # its replica shut down before the end


class Known(NamedTuple):
    """What the client has of one sequence of a resumed request.

    Attributes:
      token_ids: generated so far; they are forced, not drawn again.
      text_len: characters (Unicode code points) of its text, an echoed prompt included.
      finished: the client knows how it ended, so nothing is left to do for it.
    """

    token_ids: tuple[int, ...] = ()
    text_len: int = 0
    finished: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A request goes on where another engine left it: prompt, options and these tokens are its whole state.

    Attributes:
      sequences: one for each of the n.
      age_s: seconds since the request was accepted for the first time, see `Request.order_s`.
    """

    sequences: tuple[Known, ...]
    reason: ResumeReason = ResumeReason.CLIENT
    age_s: float = 0.0


class Pooling(enum.StrEnum):
    """The tokens of a prompt whose final hidden states make its embedding."""

    MEAN = "mean"  # of all of them
    LAST = "last"  # the only one that has seen the whole prompt
    FIRST = "first"

    def positions(self, prompt_len: int) -> range:
        """The positions of these tokens, which follow each other."""
        match self:
            case Pooling.MEAN:
                return range(prompt_len)
            case Pooling.LAST:
                return range(prompt_len - 1, prompt_len)
            case Pooling.FIRST:
                return range(1)


if TYPE_CHECKING:

    class _StructuredField:
        """What may be given for `SamplingParams.structured`, and what it is from then on."""

        def __get__(self, params: object, kind: object) -> StructuredOutput | None: ...

        def __set__(self, params: object, value: StructuredOutput | StructuredFields | None) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when generation stops. Names and defaults are vLLM's.

    Order of operations on the logits of one row [V], as vLLM documents it: raw log-probabilities are taken
    first (that is what `logprobs` reports); then allowed_token_ids, bad_words, min_tokens, logit_bias;
    then repetition, frequency and presence penalty; greedy rows take the argmax here; then temperature, min_p,
    top_k, top_p; then one draw whose noise depends on (seed, position) alone.

    Attributes:
      n: sequences to generate for one prompt.
      temperature: 0 means greedy; at most 100.
      top_k: keep the k most likely tokens; 0 or -1 keeps all.
      top_p: keep the smallest set of tokens whose probability reaches this; (0, 1].
      min_p: drop tokens under min_p times the largest probability; [0, 1].
      presence_penalty, frequency_penalty: [-2, 2], over generated tokens.
      repetition_penalty: > 0, over prompt and generated tokens; 1 is off.
      logit_bias: token id (an int, or decimal text as in JSON) to added logit, [-100, 100]; 512 entries at most.
      allowed_token_ids: nothing else can be drawn.
      bad_words: texts that must not be produced; matched on tokens, with and without a leading space. At most 32
        token sequences: a word counts twice where its two spellings differ, as they do in most vocabularies.
      min_tokens: no end-of-sequence and no stop token id before this many tokens.
      max_tokens: tokens to generate at most; None means up to the context length. More than fit is refused.
      stop: strings that end the text; not part of it unless `include_stop_str_in_output`.
      stop_token_ids: ids that end the sequence.
      ignore_eos: go on after the end-of-sequence token.
      seed: [0, 2**63); None takes one from the engine's own counter-based stream.
      logprobs: None, or 0..20 most likely alternatives beside the drawn token.
      prompt_logprobs: the same for each prompt token but the first; such a request skips the prefix cache.
      skip_special_tokens: leave chat tags and the like out of the text.
      detokenize: False returns ids only; stop strings then need ids (refused together with `stop`).
      truncate_prompt_tokens: keep only the last that many prompt tokens; None refuses a prompt too long.
      structured: what the text must look like; a mapping of its fields works too. Holds together with
        allowed_token_ids; where nothing else is left it goes before bad_words and min_tokens. The text is complete when
        it ended with STOP; LENGTH, a stop string or a stop token may cut it.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    if TYPE_CHECKING:
        structured: _StructuredField = _StructuredField()
    else:
        structured: StructuredOutput | None = None

    if not TYPE_CHECKING:  # type checkers read the fields

        def __new__(cls, *args, **options):
            _refuse_unknown(cls, options)
            return object.__new__(cls)

    def __post_init__(self) -> None:
        _normalise(self)
        _check_ranges(self)
        _check_collections(self)
        if self.allowed_token_ids is not None:  # each once: a caller may send the same ones a million times
            object.__setattr__(self, "allowed_token_ids", tuple(dict.fromkeys(self.allowed_token_ids)))

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> "SamplingParams":
        """Builds from names of a wire format. An unknown name is refused, never ignored."""
        _refuse_unknown(cls, options)
        return cls(**options)

    def clone(self, **changes: Any) -> Self:
        """A copy, in which the options of `changes` have these values: a value itself never changes."""
        return dataclasses.replace(self, **changes)


def _refuse_unknown(cls: type[SamplingParams], options: Mapping[str, object]) -> None:
    """Raises UnsupportedOption for the first option that is none, and says what it is here."""
    known: Mapping[str, object] = cls.__dataclass_fields__
    if options.keys() <= known.keys():
        return
    from jaxserve.values.other_names import Place, answer  # right names need no table

    name = next(name for name in options if name not in known)
    here = answer(name, Place.SAMPLING)
    if here is None:
        close = difflib.get_close_matches(name, known, n=1)
        here = f"known: {', '.join(known)}." + (f" Did you mean {close[0]!r}?" if close else "")
    raise UnsupportedOption(f"sampling option {name!r} is not supported; {here}")


def _normalise(params: SamplingParams) -> None:
    """Turns the convenient spellings (one stop string, lists, None, top_k=-1) into one canonical form."""
    set_field = object.__setattr__  # the value is frozen from the end of __post_init__ on
    if isinstance(params.stop, str):
        set_field(params, "stop", (params.stop,))
    for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
        value = getattr(params, name)
        if isinstance(value, str) or (value is not None and not isinstance(value, Sequence | set | frozenset)):
            raise InvalidRequest(f"{name} must be a list, got {value!r}")
        if value is not None or name != "allowed_token_ids":  # for these fields empty is not the same as absent
            set_field(params, name, tuple(value or ()))
    if params.logit_bias is not None:
        set_field(params, "logit_bias", _bias_by_id(params.logit_bias) or None)
    if params.top_k == -1:
        set_field(params, "top_k", 0)
    if isinstance(params.structured, Mapping):
        set_field(params, "structured", StructuredOutput.from_dict(params.structured))


def _bias_by_id(given: Any) -> dict[int, float]:
    """JSON has text keys only, so decimal text counts as an id; anything else is a mistake, as are two of one id."""
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"logit_bias must map token ids to numbers, got {given!r:.80}")
    if len(given) > MAX_LOGIT_BIAS:
        raise UnsupportedOption(
            f"logit_bias has {len(given)} entries; at most {MAX_LOGIT_BIAS} work. Give fewer, or say"
            " what is allowed with allowed_token_ids."
        )
    bias: dict[int, float] = {}
    for key, value in given.items():
        is_text = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
        if not is_text and (isinstance(key, bool) or not isinstance(key, int)):
            raise InvalidRequest(f"logit_bias must map token ids to numbers, got the key {key!r:.80}")
        token_id = int(key)
        if token_id in bias:
            raise InvalidRequest(f"logit_bias has token {token_id} twice, as text and as a number; give it once")
        try:
            if isinstance(value, bool | str):  # float() takes both
                raise TypeError(value)
            bias[token_id] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(f"logit_bias of token {token_id} must be a number in [-100, 100]") from error
    return bias


_RANGES: tuple[tuple[str, type, float, float, str], ...] = (
    # name, type, lowest, highest, interval as written in the message
    ("n", int, 1, 1024, "1..1024"),
    ("temperature", float, 0.0, 100.0, "0..100"),
    ("top_k", int, 0, 2**31 - 1, "-1, 0 (both: off) or more"),
    ("top_p", float, 1e-9, 1.0, "(0, 1]"),
    ("min_p", float, 0.0, 1.0, "[0, 1]"),
    ("presence_penalty", float, -2.0, 2.0, "[-2, 2]"),
    ("frequency_penalty", float, -2.0, 2.0, "[-2, 2]"),
    ("repetition_penalty", float, 1e-6, 1e6, "more than 0"),
    ("min_tokens", int, 0, 2**31 - 1, "0 or more"),
)
_OPTIONAL_RANGES: tuple[tuple[str, int, int, str], ...] = (
    ("max_tokens", 1, 2**31 - 1, "1 or more, or null for all the context holds"),
    ("seed", 0, 2**63 - 1, "0..2**63-1"),
    ("logprobs", 0, MAX_LOGPROBS, f"0..{MAX_LOGPROBS}"),
    ("prompt_logprobs", 0, MAX_LOGPROBS, f"0..{MAX_LOGPROBS}"),
    ("truncate_prompt_tokens", 1, 2**31 - 1, "1 or more"),
)


def sampling_ranges() -> dict[str, tuple[float, float]]:
    """The lowest and the highest value of each option of `SamplingParams` that is a number, as callers give it."""
    ranges = {name: (low, high) for name, _, low, high, _ in _RANGES}
    ranges |= {name: (low, high) for name, low, high, _ in _OPTIONAL_RANGES}
    return {**ranges, "top_k": (-1, ranges["top_k"][1])}


def _check_ranges(params: SamplingParams) -> None:
    for name, kind, low, high, text in _RANGES:
        value = getattr(params, name)
        accepted = (int,) if kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, accepted):
            raise InvalidRequest(f"{name} must be a {kind.__name__}, got {value!r}")
        if not low <= value <= high:  # NaN fails this too
            raise InvalidRequest(f"{name} is {value}, but must be {text}")
    for name, low, high, text in _OPTIONAL_RANGES:
        value = getattr(params, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequest(f"{name} must be an int or null, got {value!r}")
        if not low <= value <= high:
            raise InvalidRequest(f"{name} is {value}, but must be {text}")
    for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
        if not isinstance(getattr(params, name), bool):
            raise InvalidRequest(f"{name} must be true or false, got {getattr(params, name)!r}")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest(f"min_tokens is {params.min_tokens}, more than max_tokens {params.max_tokens}")


def _check_collections(params: SamplingParams) -> None:
    # Numbers of items first: a caller may send millions, and all others wait while they are looked at.
    stop_token_ids = params.stop_token_ids or ()
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise UnsupportedOption(f"{len(stop_token_ids)} stop_token_ids; at most {MAX_STOP_TOKEN_IDS} work. Give fewer.")
    if len(params.bad_words) > MAX_BAD_WORDS:
        raise UnsupportedOption(f"{len(params.bad_words)} bad_words; at most {MAX_BAD_WORDS} work. Give fewer.")
    for name in ("stop", "bad_words"):
        for text in getattr(params, name):
            if not isinstance(text, str) or not text:
                raise InvalidRequest(f"{name} must hold non-empty strings, got {text!r}")
    for name in ("stop_token_ids", "allowed_token_ids"):
        token_ids = getattr(params, name) or ()
        if set(map(type, token_ids)) <= {int} and min(token_ids, default=0) >= 0:
            continue  # without a line of Python for each of them
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise InvalidRequest(f"{name} must hold token ids (0 or more), got {token_id!r}")
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise InvalidRequest("allowed_token_ids is empty, so nothing could be generated; leave it out instead")
    for word in params.bad_words:
        if len(word) > _MAX_BAD_WORD_CHARS:
            raise UnsupportedOption(
                f"a bad word is {len(word)} characters long; at most {_MAX_BAD_WORD_CHARS} work, and "
                f"{MAX_BAD_WORD_LEN} tokens. Give a shorter part of it."
            )
    for token_id, bias in (params.logit_bias or {}).items():
        if token_id < 0 or not math.isfinite(bias) or not -100 <= bias <= 100:
            raise InvalidRequest(f"logit_bias of token {token_id} is {bias}, but must be a number in [-100, 100]")
    if params.structured is not None and not isinstance(params.structured, StructuredOutput):
        raise InvalidRequest(f"structured must be a StructuredOutput or a mapping, got {params.structured!r:.80}")
    if params.structured is not None and params.ignore_eos:
        raise InvalidRequest("structured output ends with the end-of-sequence token, so ignore_eos must be false")
    if params.stop and not params.detokenize:
        raise InvalidRequest("stop strings need text, but detokenize is false; use stop_token_ids")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """The options of a request beside its prompt and its sampling. Checked by `Engine.prepare`.

    Attributes:
      request_id: unique among live requests, for aborts and logs; None takes the next number. A door whose callers
        may not reach each other's requests makes it by `own_id`.
      priority: smaller is served first; refused unless the policy reads it, as `priority`, `preemptive` and `fair` do.
      cache_salt: requests share prefix pages only with the same salt.
      tenant: for policies that share between tenants, as `fair` does; others ignore it.
      owner: whose request it is, as the door that took it knows (a digest of a key, an address); never the caller's to
        say. What callers share is divided between owners. Empty: that of the process itself.
      owner_weight: how many parts its owner has where others have one. Positive.
      owner_salt: beside `cache_salt`, from the door: owners of different salts share no prefix pages. Empty: none.
      ttft_target_s, tpot_target_s: seconds to the first token and for each after it, for policies that mind, as `slo`
        does; others ignore them. None: those of the engine.
      add_special_tokens: False for text that already has them, such as a rendered chat.
      timeout_s: seconds from `prepare` on after which it ends with DeadlineExceeded; None: no limit.
      traceparent: the caller's span in the form of W3C, for traces; empty: none.
      echo: the text of each sequence begins with the prompt.
      pooling: an embedding of the prompt is asked for; the sampling then only says how to truncate it.
      resume: the request has begun elsewhere. Needs the seed with which it began. It takes the place of a live request
        of its id, which is itself, on a connection that has been lost.
      adapter: the name of a loaded LoRA adapter; None, or the name of the model: the model without any.
    """

    request_id: str | None = None
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    owner: str = ""
    owner_weight: float = 1.0
    owner_salt: str = ""
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    add_special_tokens: bool = True
    timeout_s: float | None = None
    traceparent: str = ""
    echo: bool = False
    pooling: bool = False
    resume: Resume | None = None
    adapter: str | None = None


NO_OPTIONS = RequestOptions()

ID_END = "\x1f"  # ends the name of a scope at the beginning of an id: no caller may send it


def own_id(scope: str, request_id: str) -> str:
    """The id of a request within a scope, such as an owner's: the same `request_id` of two scopes is two ids.

    `scope` empty: the id itself.
    """
    return f"{scope}{ID_END}{request_id}" if scope else request_id


def shown_id(request_id: str) -> str:
    """An id as its caller knows it, for answers and logs: without a scope."""
    return request_id.rpartition(ID_END)[2]


_NOTHING = Known()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One accepted request, tokens only: what the scheduler and the device see.

    Text has been encoded, `sampling` checked, and everything that was None resolved: `max_tokens` is a number
    that fits the context, `seed` a number, and `stop_token_ids` holds the model's own end-of-sequence ids too
    (unless ignore_eos). `bad_word_ids` are the bad words as token sequences.

    Attributes:
      request_id: unique among live requests.
      prompt_token_ids: at least one id.
      arrival_s: monotonic seconds, of its arrival at this engine; never shown.
      priority: smaller is served first (vLLM's convention); 0 unless the policy reads it, as `priority`, `preemptive`
        and `fair` do.
      cache_salt: requests share prefix pages only with the same salt. That of `RequestOptions`, and what else pages
        follow from (`content.private_salt`).
      tenant: for policies that share between tenants, as `fair` does.
      owner, owner_weight: whose request it is, and how many parts that owner has where others have one.
      ttft_target_s, tpot_target_s: seconds to the first token and for each after it, for policies that mind, as `slo`
        does; None: those of the engine.
      deadline_s: monotonic seconds at which it ends with DeadlineExceeded, finished or not; infinity: never.
      traceparent: the caller's span in the form of W3C, for traces; empty: none.
      grammar: the compiled form of `sampling.structured`; None without one.
      pictures: what placeholders in the prompt stand for, in the order of positions; pages are shared where both the
        ids and the digests are equal.
      echo_text: what the text of each sequence begins with.
      pooling: nothing is generated; the answer is the mean of the final hidden states of these tokens of the prompt.
        `max_tokens` is 0 then. None: tokens are generated.
      resume: the request has begun elsewhere; None: it begins here.
      adapter: whose weights are added to the model's; None: no other's.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    seed: int
    stop_token_ids: frozenset[int] = frozenset()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    arrival_s: float = 0.0
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    owner: str = ""
    owner_weight: float = 1.0
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    deadline_s: float = math.inf
    traceparent: str = ""
    grammar: Grammar | None = dataclasses.field(default=None, repr=False, compare=False)
    pictures: tuple[PlacedPicture, ...] = ()
    echo_text: str = dataclasses.field(default="", repr=False)
    pooling: Pooling | None = None
    resume: Resume | None = dataclasses.field(default=None, repr=False)
    adapter: Adapter | None = None

    def known(self, index: int) -> Known:
        """What has been generated of a sequence before the request came here."""
        return _NOTHING if self.resume is None else self.resume.sequences[index]

    @property
    def order_s(self) -> float:
        """Monotonic seconds by which policies order requests: of the arrival, at the first engine that had it.

        So a request that moves keeps its place. Of the time before, `MAX_AGE_S` seconds count.
        """
        return self.arrival_s if self.resume is None else self.arrival_s - min(self.resume.age_s, MAX_AGE_S)

    @property
    def content(self) -> tuple[ContentSpan, ...]:
        """What its keys cover beside the ids."""
        return tuple([placed.span for placed in self.pictures])

    @property
    def open_indices(self) -> list[int]:
        """The sequences that are to be generated: all of them, but for those that had ended elsewhere."""
        return [index for index in range(self.sampling.n) if not self.known(index).finished]


def check_request(request: Request, vocab_size: int) -> None:
    """Checks what `SamplingParams` could not know: the vocabulary, the final stop ids, the bad words as tokens.

    Raises InvalidRequest for ids outside of the vocabulary, for options that forbid every token and for content that
    is not in the prompt, UnsupportedOption for more than the per-row slots of the device hold.
    """
    sampling = request.sampling
    ids_by_option = {
        "prompt_token_ids": request.prompt_token_ids,
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "logit_bias": sampling.logit_bias or (),
        "stop_token_ids": sampling.stop_token_ids or (),
        "bad_words": tuple(i for word in request.bad_word_ids for i in word),
    }
    for name, ids in ids_by_option.items():
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            wrong = next(i for i in ids if not 0 <= i < vocab_size)
            raise InvalidRequest(f"{name} has token id {wrong}, but the vocabulary ends at {vocab_size - 1}")
    num_stops, num_words = len(request.stop_token_ids), len(request.bad_word_ids)
    if num_stops > MAX_STOP_TOKEN_IDS:
        raise UnsupportedOption(
            f"{num_stops} stop token ids, the model's own included; at most {MAX_STOP_TOKEN_IDS} work. Give fewer."
        )
    if num_words > MAX_BAD_WORDS:
        raise UnsupportedOption(
            f"bad_words make {num_words} token sequences (most words make two, with and without a leading space);"
            f" at most {MAX_BAD_WORDS} work. Give fewer."
        )
    for word in request.bad_word_ids:
        if not 1 <= len(word) <= MAX_BAD_WORD_LEN:
            raise UnsupportedOption(
                f"a bad word is {len(word)} tokens long; 1 to {MAX_BAD_WORD_LEN} work. Give a shorter part of it."
            )
    _check_pictures(request)
    _check_something_is_left(request, vocab_size)


def _check_pictures(request: Request) -> None:
    end, prompt_len = 0, len(request.prompt_token_ids)
    for placed in request.pictures:
        if not (end <= placed.start < placed.end <= prompt_len):
            raise InvalidRequest(
                f"a picture stands for the positions {placed.start} to {placed.end - 1} of a prompt of {prompt_len}"
                f" tokens, after others that end at {end - 1}; pictures must be in order, not overlap, not be empty and"
                " lie in the prompt"
            )
        if not 1 <= len(placed.picture.digest) <= MAX_DIGEST_BYTES:
            raise InvalidRequest(
                f"a picture has a digest of {len(placed.picture.digest)} bytes; 1 to {MAX_DIGEST_BYTES} work, such as a"
                " SHA-256"
            )
        end = placed.end


def _check_something_is_left(request: Request, vocab_size: int) -> None:
    sampling = request.sampling
    forbidden = {word[0] for word in request.bad_word_ids if len(word) == 1}
    if sampling.min_tokens > 0:
        forbidden |= request.stop_token_ids
    allowed = range(vocab_size) if sampling.allowed_token_ids is None else sampling.allowed_token_ids
    if forbidden and all(i in forbidden for i in allowed):
        raise InvalidRequest(
            "bad_words and min_tokens together forbid every token of"
            f" {'the vocabulary' if sampling.allowed_token_ids is None else 'allowed_token_ids'}; loosen one of them"
        )


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one position, natural logarithm, from the raw logits."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class PromptInfo(NamedTuple):
    """Results of computing a prompt; they come with a sequence's first token.

    `logprobs`: one entry per prompt token after the first, or None when not asked for. `pooled` [D]: the mean of the
    final hidden states of the tokens that `Request.pooling` names, or None when the request generates.
    """

    num_cached_tokens: int
    logprobs: tuple[TokenLogprobs, ...] | None
    pooled: tuple[float, ...] | None = None


NOT_FINITE = -1  # drawn by a row whose hidden states are infinite or no numbers: no token follows from them


class TokenEvent(NamedTuple):
    """One token of one sequence. A named tuple, since hundreds are made each step.

    `index` numbers the n sequences of a request. With `finish_reason` STOP, `token_id` is the id that ended it; it is
    -1 where nothing is generated, and `prompt` is the answer. With ERROR it is NOT_FINITE.
    """

    request_id: str
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]  # tuple.index is of no use here
    token_id: int
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    prompt: PromptInfo | None = None
