"""A tokenizer from the `tokenizer.*` metadata of a GGUF file.

    tokenizer.ggml.model   gpt2: byte-level BPE; llama: sentencepiece's BPE; t5: sentencepiece's unigram
    tokenizer.ggml.tokens, token_type, scores, merges
    tokenizer.ggml.pre     gpt2 alone: the name of how text is cut before it is merged

Byte-level BPE is carried out by the `tokenizers` library. For the others the sentencepiece model is put together again:
a file has all of it but the name of its normaliser, and the library then segments as it did for the original.

A name of `pre` stands for a regular expression that the file does not have. The table has those of which the original
tokenizer.json is known; for others there is no way but to have that.
"""

import dataclasses
import functools
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jaxserve.errors import CheckpointError
from jaxserve.files.gguf_file import GgufArray, GgufFile, read_gguf
from jaxserve.text.base import Tokenizer
from jaxserve.text.hf_tokenizer import HfTokenizer
from jaxserve.text.pieces import SPACE_MARK
from jaxserve.text.sentencepiece_tokenizer import SentencePieceTokenizer
from jaxserve.text.tokenizer_files import TokenizerFiles

_KEY = "tokenizer.ggml."
_REMEDY = (
    "point model.tokenizer at a directory with the tokenizer.json of the original model, or set model.skip_tokenizer "
    "to serve ids only"
)
# Types of tokens, which are sentencepiece's.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_MARKS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
# Words that end where a capital letter follows a small one.
_LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Pre:
    """How text is cut before it is merged.

    Attributes:
      pattern: what stays together; None: GPT-2's own pattern.
      digits: each digit is cut off first.
      nfc: text is normalised.
      whole_words: a piece that is in the vocabulary is not taken apart, whatever the merges say.
      adds_bos: where the file does not say.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False


_CL100K = "|".join((_CONTRACTIONS, _WORDS, r"\p{N}{1,3}", _MARKS, _SPACES))
_O200K = "|".join(
    (f"{_LOWER}{_CONTRACTIONS}?", f"{_UPPER}{_CONTRACTIONS}?", r"\p{N}{1,3}", _MARKS_AND_SLASHES, _SPACES)
)
_LLAMA = _Pre(pattern=_CL100K, whole_words=True, adds_bos=True)
_QWEN = _Pre(pattern="|".join((_CONTRACTIONS, _WORDS, r"\p{N}", _MARKS, _SPACES)), nfc=True)
_GPT2, _DIGITS = _Pre(), _Pre(digits=True)
_PRE = {
    "dbrx": _Pre(pattern=_CL100K),
    "deepseek-r1-qwen": _QWEN,
    "gpt-2": _GPT2,
    "gpt-4o": _Pre(pattern=_O200K),
    "llama-bpe": _LLAMA,
    "llama-v3": _LLAMA,
    "llama3": _LLAMA,
    "olmo": _GPT2,
    "phi-2": _GPT2,
    "qwen2": _QWEN,
    "refact": _DIGITS,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "tekken": _Pre(
        pattern="|".join((_LOWER, _UPPER, r"\p{N}", _MARKS_AND_SLASHES, _SPACES)), whole_words=True, adds_bos=True
    ),
}
_UNIGRAM, _BPE = 1, 2  # sentencepiece's model types
_MODELS = {"llama": _BPE, "t5": _UNIGRAM}


def read_gguf_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file, or of the one whose first part this is.

    Raises CheckpointError for a file without one, and for a kind or a `pre` that is not known.
    """
    vocabulary = _Vocabulary(read_gguf(path))
    model = vocabulary.get("model", str)
    if model == "gpt2":
        return _byte_level(vocabulary)
    if model not in _MODELS:
        vocabulary.fail("model", f"it is {model!r}, which is not supported; known: {', '.join(('gpt2', *_MODELS))}")
    return _sentencepiece(vocabulary, _MODELS[model])


