"""Scores of documents for a query: the probability that a causal model answers yes rather than no.

The model is asked about one document at a time, in the words of a template, and P(yes) / (P(yes) + P(no)) of the token
that it would say next is the score. This is how Qwen3-Reranker was trained, and other models that judge can be asked in
other words. Each document is a request of its own, and the documents of a query share the pages of what is before them.

A step reports the most likely tokens and the one that was drawn. Only yes or no can be drawn here, and with a model
that judges the other one is among the most likely too; where it is not, a second request draws it.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Self

from jaxserve.api import MAX_LOGPROBS, SamplingParams
from jaxserve.errors import ConfigError, InvalidRequest, JaxserveError, PromptTooLong, UnsupportedOption
from jaxserve.text.base import Tokenizer
from jaxserve.text.long_text import encode_within
from jaxserve.text.special_text import SpecialText

QWEN3_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_PLACE = re.compile(r"\{(instruction|query|document)\}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reranker:
    """How a model is asked to judge.

    Attributes:
      template: text with the places {query} and {document}, and perhaps {instruction}; special tokens are written out.
      instruction: what stands at {instruction} unless a caller says otherwise.
      yes_id, no_id: the two tokens that the model may answer with.
    """

    template: str
    instruction: str
    yes_id: int
    no_id: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, template: str, instruction: str, positive: str, negative: str) -> Self:
        """`positive`, `negative`: the answers as text, each a single token where the template ends.

        Raises ConfigError for a template without its places, and for an answer that is not one token there.
        """
        places = _PLACE.findall(template)
        for name in ("query", "document"):
            if places.count(name) != 1:
                raise ConfigError(
                    f"rerank.template has {{{name}}} {places.count(name)} times, but needs it once: {template!r:.200}"
                )
        tail = template[[*_PLACE.finditer(template)][-1].end() :]
        before = tokenizer.encode(tail, add_special_tokens=False)
        ids = {}
        for setting, answer in (("rerank.positive", positive), ("rerank.negative", negative)):
            whole = tokenizer.encode(tail + answer, add_special_tokens=False)
            if len(whole) != len(before) + 1 or whole[:-1] != before:
                raise ConfigError(
                    f"{setting} is {answer!r:.80}, which is not a single token of this tokenizer after the template's "
                    f"end {tail[-20:]!r}; give a word that is one, or set rerank.template to none"
                )
            ids[setting] = whole[-1]
        if ids["rerank.positive"] == ids["rerank.negative"]:
            raise ConfigError(
                f"rerank.positive and rerank.negative are the same token, {positive!r:.80}; give two different answers"
            )
        yes_id, no_id = ids.values()
        return cls(template=template, instruction=instruction, yes_id=yes_id, no_id=no_id)

    def text(self, query: str, document: str, instruction: str | None = None) -> str:
        """The prompt of a pair. Places within the given texts are left alone."""
        values = {
            "query": query,
            "document": document,
            "instruction": self.instruction if instruction is None else instruction,
        }
        return _PLACE.sub(lambda place: values[place[1]], self.template)


class Judgement:
    """The model's answer about one document. Mutated by the call that asks.

    It is asked with `sampling` as long as that is not None, which is twice at most.
    """

    __slots__ = ("_logprobs", "_reranker", "prompt_ids")

    def __init__(self, reranker: Reranker, prompt_ids: Sequence[int]) -> None:
        self._reranker = reranker
        self.prompt_ids = prompt_ids
        self._logprobs: dict[int, float] = {}

    @property
    def sampling(self) -> SamplingParams | None:
        """The sampling of the next request for this document; None once both log-probabilities are known."""
        answers = (self._reranker.yes_id, self._reranker.no_id)
        missing = [token_id for token_id in answers if token_id not in self._logprobs]
        if not missing:
            return None
        return SamplingParams(
            temperature=0.0,
            max_tokens=1,
            allowed_token_ids=missing,
            logprobs=MAX_LOGPROBS,
            ignore_eos=True,
            detokenize=False,
        )

    def take(self, logprobs: Mapping[int, float]) -> None:
        """Takes log-probabilities that a request has reported: of the token that it drew and of the most likely."""
        for token_id in (self._reranker.yes_id, self._reranker.no_id):
            if token_id in logprobs:
                self._logprobs.setdefault(token_id, logprobs[token_id])

    @property
    def score(self) -> float:
        """P(yes) / (P(yes) + P(no)), 0 to 1. Raises JaxserveError when the model computed no number for either."""
        odds = self._logprobs[self._reranker.yes_id] - self._logprobs[self._reranker.no_id]
        if math.isnan(odds):  # both are -inf
            raise JaxserveError("the model's log-probabilities are not finite for this document, so it has no score")
        return 0.5 + 0.5 * math.tanh(odds / 2)  # the logistic function, which overflows nowhere in this form


def need_reranker(reranker: Reranker | None) -> Reranker:
    """Raises UnsupportedOption for a model that is not known to judge."""
    if reranker is None:
        raise UnsupportedOption(
            "this model is not known to judge documents, so it gives no scores; serve a reranker, or set "
            "rerank.template for a model that answers yes or no"
        )
    return reranker


def make_pairs(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[tuple[str, str]]:
    """One query for all documents, or one for each. Raises InvalidRequest for other numbers, none, or no texts."""
    asked, given = ([one] if isinstance(one, str) else list(one) for one in (queries, documents))
    if not all(isinstance(text, str) for text in (*asked, *given)):
        raise InvalidRequest("queries and documents must be texts, or lists of texts")
    if not asked or not given:
        raise InvalidRequest(f"{len(asked)} queries and {len(given)} documents; send one of each at least")
    if len(asked) not in (1, len(given)):
        raise InvalidRequest(
            f"{len(asked)} queries and {len(given)} documents; send one query for all, or one for each document"
        )
    return list(zip(asked if len(asked) > 1 else asked * len(given), given, strict=True))


def encode_pairs(
    reranker: Reranker,
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    name: str,
    *,
    max_model_len: int,
    instruction: str | None = None,
    max_document_tokens: int | None = None,
) -> list[Judgement]:
    """Encodes queries and documents, to be judged. Takes as long as that takes.

    Args:
      pairs: query and document.
      name: of the list of documents, for errors, which say the number of the document that is wrong.
      max_model_len: tokens of a sequence, the answer included.
      instruction: in place of the reranker's own.
      max_document_tokens: of each document, whose rest is cut off; None: of any length.

    Raises InvalidRequest for text that cannot be encoded, PromptTooLong for a pair that the model has no room for.
    """
    found: list[Judgement] = []
    special_text = SpecialText.of(tokenizer)
    for index, (query, document) in enumerate(pairs):
        try:
            if max_document_tokens is not None:
                document = _cut(tokenizer, document, max_document_tokens)
            ids = _encode(reranker, tokenizer, special_text, [query, document, instruction], max_model_len)
            if len(ids) + 1 > max_model_len:
                raise PromptTooLong(
                    f"template, query and document have {len(ids)} tokens, and the model takes {max_model_len - 1}; "
                    "shorten them, or set max_tokens_per_doc"
                )
        except InvalidRequest as error:
            raise type(error)(f"{name}[{index}]: {error}") from error
        found.append(Judgement(reranker, ids))
    return found


def _encode(
    reranker: Reranker, tokenizer: Tokenizer, special_text: SpecialText, given: list[str | None], max_tokens: int
) -> list[int]:
    """The prompt of a pair, `given` being arguments of `Reranker.text`. Special tokens in them stay text."""
    marks = special_text.marks_for(given)
    if marks is None:
        text = reranker.text(*given)  # type: ignore[arg-type]
        return encode_within(tokenizer, text, max_tokens, add_special_tokens=False)
    prompt = special_text.read(reranker.text(*special_text.marked(given, marks)), marks)
    return prompt.encode(tokenizer, max_tokens)


def _cut(tokenizer: Tokenizer, document: str, most: int) -> str:
    if most < 1:
        raise InvalidRequest(f"max_tokens_per_doc is {most}, but must be 1 or more; leave it out for whole documents")
    ids = tokenizer.encode(document, add_special_tokens=False)
    if len(ids) <= most:
        return document
    return tokenizer.decode(ids[:most], skip_special_tokens=False).rstrip("\N{REPLACEMENT CHARACTER}")
