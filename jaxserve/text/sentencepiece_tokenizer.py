"""A tokenizer from `tokenizer.model` (sentencepiece), with the added tokens that its vocabulary does not have.

Added tokens are cut out of the text here, and the space before the first word follows the rule below; the sentencepiece
library segments the rest.

The prefix space. Most models were trained with sentencepiece's "dummy prefix": a space is put before the text, so
that a word looks the same at the start as in the middle. Around special tokens three behaviours exist, chosen here
from tokenizer_config.json as transformers does:

    add_prefix_space false           no space anywhere
    legacy false (the default here)  one space, before the text, and only when no special token comes first
    legacy true                      one space before every stretch of text between special tokens

Without `add_prefix_space`, the model file decides. For `legacy` absent, transformers 4 took true and 5 takes false;
this follows 5. Text that itself begins with a space keeps it in addition to the prefix, as sentencepiece does
(and transformers 4 slow); transformers 5 would merge the two.
"""

import re
from collections.abc import Iterator, Sequence

import sentencepiece

from jaxserve.text.base import check_text
from jaxserve.text.pieces import SPACE_MARK, PieceTable, piece_bytes
from jaxserve.text.tokenizer_files import AddedToken, TokenizerFiles, read_failure

# A second `normalizer_spec { add_dummy_prefix }` at the end of the serialised model overrides the first: protobuf
# merges repeated occurrences of an embedded message. It spares a dependency on the compiled schema.
_PREFIX_OFF = bytes([0x1A, 0x02, 0x18, 0x00])
_PREFIX_ON = bytes([0x1A, 0x02, 0x18, 0x01])
_MAX_ID_GAP = 100_000  # an added token may leave holes for reserved ids; a wild id must not allocate a wild table


