"""From what a client sends to a frozen `Request`: encode, check, resolve.

Owns every check that needs the model's limits but not the scheduler's state. Refuses to touch the loop: it is pure and
may run on any thread, since encoding a long prompt takes milliseconds that the loop must not spend.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxserve.api import Request, SamplingParams, check_request
from jaxserve.errors import InvalidRequest, PromptTooLong, UnsupportedOption
from jaxserve.text.base import Tokenizer

# Text, token ids, or vLLM's dictionaries {"prompt": text} and {"prompt_token_ids": ids}.
Prompt = str | Sequence[int] | Mapping[str, object]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the front of the engine knows of the model.

    Attributes:
      name: shown to clients.
      vocab_size: V; ids from 0 to V - 1 are valid.
      max_model_len: tokens of a sequence, prompt and output.
      eos_token_ids: any of them ends a sequence unless `ignore_eos`.
      max_pool_tokens: tokens of a sequence that has the whole page pool; None: as many as max_model_len.
      private_prompts_above: prompts longer than this share pages only with prompts of their own length; None: all
        share. Dynamic rope scaling turns keys by an angle that depends on the prompt's length beyond the trained one.
    """

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    max_pool_tokens: int | None = None
    private_prompts_above: int | None = None


def prepare_request(
    prompt: Prompt,
    sampling: SamplingParams,
    *,
    request_id: str,
    model: ModelInfo,
    tokenizer: Tokenizer | None,
    seed: int,
    arrival_s: float,
    priority: int = 0,
    cache_salt: str = "",
    tenant: str = "",
    add_special_tokens: bool = True,
) -> Request:
    """Builds the request that the scheduler gets. Pure.

    `seed` is used when `sampling.seed` is None. `add_special_tokens` False is for text that already has them, such as
    a rendered chat. Raises InvalidRequest, PromptTooLong or UnsupportedOption.
    """
    token_ids = _prompt_ids(prompt, tokenizer, add_special_tokens)
    if sampling.truncate_prompt_tokens is not None:
        token_ids = token_ids[-sampling.truncate_prompt_tokens :]
    if not token_ids:
        raise InvalidRequest("the prompt is empty; send at least one token")
    _check_ids(token_ids, model.vocab_size)
    if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
        raise InvalidRequest(
            f"priority is {priority!r}, but must be a whole number of 32 bits; smaller is served first"
        )
    max_tokens = _resolve_max_tokens(len(token_ids), sampling.max_tokens, model)
    if tokenizer is None and sampling.stop:
        raise UnsupportedOption(
            "stop strings need a tokenizer, and this engine was started without; use stop_token_ids"
        )
    if model.private_prompts_above is not None and len(token_ids) > model.private_prompts_above:
        cache_salt = f"{cache_salt}|prompt_len={len(token_ids)}"
    request = Request(
        request_id=request_id,
        prompt_token_ids=token_ids,
        sampling=sampling,
        max_tokens=max_tokens,
        seed=sampling.seed if sampling.seed is not None else seed,
        stop_token_ids=frozenset(sampling.stop_token_ids or ()).union(
            () if sampling.ignore_eos else model.eos_token_ids
        ),
        bad_word_ids=_bad_word_ids(sampling.bad_words, tokenizer),
        arrival_s=arrival_s,
        priority=priority,
        cache_salt=cache_salt,
        tenant=tenant,
    )
    check_request(request, model.vocab_size)
    return request


def _prompt_ids(prompt: Prompt, tokenizer: Tokenizer | None, add_special_tokens: bool) -> tuple[int, ...]:
    if isinstance(prompt, Mapping):
        known = [k for k in ("prompt_token_ids", "prompt") if prompt.get(k) is not None]
        extra = sorted(set(prompt) - {"prompt_token_ids", "prompt"})
        if extra or not known:
            raise InvalidRequest(f"a prompt dictionary has 'prompt' or 'prompt_token_ids', got keys {sorted(prompt)}")
        prompt = prompt[known[0]]  # type: ignore[assignment]  # the ids win when both are given, as in vLLM
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequest("the prompt is text, but this engine has no tokenizer; send prompt_token_ids")
        return tuple(tokenizer.encode(_valid_text(prompt), add_special_tokens=add_special_tokens))
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InvalidRequest(f"a prompt is text or a list of token ids, got {type(prompt).__name__}")
    return tuple(prompt)


def _valid_text(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # a lone surrogate, from JSON escapes or undecodable bytes
        raise InvalidRequest(f"the text is not valid Unicode at character {error.start}") from error
    return text


def _check_ids(token_ids: tuple[int, ...], vocab_size: int) -> None:
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidRequest(f"a prompt is text or a list of token ids, got {token_id!r} among them")
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"token id {token_id} is outside the vocabulary; ids are 0..{vocab_size - 1}")


def _resolve_max_tokens(prompt_len: int, max_tokens: int | None, model: ModelInfo) -> int:
    max_model_len = model.max_model_len
    room = max_model_len - prompt_len
    if room < 1:
        raise PromptTooLong(
            f"the prompt has {prompt_len} tokens; a sequence holds {max_model_len}, prompt and output together; "
            "shorten it, set truncate_prompt_tokens, or raise model.max_len"
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
    """Each word as tokens at the start of a text and after a space, since most vocabularies tell the two apart."""
    if not bad_words:
        return ()
    if tokenizer is None:
        raise UnsupportedOption("bad_words need a tokenizer, and this engine was started without; use logit_bias")
    spellings: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        for text in (word, " " + word.lstrip()):
            spellings[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    spellings.pop((), None)
    return tuple(spellings)