class _Vocabulary:
    """The metadata of a tokenizer, checked."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.path = file.path
        self.tokens: list[str] = self._array("tokens", str, None)
        count = len(self.tokens)
        self.types: list[int] = self._array("token_type", int, count) or [_NORMAL] * count
        self.scores: list[float] = self._array("scores", float, count)

    def merges(self) -> list[tuple[str, str]]:
        found = []
        for merge in self._array("merges", str, None):
            left, space, right = merge.partition(" ")
            if not space or not right:
                self.fail("merges", f"{merge!r:.60} are not two tokens with a space between")
            found.append((left, right))
        return found

    def get(self, name: str, *types: type) -> Any:
        return self._file.get(f"{_KEY}{name}", *types)

    def token(self, name: str) -> str | None:
        """The text of a token that the metadata name by its id."""
        token_id = self.get(f"{name}_token_id", int)
        if token_id is None:
            return None
        if not 0 <= token_id < len(self.tokens):
            self.fail(f"{name}_token_id", f"it is {token_id}, but there are {len(self.tokens)} tokens")
        return self.tokens[token_id]

    def fail(self, name: str, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {_KEY}{name}: {problem}; {_REMEDY}")

    def files(self, options: Mapping[str, Any]) -> TokenizerFiles:
        """What the small files of a directory would say. `options`: tokenizer_config.json's."""
        named = {f"{role}_token": text for role in ("bos", "eos") if (text := self.token(role)) is not None}
        for_tools = self._file.get("tokenizer.chat_template.tool_use", str)
        special = [text for text, kind in zip(self.tokens, self.types, strict=True) if kind == _CONTROL]
        return TokenizerFiles(
            directory=self.path,
            options=options,
            named=named,
            special_texts=tuple(dict.fromkeys((*special, *named.values()))),
            added_tokens=(),
            bos_id=None,
            eos_id=None,
            chat_template=self._file.get("tokenizer.chat_template", str),
            named_chat_templates={} if for_tools is None else {"tool_use": for_tools},
        )

    def _array(self, name: str, kind: type, count: int | None) -> list[Any]:
        found = self.get(name, GgufArray)
        if found is None:
            if name == "tokens":
                raise CheckpointError(f"{self.path} has no tokenizer ({_KEY}{name} is missing); {_REMEDY}")
            return []
        values = found.read()
        if not {kind}.issuperset(map(type, values)) or count not in (None, len(values)):
            wanted = "" if count is None else f"{count} "
            self.fail(name, f"it is {found}, but must be an array of {wanted}values of type {kind.__name__}")
        return values


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    name = vocabulary.get("pre", str)
    if name not in _PRE:
        vocabulary.fail(
            "pre", f"it is {name!r}, and how that cuts text is not known here; known: {', '.join(sorted(_PRE))}"
        )
    pre = _PRE[name]
    # Of tokens with the same text the first counts, as in llama.cpp.
    ids = {text: i for i, text in reversed([*enumerate(vocabulary.tokens)])}
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=vocabulary.merges(), ignore_merges=pre.whole_words))
    except Exception as error:  # the binding raises bare Exception, as for a merge of what is no token
        raise CheckpointError(f"{vocabulary.path}: {_KEY}merges: {error}; {_REMEDY}") from error
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    cut_out = [
        tokenizers.AddedToken(text, special=kind == _CONTROL, normalized=False)
        for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_special_tokens([token for token in cut_out if token.special])
    backend.add_tokens([token for token in cut_out if not token.special])
    before = _added(vocabulary, "bos", pre.adds_bos)
    after = _added(vocabulary, "eos", False)
    if before or after:
        template = [*before, "$A", *after]
        backend.post_processor = processors.TemplateProcessing(
            single=template, pair=[*template, "$B"], special_tokens=[(text, ids[text]) for text in (*before, *after)]
        )
    return HfTokenizer(vocabulary.files({}), backend)


def _pre_tokenizer(pre: _Pre) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits else []
    if pre.pattern is not None:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(pre.pattern), "isolated"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None)
    return pre_tokenizers.Sequence([*steps, byte_level])


def _added(vocabulary: _Vocabulary, role: str, default: bool) -> list[str]:
    """The token that is added to a text, if one is."""
    given = vocabulary.get(f"add_{role}_token", bool)
    text = vocabulary.token(role)
    return [text] if text is not None and (default if given is None else given) else []


def _sentencepiece(vocabulary: _Vocabulary, kind: int) -> Tokenizer:
    normal = {s for s, t in zip(vocabulary.scores, vocabulary.types, strict=False) if t == _NORMAL}
    if len(normal) < 2:
        vocabulary.fail("scores", "all tokens have the same, or none: they say nothing about the order of merges")
    options = {
        "add_bos_token": vocabulary.get("add_bos_token", bool) is not False,
        "add_eos_token": vocabulary.get("add_eos_token", bool) is True,
    }
    return SentencePieceTokenizer(vocabulary.files(options), _serialised(vocabulary, kind))


def _serialised(vocabulary: _Vocabulary, kind: int) -> bytes:
    """The ModelProto of sentencepiece_model.proto: pieces (1), trainer_spec (2), normalizer_spec (3)."""
    pieces: list[bytes] = []
    scores = struct.pack(f"<{len(vocabulary.scores)}f", *vocabulary.scores)
    for number, (text, token_type) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        # Converters write the spaces of tokens that are cut out as they are in the text, sentencepiece as marks.
        spelled = (text.replace(" ", SPACE_MARK) if token_type == _USER_DEFINED else text).encode()
        before, after = _piece_fields(len(spelled), token_type)
        pieces += (before, scores[4 * number : 4 * number + 4], after, spelled)
    trainer = _int_field(3, kind) + _int_field(35, int(_BYTE in vocabulary.types))
    unknown = [text for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == _UNKNOWN]
    for number, text in ((45, unknown[0] if unknown else None), *((n, vocabulary.token(r)) for n, r in _ROLES)):
        trainer += b"" if text is None else _bytes_field(number, text.encode())
    normalizer = _int_field(3, int(vocabulary.get("add_space_prefix", bool) is not False))
    normalizer += _int_field(4, int(vocabulary.get("remove_extra_whitespaces", bool) is True))
    charsmap = vocabulary.get("precompiled_charsmap", GgufArray)
    if charsmap is not None:
        normalizer += _bytes_field(2, bytes(value & 255 for value in charsmap.read()))
    return b"".join((*pieces, _bytes_field(2, trainer), _bytes_field(3, normalizer)))


_ROLES = ((46, "bos"), (47, "eos"))  # fields of the trainer_spec with the texts of these tokens


def _int_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _bytes_field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


@functools.lru_cache(maxsize=4096)  # vocabularies have some 100,000 pieces, of a hundred lengths
def _piece_fields(text_len: int, token_type: int) -> tuple[bytes, bytes]:
    """What stands before the score of a piece, and between that and the bytes of its text."""
    after = _int_field(3, token_type) + _varint(1 << 3 | 2) + _varint(text_len)
    before = _varint(1 << 3 | 2) + _varint(1 + 4 + len(after) + text_len)
    return before + _varint(2 << 3 | 5), after


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))
