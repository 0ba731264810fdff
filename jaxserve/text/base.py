"""`Tokenizer`: the protocol of tokenizers, and the one check that all of them need.

It knows no file format, so that a test or a notebook can pass a tokenizer of twenty lines.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from jaxserve.errors import InvalidRequest


class Tokenizer(Protocol):
    """Text to ids and back. Implementations are immutable after construction and safe to call from several threads.

    Attributes:
      vocab_size: one more than the largest id that `encode` can give. The model's own vocabulary may be padded
        beyond it; `decode` gives no text for such ids.
      eos_token_id, bos_token_id: None when the vocabulary has none.
      special_ids: ids that `skip_special_tokens` leaves out.
      chat_template: Jinja source, None for a model without one.
      named_chat_templates: further sources by name; that of `tool_use` is for chats with tools.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def chat_template(self) -> str | None: ...

    @property
    def named_chat_templates(self) -> Mapping[str, str]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Text that spells a special token becomes that token; `add_special_tokens` adds what the
        model's files say (usually a beginning-of-sequence id). Raises InvalidRequest on a lone surrogate."""
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text`, without any that are added. Text that spells a special token stays text, unless the plain
        rules of the vocabulary find that token, too."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Bytes that are no UTF-8 become U+FFFD, one for each maximal ill-formed part.

        Prefix rule that the detokenizer relies on: one more id only adds text at the end, except that a trailing
        U+FFFD may turn into the character whose bytes were incomplete.
        """
        ...

    def token_text(self, token_id: int) -> str:
        """Text of one id in the middle of a sentence (leading space kept, specials spelled out), for display."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id adds to a text, which need not be whole characters; specials spelled out.

        Raises UnsupportedOption for a vocabulary whose ids have none of their own (they depend on their neighbours).
        """
        ...


def check_text(text: str) -> None:
    """Raises InvalidRequest when `text` cannot be written as UTF-8, naming the place."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text has a lone surrogate {text[error.start]!a} at character {error.start}, which is not valid "
            "Unicode; send the character itself or a complete surrogate pair"
        ) from error
