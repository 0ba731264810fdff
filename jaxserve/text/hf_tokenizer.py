"""A tokenizer from `tokenizer.json`, by the Hugging Face `tokenizers` library.

Normalisation, splitting, merging and the post processor are described completely by the file and carried out by the
library; this module adds the set of special ids, and a decoding that can be streamed. In particular the file alone
decides which special tokens `encode` adds; `add_bos_token` beside a tokenizer.json is ignored, as in transformers 5.

Truncation and padding stored in the file are switched off: they would cut a prompt in silence.
`clean_up_tokenization_spaces` is not applied: it takes back spaces that a stream has already shown.
"""

import json
import logging
from collections.abc import Sequence
from typing import Any

import tokenizers

from jaxserve.errors import UnsupportedOption
from jaxserve.text.base import check_text
from jaxserve.text.pieces import SPACE_MARK, PieceTable, piece_bytes
from jaxserve.text.tokenizer_files import ADDED_TOKENS_NAME, TokenizerFiles, read_failure

logger = logging.getLogger(__name__)

_SPACE_STAGE = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
_STRIP_STAGE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}

# Byte-level vocabularies write each byte as one character: printable ones as themselves, the others, in order, from 256
# on (GPT-2's encoder.py).
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_HIDDEN)}


class HfTokenizer:
    """A `Tokenizer` over one tokenizer.json, or over a `backend` made of other files. Immutable after construction.

    Raises CheckpointError when the file cannot be read, or when tokenizer_config.json gives an added token an id
    that does not fit. Such a token of added_tokens.json, which nothing keeps up to date, is left out with a line in the
    log.
    """

    def __init__(self, files: TokenizerFiles, backend: tokenizers.Tokenizer | None = None) -> None:
        backend = _read_backend(files) if backend is None else backend
        backend.no_truncation()
        backend.no_padding()
        _add_missing_tokens(backend, files)
        self._backend = backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.bos_token_id = _named_id(backend, files, "bos_token", files.bos_id)
        self.eos_token_id = _named_id(backend, files, "eos_token", files.eos_id)
        self.chat_template = files.chat_template
        self.named_chat_templates = files.named_chat_templates
        # The same model, without a single added token. The library shares its parts, so that it costs no memory.
        self._plain = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._plain.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._plain.pre_tokenizer = backend.pre_tokenizer
        self._table = _piece_table(backend, vocabulary, self.vocab_size, self.special_ids)
        self._decoded_by = [stage["type"] for stage in _decoder_stages(backend)]
        # A token in front keeps the library from stripping the leading space of the token that is asked for.
        self._anchor = backend.encode("a", add_special_tokens=False).ids
        self._anchor_len = len(backend.decode(self._anchor, skip_special_tokens=False))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer.encode`. The file's own post processor adds the special tokens."""
        check_text(text)
        # A batch of one: the library lets other threads run for a batch, and for a single text it does not.
        [encoded] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoded.ids

    def encode_plain(self, text: str) -> list[int]:
        """See `Tokenizer.encode_plain`."""
        check_text(text)
        [encoded] = self._plain.encode_batch_fast([text], add_special_tokens=False)
        return encoded.ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
        if self._table is not None:
            return self._table.decode(ids, skip_special_tokens)
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """See `Tokenizer.token_text`."""
        if self._table is not None:
            return self._table.token_text(token_id)
        return self._backend.decode([*self._anchor, token_id], skip_special_tokens=False)[self._anchor_len :]

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        if self._table is not None:
            return self._table.token_bytes(token_id)
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._decoded_by == ["ByteLevel"]:
            spelled = [_BYTE_OF.get(character) for character in piece]
            # A piece with another character in it stands for itself, as in the library's decoder. Added tokens are
            # pieces like the others there.
            return piece.encode() if None in spelled else bytes(spelled)  # pyright: ignore[reportArgumentType]
        if self._decoded_by == ["Metaspace"]:
            return piece_bytes(piece)
        raise UnsupportedOption(
            "structured output needs tokens with bytes of their own, but this tokenizer.json decodes by "
            f"{', '.join(self._decoded_by) or 'nothing'}; serve a model with a byte-level or sentencepiece tokenizer"
        )


def _read_backend(files: TokenizerFiles) -> tokenizers.Tokenizer:
    path = files.directory / "tokenizer.json"
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises bare Exception for every fault of the file
        raise read_failure(path, error) from error


def _add_missing_tokens(backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
    """Tokens that only the small files know, and the special mark on those that tokenizer.json has as plain ones."""
    stale: list[str] = []
    for token in files.added_tokens:
        if backend.token_to_id(token.content) is not None:
            continue
        if token.file == ADDED_TOKENS_NAME and token.token_id != _next_id(backend):
            stale.append(token.content)
            continue
        flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
        added = tokenizers.AddedToken(token.content, special=token.special, normalized=token.normalized, **flags)
        backend.add_special_tokens([added]) if token.special else backend.add_tokens([added])
        given = backend.token_to_id(token.content)
        if given != token.token_id:
            cause = ValueError(f"{token.content!r} should have id {token.token_id}, tokenizer.json leaves it {given}")
            raise read_failure(files.directory / token.file, cause)
    if stale:
        logger.warning(
            "%s: %d tokens are left out, since tokenizer.json has no room for them at their ids: %.400s",
            files.directory / ADDED_TOKENS_NAME,
            len(stale),
            ", ".join(map(repr, stale)),
        )
    known = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    for content in files.special_texts:
        if not known.get(content) and backend.token_to_id(content) is not None:
            backend.add_special_tokens([tokenizers.AddedToken(content, special=True, normalized=False)])


def _next_id(backend: tokenizers.Tokenizer) -> int:
    """The id that the library gives to the next token."""
    last = max(backend.get_added_tokens_decoder(), default=-1)
    return max(backend.get_vocab_size(with_added_tokens=False), last + 1)


def _named_id(backend: tokenizers.Tokenizer, files: TokenizerFiles, role: str, of_config: int | None) -> int | None:
    if role in files.named:
        return backend.token_to_id(files.named[role])
    return None if role in files.options else of_config  # an explicit null means: none


def _piece_table(
    backend: tokenizers.Tokenizer, vocabulary: dict[str, int], size: int, special_ids: frozenset[int]
) -> PieceTable | None:
    """The table for a sentencepiece-style decoder with byte pieces; None for every other decoder, where the
    library's own decoding already follows the prefix rule."""
    stages = _decoder_stages(backend)
    if {"type": "ByteFallback"} not in stages:
        return None
    if any(s not in (_SPACE_STAGE, {"type": "ByteFallback"}, {"type": "Fuse"}, _STRIP_STAGE) for s in stages):
        return None
    pieces = [b""] * size
    for text, token_id in vocabulary.items():
        pieces[token_id] = piece_bytes(text)
    return PieceTable(pieces=tuple(pieces), special_ids=special_ids, strip_leading_space=_STRIP_STAGE in stages)


def _decoder_stages(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
