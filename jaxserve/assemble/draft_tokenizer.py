"""The check whether a draft model means the same by its tokens as the model that it drafts for."""

from pathlib import Path

from jaxserve.config.model_path import resolve_model_path
from jaxserve.config.schema import Config
from jaxserve.errors import CheckpointError
from jaxserve.runtime.heads import DRAFT_MODEL
from jaxserve.text.base import Tokenizer
from jaxserve.text.loading import load_tokenizer


def check_draft_tokenizer(config: Config, tokenizer: Tokenizer | None) -> None:
    """Raises CheckpointError where the draft model of `speculation.model` has another tokenizer, or none.

    Drafts of other tokens would change no answer, and hardly ever be right: nobody would notice but by the time.
    Without a tokenizer (`model.skip_tokenizer`) the number of tokens alone is compared, where the model is read.
    """
    asked = config.speculation
    if asked.method != DRAFT_MODEL or asked.model is None or tokenizer is None:
        return
    path, target = resolve_model_path(asked.model), resolve_model_path(config.model.tokenizer or config.model.path)
    if path == target:
        return
    other = load_tokenizer(path)
    for token_id in range(max(tokenizer.vocab_size, other.vocab_size)):
        ours, theirs = _bytes_of(tokenizer, token_id), _bytes_of(other, token_id)
        if ours != theirs:
            raise CheckpointError(
                f"token {token_id} is {theirs!r} in the tokenizer of the draft model {path}, and {ours!r} in that of "
                f"{Path(target)}: a draft is a token of both; take a model of the same family and vocabulary"
            )


def _bytes_of(tokenizer: Tokenizer, token_id: int) -> bytes | None:
    return tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else None