class SentencePieceTokenizer:
    """A `Tokenizer` over one sentencepiece model, serialised: `model`, or that of the directory. Immutable after
    construction.

    Raises CheckpointError when the model file cannot be read or an added token has an impossible id.
    """

    def __init__(self, files: TokenizerFiles, model: bytes | None = None) -> None:
        model_path = files.directory / "tokenizer.model" if model is None else files.directory
        try:
            model = model_path.read_bytes() if model is None else model
            if not model:  # the library would leave itself unloaded, and say so only when used
                raise ValueError("it is empty")
            processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            has_prefix = processor.normalize("a").startswith(SPACE_MARK)
        except (OSError, RuntimeError, ValueError, UnicodeDecodeError) as error:
            raise read_failure(model_path, error) from error
        configured = files.options.get("add_prefix_space")
        prefix = has_prefix if configured is None else bool(configured)
        legacy = bool(files.options.get("legacy") or False)
        self._first = _processor(model, prefix)
        self._rest = self._first if legacy or not prefix else _processor(model, False)

        added = _all_added_tokens(processor, files)
        self._pattern = _split_pattern(added)
        self._id_of = {token.content: token.token_id for token in added}
        self.special_ids = frozenset(token.token_id for token in added if token.special)
        self.bos_token_id = self._named_id(files, "bos_token", processor.bos_id(), files.bos_id)
        self.eos_token_id = self._named_id(files, "eos_token", processor.eos_id(), files.eos_id)
        self._before = _optional_id(bool(files.options.get("add_bos_token", True)), self.bos_token_id)
        self._after = _optional_id(bool(files.options.get("add_eos_token", False)), self.eos_token_id)
        self.chat_template = files.chat_template
        self.named_chat_templates = files.named_chat_templates
        self._table = PieceTable(
            pieces=_piece_table(processor, added, files), special_ids=self.special_ids, strip_leading_space=prefix
        )
        self.vocab_size = len(self._table.pieces)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer.encode`. `add_bos_token` (default true, as Llama) and `add_eos_token` (default false) of
        tokenizer_config.json decide which tokens are added."""
        check_text(text)
        ids = [*self._before] if add_special_tokens else []
        for start, chunk, token_id in self._split(text):
            if chunk:
                ids += (self._rest if start else self._first).encode(chunk)
            if token_id is not None:
                ids.append(token_id)
        if add_special_tokens:
            ids += self._after
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """See `Tokenizer.encode_plain`."""
        check_text(text)
        return self._first.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
        return self._table.decode(ids, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """See `Tokenizer.token_text`."""
        return self._table.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        return self._table.token_bytes(token_id)

    def _split(self, text: str) -> Iterator[tuple[int, str, int | None]]:
        """(offset, plain text, id of the added token after it or None at the end)."""
        start = 0
        if self._pattern is not None:
            for match in self._pattern.finditer(text):
                yield start, text[start : match.start()], self._matched_id(match[0])
                start = match.end()
        yield start, text[start:], None

    def _matched_id(self, matched: str) -> int:
        """The id behind a match, which may have white space around it that the token swallows."""
        forms = (matched, matched.lstrip(), matched.rstrip(), matched.strip())
        return next(self._id_of[form] for form in forms if form in self._id_of)

    def _named_id(self, files: TokenizerFiles, role: str, of_model: int, of_config: int | None) -> int | None:
        if role in files.named:
            return self._id_of.get(files.named[role])
        if role in files.options:
            return None  # an explicit null means: none
        return of_model if of_model >= 0 else of_config


def _optional_id(wanted: bool, token_id: int | None) -> tuple[int, ...]:
    return (token_id,) if wanted and token_id is not None else ()


def _processor(model: bytes, prefix: bool) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model + (_PREFIX_ON if prefix else _PREFIX_OFF))


def _all_added_tokens(processor: sentencepiece.SentencePieceProcessor, files: TokenizerFiles) -> list[AddedToken]:
    """Control and unknown pieces of the model, special texts named in the files, and tokens with their own id.

    Sentencepiece never produces its control pieces from text, so all of them must be cut out beforehand.
    """
    ids, by_text = list(range(processor.get_piece_size())), {}
    for token_id, *is_special in zip(ids, processor.is_control(ids), processor.is_unknown(ids), strict=True):
        if any(is_special):
            content = processor.id_to_piece(token_id)
            by_text[content] = AddedToken(content=content, token_id=token_id, special=True)
    explicit = {token.content: token for token in files.added_tokens}
    for content in files.special_texts:
        token_id = processor.piece_to_id(content)
        if content not in explicit and processor.id_to_piece(token_id) == content:
            by_text[content] = AddedToken(content=content, token_id=token_id, special=True)
    replaced = {token.token_id for token in explicit.values()}
    kept = {text: token for text, token in by_text.items() if token.token_id not in replaced}
    return sorted((kept | explicit).values(), key=lambda token: -len(token.content))  # "<a><b>" goes before "<a>"


def _split_pattern(added: Sequence[AddedToken]) -> re.Pattern[str] | None:
    """Leftmost match wins, then the earlier token.

    No capture groups: with the hundreds of reserved tokens that some models have, they made the search a thousand
    times slower (374 s instead of 0.4 s for a megabyte). White space is matched from its beginning only, so that long
    runs of it cost linear time.
    """
    if not added:
        return None
    alternatives = []
    for token in added:
        body = re.escape(token.content)
        if token.single_word:
            body = rf"(?<!\w){body}(?!\w)"
        alternatives.append((r"(?:(?<!\s)\s+)?" if token.lstrip else "") + body + (r"\s*" if token.rstrip else ""))
    return re.compile("|".join(alternatives))


def _piece_table(
    processor: sentencepiece.SentencePieceProcessor, added: Sequence[AddedToken], files: TokenizerFiles
) -> tuple[bytes, ...]:
    size = processor.get_piece_size()
    pieces = [piece_bytes(piece) for piece in processor.id_to_piece(list(range(size)))]
    limit = size + len(added) + _MAX_ID_GAP
    for token in added:
        if not 0 <= token.token_id < limit:
            cause = ValueError(f"added token {token.content!r} has id {token.token_id}, but the vocabulary has {size}")
            raise read_failure(files.directory / "tokenizer_config.json", cause)
        pieces += [b""] * (token.token_id + 1 - len(pieces))
        pieces[token.token_id] = token.content.encode("utf-8")
    return tuple(pieces)
