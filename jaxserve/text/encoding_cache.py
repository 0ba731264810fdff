"""A bounded cache of recent encodings in front of any tokenizer.

It helps with system prompts, conversations that are sent again and texts that are first counted and then completed. No
text is kept: an entry is found by a digest of 32 bytes, so no prompt stays in memory because of it, and equal digests
do not happen.
"""

import array
import collections
import hashlib
import threading
from collections.abc import Mapping, Sequence

from jaxserve.text.base import Tokenizer

_ENTRY_BYTES = 200  # of a digest, an array and their places in the dictionary, roughly


class CachingTokenizer:
    """A `Tokenizer` that remembers the encodings of another one. Safe to call from several threads.

    Args:
      inner: the tokenizer that encodes.
      max_bytes: of all entries; the one used longest ago goes first. An encoding of more than a quarter of it is not
        kept, so that one long prompt does not evict all others.
    """

    def __init__(self, inner: Tokenizer, max_bytes: int) -> None:
        self.hits = self.misses = 0
        self.num_bytes = 0
        self._inner = inner
        self._max_bytes = max_bytes
        self._entries: collections.OrderedDict[bytes, array.array[int]] = collections.OrderedDict()
        self._lock = threading.Lock()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer.encode`."""
        # A lone surrogate has a digest too; the tokenizer below then says what is wrong.
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass") + (b"1" if add_special_tokens else b"0")).digest()
        with self._lock:
            known = self._entries.get(key)
            if known is not None:
                self._entries.move_to_end(key)
                self.hits += 1
                return known.tolist()
            self.misses += 1
        ids = self._inner.encode(text, add_special_tokens=add_special_tokens)
        self._keep(key, array.array("i", ids))
        return ids

    def _keep(self, key: bytes, ids: "array.array[int]") -> None:
        size = _size(ids)
        if size > self._max_bytes // 4:
            return
        with self._lock:
            if key in self._entries:  # another thread was as fast
                return
            self._entries[key] = ids
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= _size(self._entries.popitem(last=False)[1])

    # ---- the rest is the tokenizer's ---------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        return self._inner.vocab_size

    @property
    def eos_token_id(self) -> int | None:
        return self._inner.eos_token_id

    @property
    def bos_token_id(self) -> int | None:
        return self._inner.bos_token_id

    @property
    def special_ids(self) -> frozenset[int]:
        return self._inner.special_ids

    @property
    def chat_template(self) -> str | None:
        return self._inner.chat_template

    @property
    def named_chat_templates(self) -> Mapping[str, str]:
        return self._inner.named_chat_templates

    def encode_plain(self, text: str) -> list[int]:
        """See `Tokenizer.encode_plain`. Texts are few and short; none is kept."""
        return self._inner.encode_plain(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
        return self._inner.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """See `Tokenizer.token_text`."""
        return self._inner.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        return self._inner.token_bytes(token_id)


def _size(ids: "array.array[int]") -> int:
    return len(ids) * ids.itemsize + _ENTRY_BYTES
