"""A clock and a tokenizer for tests and notebooks, re-exported by `jaxserve.testing`."""

from collections.abc import Iterable, Mapping


class ManualClock:
    """Time that passes when a test says so."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Lets time pass; `seconds` is not negative."""
        assert seconds >= 0, seconds
        self.now_s += seconds


class ByteTokenizer:
    """UTF-8 bytes are ids 0..255; then begin, end and a chat tag. Implements the protocol of `jaxserve.text`."""

    vocab_size = 259
    bos_token_id = 256
    eos_token_id = 257
    chat_token_id = 258
    special_ids = frozenset({256, 257, 258})
    chat_template: str | None = (
        "{% for m in messages %}<|chat|>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|chat|>assistant: {% endif %}"
    )
    named_chat_templates: Mapping[str, str] = {}
    _names: Mapping[int, str] = {256: "<s>", 257: "</s>", 258: "<|chat|>"}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The bytes of `text`, after the begin token. Names of special tokens in the text become their ids."""
        ids = [self.bos_token_id] if add_special_tokens else []
        while text:
            hits = [(text.find(name), token_id, name) for token_id, name in self._names.items() if name in text]
            start, token_id, name = min(hits, default=(len(text), -1, ""))
            ids += text[:start].encode()
            if token_id >= 0:
                ids.append(token_id)
            text = text[start + len(name) :]
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """The bytes of `text`, names of special tokens among them."""
        return list(text.encode())

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids; incomplete or wrong UTF-8 becomes U+FFFD."""
        parts: list[bytes] = []
        for token_id in ids:
            if token_id < 256:
                parts.append(bytes([token_id]))
            elif token_id < self.vocab_size and not skip_special_tokens:
                parts.append(self._names[token_id].encode())
        return b"".join(parts).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        """Text of one id, specials spelled out."""
        return self.decode((token_id,), skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """One byte, or the name of a special token."""
        return bytes([token_id]) if token_id < 256 else self._names[token_id].encode()
