"""From the parts of a client's request to a frozen `Request`: encode, check, resolve.

Every check that needs the model's limits but not the scheduler's state is made here. The functions are pure and may
run on any thread, since encoding a long prompt takes milliseconds that the loop must not spend.
"""

import dataclasses
import math
import operator
from collections.abc import Collection, Mapping, Sequence, Set

from jaxserve.api import Request, RequestOptions, SamplingParams, check_request
from jaxserve.engine.adapters import LoadedAdapters
from jaxserve.engine.embedding import EmbeddingRules
from jaxserve.engine.pictures import PictureReader, prompt_pictures, with_pictures
from jaxserve.engine.scoring import Reranker
from jaxserve.engine.structured import Grammars
from jaxserve.errors import InvalidRequest, PromptTooLong, UnknownModel, UnsupportedOption
from jaxserve.text.base import Tokenizer
from jaxserve.text.long_text import check_text_fits
from jaxserve.values.content import SALT_END, Adapter, private_salt

# Text, token ids (a list or an array of whole numbers), or vLLM's dictionaries {"prompt": text} and
# {"prompt_token_ids": ids}, each with an optional "cache_salt", and an optional "multi_modal_data", whose {"image":
# pictures} are those of the placeholders in it, in their order.
Prompt = str | Sequence[int] | Mapping[str, object]

# Put before a word to see how it is spelled where no space precedes it. Splitting rules keep a line feed apart from
# letters; the others serve words that begin with one, and vocabularies that turn it into a space.
_ANCHORS = ("\n", "a", ".", "0", "。")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the front of the engine knows of the model.

    Attributes:
      name: for the log and for people.
      vocab_size: V; ids from 0 to V - 1 are valid.
      max_model_len: tokens of a sequence, prompt and output.
      eos_token_ids: any of them ends a sequence unless `ignore_eos`.
      max_pool_tokens: tokens of a sequence that has the whole page pool; None: as many as max_model_len.
      private_prompts_above: prompts longer than this share pages only with prompts of their own length; None: all
        share. Dynamic rope scaling turns keys by an angle that depends on the prompt's length beyond the trained one.
      generates: false of a base model, which has no output projection and only embeds.
      max_position: tokens that the checkpoint is made for, of which max_model_len may be a part; None: not known.
      embedding: how prompts are embedded.
      reranker: how documents are judged; None: the model is not known to judge.
      drafter: source of drafts, `speculation.method`; "none": there are none.
      pictures: reads those of a prompt; None: the model takes none.
      adapters: those that requests may name; None: the engine takes none.
      examples: questions that it is known to answer, for people who do not know it yet.
    """

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    max_pool_tokens: int | None = None
    private_prompts_above: int | None = None
    max_position: int | None = None
    generates: bool = True
    embedding: EmbeddingRules = dataclasses.field(default_factory=EmbeddingRules)
    reranker: Reranker | None = None
    drafter: str = "none"
    pictures: PictureReader | None = None
    adapters: LoadedAdapters | None = None
    examples: tuple[str, ...] = ()


def prepare_request(
    prompt: Prompt,
    sampling: SamplingParams,
    options: RequestOptions,
    *,
    request_id: str,
    model: ModelInfo,
    tokenizer: Tokenizer | None,
    seed: int,
    arrival_s: float,
    uses_priority: bool = True,
    grammars: Grammars | None = None,
) -> Request:
    """Builds the request that the scheduler gets. Pure.

    `request_id` is used when `options.request_id` is None, `seed` when `sampling.seed` is; the "cache_salt" of a
    dictionary goes before that of `options`. `uses_priority` False
    refuses a priority that nothing would read. `options.timeout_s` counts from `arrival_s`. Raises InvalidRequest,
    PromptTooLong, UnknownModel or UnsupportedOption.
    """
    grammars = Grammars(model.vocab_size, model.eos_token_ids) if grammars is None else grammars
    if isinstance(prompt, Mapping) and "cache_salt" in prompt:
        options = dataclasses.replace(options, cache_salt=prompt["cache_salt"])
    # The end of a text that is to be cut is found by encoding all of it.
    most = model.max_model_len if sampling.truncate_prompt_tokens is None else None
    token_ids = _prompt_ids(prompt, tokenizer, options.add_special_tokens, most)
    sources = prompt_pictures(prompt.get("multi_modal_data")) if isinstance(prompt, Mapping) else []
    token_ids, pictures = with_pictures(model.pictures, token_ids, sources)
    if sampling.truncate_prompt_tokens is not None:
        if pictures and len(token_ids) > sampling.truncate_prompt_tokens:
            raise InvalidRequest(
                f"truncate_prompt_tokens is {sampling.truncate_prompt_tokens}, but the prompt has {len(token_ids)} "
                "tokens and pictures among them, which cannot be cut; leave it out"
            )
        token_ids = token_ids[-sampling.truncate_prompt_tokens :]
    if not token_ids:
        raise InvalidRequest("the prompt is empty; send at least one token")
    _check_priority(options.priority, uses_priority)
    _check_texts(options)
    for name in ("ttft_target_s", "tpot_target_s"):
        _check_seconds(name, getattr(options, name), "null for the engine's own")
    if options.pooling:
        _check_pooling(len(token_ids), sampling, model)
    elif not model.generates:
        raise UnsupportedOption(
            f"the checkpoint of {model.name!r} has no output projection (lm_head), so it makes embeddings and no "
            "tokens; ask for an embedding, or take a checkpoint with its head"
        )
    max_tokens = 0 if options.pooling else _resolve_max_tokens(len(token_ids), sampling.max_tokens, model)
    check_token_ids(token_ids, model.vocab_size)
    if options.resume is not None:
        _check_resume(options, sampling, max_tokens, model)
    if sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {sampling.min_tokens}, but at most {max_tokens} tokens can be generated for a prompt of "
            f"{len(token_ids)}; ask for fewer"
        )
    if tokenizer is None and sampling.stop:
        raise UnsupportedOption(
            "stop strings need a tokenizer, and this engine was started without; use stop_token_ids"
        )
    adapter, reasons = _find_adapter(options.adapter, model), []
    if model.private_prompts_above is not None and len(token_ids) > model.private_prompts_above:
        reasons.append(f"prompt_len={len(token_ids)}")
    if adapter is not None:
        reasons.append(f"adapter={adapter.digest.hex()}")
    if options.owner_salt:
        reasons.append(f"owner={options.owner_salt}")
    request = Request(
        request_id=request_id if options.request_id is None else options.request_id,
        prompt_token_ids=token_ids,
        sampling=sampling,
        max_tokens=max_tokens,
        seed=sampling.seed if sampling.seed is not None else seed,
        stop_token_ids=frozenset(sampling.stop_token_ids or ()).union(
            () if sampling.ignore_eos else model.eos_token_ids
        ),
        bad_word_ids=_bad_word_ids(sampling.bad_words, tokenizer),
        arrival_s=arrival_s,
        priority=options.priority,
        cache_salt=private_salt(options.cache_salt, *reasons),
        tenant=options.tenant,
        owner=options.owner,
        owner_weight=options.owner_weight,
        ttft_target_s=options.ttft_target_s,
        tpot_target_s=options.tpot_target_s,
        deadline_s=arrival_s + _timeout(options.timeout_s),
        traceparent=options.traceparent,
        grammar=grammars.compile(sampling, token_ids, tokenizer),
        echo_text=_echo_text(token_ids, sampling, tokenizer) if options.echo else "",
        pooling=model.embedding.pooling if options.pooling else None,
        resume=options.resume,
        pictures=pictures,
        adapter=adapter,
    )
    check_request(request, model.vocab_size)
    return request


def _find_adapter(name: str | None, model: ModelInfo) -> Adapter | None:
    if name is None or name == model.name:
        return None
    if model.adapters is None:
        raise UnknownModel(
            f"the model {name!r:.200} is not served here; there is {model.name!r}, and LoRA adapters are off "
            "(adapters.slots is 0)"
        )
    return model.adapters.find(name, model.name)


def _check_resume(options: RequestOptions, sampling: SamplingParams, max_tokens: int, model: ModelInfo) -> None:
    """The checks that need neither text nor a grammar; for those see `engine.resuming`."""
    assert options.resume is not None
    sequences = options.resume.sequences
    if options.pooling:
        raise InvalidRequest("an embedding generates nothing, so there is nothing to resume; leave resume out")
    if len(sequences) != sampling.n:
        raise InvalidRequest(f"resume has {len(sequences)} sequences, but n is {sampling.n}; give one for each")
    if all(known.finished for known in sequences):
        raise InvalidRequest("resume says that every sequence has finished, so nothing is left to do")
    if sampling.seed is None and sampling.temperature > 0 and any(known.token_ids for known in sequences):
        raise InvalidRequest("resume needs the seed with which the request began, or other tokens would follow")
    if not options.resume.age_s >= 0:
        raise InvalidRequest(f"resume has age_s {options.resume.age_s}, but must be 0 seconds or more; leave it out")
    for index, known in enumerate(sequences):
        check_token_ids(known.token_ids, model.vocab_size)
        if len(known.token_ids) > max_tokens:
            raise InvalidRequest(
                f"resume has {len(known.token_ids)} tokens of sequence {index}, more than max_tokens {max_tokens}"
            )
        if known.text_len < 0:
            raise InvalidRequest(f"resume has text_len {known.text_len} for sequence {index}, but must be 0 or more")


def _check_pooling(prompt_len: int, sampling: SamplingParams, model: ModelInfo) -> None:
    if prompt_len > model.max_model_len:
        raise PromptTooLong(
            f"the prompt has {prompt_len} tokens, the model takes {model.max_model_len}; shorten it or set "
            "truncate_prompt_tokens"
        )
    if sampling.n != 1 or any(
        o is not None for o in (sampling.structured, sampling.logprobs, sampling.prompt_logprobs)
    ):
        raise InvalidRequest(
            "an embedding generates nothing, so n, structured, logprobs and prompt_logprobs must be left out"
        )


def _prompt_ids(
    prompt: Prompt, tokenizer: Tokenizer | None, add_special_tokens: bool, max_tokens: int | None
) -> tuple[int, ...]:
    """Raises PromptTooLong for a text that has clearly more than `max_tokens`; None: any number."""
    if isinstance(prompt, Mapping):
        known = [k for k in ("prompt_token_ids", "prompt") if prompt.get(k) is not None]
        extra = set(prompt) - {"prompt_token_ids", "prompt", "cache_salt", "multi_modal_data"}
        if extra or not known:
            found = sorted(map(str, prompt))
            raise InvalidRequest(f"a prompt dictionary has 'prompt' or 'prompt_token_ids', got keys {found}")
        prompt = prompt[known[0]]  # type: ignore[assignment]  # the ids win when both are given, as in vLLM
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequest("the prompt is text, but this engine has no tokenizer; send prompt_token_ids")
        prompt = _valid_text(prompt)
        if max_tokens is not None:
            check_text_fits(tokenizer, prompt, max_tokens)
        return tuple(tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
    # Arrays are collections but no sequences; what has no order is not meant.
    if not isinstance(prompt, Collection) or isinstance(prompt, bytes | bytearray | Mapping | Set):
        raise InvalidRequest(f"a prompt is text or a list of token ids, got {type(prompt).__name__}")
    try:
        return tuple(map(_token_id, prompt))
    except TypeError as error:  # an array without dimensions says that it is a collection, and is none
        raise InvalidRequest(f"a prompt is text or a list of token ids, got {prompt!r:.80}") from error


def _token_id(value: object) -> int:
    """Whole numbers of any library; not a bool, which is a mistake more often than an id."""
    if type(value) is int:
        return value
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise InvalidRequest(f"a prompt is text or a list of token ids, got {value!r:.80} among them")


def _valid_text(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # a lone surrogate, from JSON escapes or undecodable bytes
        raise InvalidRequest(f"the text is not valid Unicode at character {error.start}") from error
    return text


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest for the first id that is not below `vocab_size`, or is negative."""
    # not a loop at once: over a long prompt that would hold up other threads
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"token id {token_id} is outside the vocabulary; ids are 0..{vocab_size - 1}")


def _check_priority(priority: int, uses_priority: bool) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
        raise InvalidRequest(
            f"priority is {priority!r}, but must be a whole number of 32 bits; smaller is served first"
        )
    if priority and not uses_priority:
        raise InvalidRequest(
            f"priority is {priority}, which this engine's policy ignores: priority needs sched.policy: priority, "
            "preemptive or fair"
        )


def _check_texts(options: RequestOptions) -> None:
    for name in ("cache_salt", "tenant", "owner"):
        if not isinstance(getattr(options, name), str):
            raise InvalidRequest(f"{name} must be text, got {getattr(options, name)!r:.80}")
    if not 0 < options.owner_weight < math.inf:
        raise InvalidRequest(f"owner_weight is {options.owner_weight}, but must be more than 0")
    if SALT_END in options.cache_salt:
        raise InvalidRequest(f"cache_salt must not hold the character {SALT_END!r}, got {options.cache_salt!r:.80}")


def _check_seconds(name: str, value: float | None, meaning: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InvalidRequest(f"{name} is {value!r}, but must be more than 0 seconds, or {meaning}")


def _timeout(timeout_s: float | None) -> float:
    _check_seconds("timeout_s", timeout_s, "null for no limit")
    return math.inf if timeout_s is None else timeout_s


def _echo_text(token_ids: Sequence[int], sampling: SamplingParams, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        raise UnsupportedOption("echo needs a tokenizer, and this engine was started without; leave echo out")
    if not sampling.detokenize:
        raise UnsupportedOption("echo needs text, but detokenize is false; leave one of them out")
    return tokenizer.decode(token_ids, skip_special_tokens=sampling.skip_special_tokens)


def _resolve_max_tokens(prompt_len: int, max_tokens: int | None, model: ModelInfo) -> int:
    max_model_len = model.max_model_len
    room = max_model_len - prompt_len
    if room < 1:
        can_be_raised = model.max_position is None or max_model_len < model.max_position
        last = "or raise model.max_len" if can_be_raised else "or take a model of longer context: this one has no more"
        raise PromptTooLong(
            f"the prompt has {prompt_len} tokens; a sequence holds {max_model_len}, prompt and output together; "
            f"shorten it, set truncate_prompt_tokens, {last}"
        )
    if max_tokens is None:
        # A pool smaller than the context is the server's own limit; admission refuses what exceeds it, asked or not.
        fitting = room if model.max_pool_tokens is None else min(room, model.max_pool_tokens - prompt_len)
        return max(fitting, 1)
    if max_tokens > room:
        raise InvalidRequest(
            f"prompt ({prompt_len} tokens) and max_tokens ({max_tokens}) exceed the {max_model_len} tokens of a "
            f"sequence; ask for at most {room}, or leave max_tokens null for all that fits"
        )
    return max_tokens


def _bad_word_ids(bad_words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Each word as tokens, without and with a space before it, since most vocabularies tell the two apart."""
    if not bad_words:
        return ()
    if tokenizer is None:
        raise UnsupportedOption("bad_words need a tokenizer, and this engine was started without; use logit_bias")
    spellings: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        found = [_spelling(_valid_text(text), tokenizer) for text in (word, " " + word.lstrip())]
        if not any(found):
            raise UnsupportedOption(f"the bad word {word!r:.80} cannot be written in this vocabulary; use logit_bias")
        spellings.update(dict.fromkeys(filter(None, found)))
    return tuple(spellings)


def _spelling(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of `text` in the middle of a text, after anything that is not a space; empty when there are none.

    At the beginning many vocabularies put a space of their own before it. So `text` is encoded after an anchor, and
    what is left without the anchor counts if it reads as `text` there. What `text` reads as is asked of the tokenizer,
    since a vocabulary may change case or compose characters.
    """
    plain = tokenizer.encode(text, add_special_tokens=False)
    wanted = tokenizer.decode(plain, skip_special_tokens=False)
    for anchor in _ANCHORS:
        before = tokenizer.encode(anchor, add_special_tokens=False)
        if tokenizer.decode(before, skip_special_tokens=False) != anchor:
            continue
        both = tokenizer.encode(anchor + text, add_special_tokens=False)
        # The anchor may have melted into the text; then only ids of their own are comparable.
        for after in (both[len(before) :] if both[: len(before)] == before else [], plain):
            if after and tokenizer.decode([*before, *after], skip_special_tokens=False) == anchor + wanted:
                return tuple(after)
    return ()
