"""`LlmTokenizer`: the tokenizer of a loaded model under the names that users of transformers know."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.offline.arguments import refuses_unknown
from jaxserve.text import ChatTemplate, Tokenizer, encode_chat


class LlmTokenizer:
    """A `Tokenizer` that can be called and that renders chats, as tokenizers of transformers do.

    Immutable, and safe to call from several threads. Ids are lists of int: there is no padding, there are no tensors.
    """

    def __init__(self, tokenizer: Tokenizer, template: Callable[[], ChatTemplate]) -> None:
        """`template` gives the model's own, which is compiled when a chat is rendered."""
        self._tokenizer = tokenizer
        self._template = template

    @refuses_unknown
    def __call__(
        self, text: str | Sequence[str], *, add_special_tokens: bool = True
    ) -> dict[str, list[int]] | dict[str, list[list[int]]]:
        """`input_ids` and `attention_mask` (ones) of a text, or of each of a list. Raises InvalidRequest."""
        if isinstance(text, str):
            return _encoding(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        each = [self._tokenizer.encode(one, add_special_tokens=add_special_tokens) for one in text]
        return {"input_ids": each, "attention_mask": [[1] * len(ids) for ids in each]}

    @refuses_unknown
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str | list[int] | dict[str, list[int]]:
        """The prompt of a conversation.

        Args:
          conversation: messages, each {"role": …, "content": …}.
          tools: JSON schemas, handed to the template.
          chat_template: Jinja source, or the name of one of the model's own, in place of its own.
          add_generation_prompt: end with the opening of the assistant's turn.
          tokenize: False returns the text. Encoded, a special token that a message spells would become one there; in
            the ids of this method it is plain text, as in `LLM.chat`.
          return_dict: with `tokenize`, {"input_ids", "attention_mask"}; False: the ids alone.
          chat_template_kwargs: further values for the template, such as `enable_thinking`.

        Raises InvalidRequest for malformed messages, a model without a template, or what the template refuses.
        """
        template = self._template() if chat_template is None else ChatTemplate.of(self._tokenizer, chat_template)
        if not tokenize:
            return template.render(
                conversation, add_generation_prompt=add_generation_prompt, tools=tools, variables=chat_template_kwargs
            )
        ids = encode_chat(
            self._tokenizer,
            template,
            conversation,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables=chat_template_kwargs,
        )
        return _encoding(ids) if return_dict else ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer.encode`."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_plain(self, text: str) -> list[int]:
        """See `Tokenizer.encode_plain`."""
        return self._tokenizer.encode_plain(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids. Special tokens are spelled out unless they are to be skipped, as in transformers."""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = False) -> list[str]:
        """`decode` of each."""
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

    def token_text(self, token_id: int) -> str:
        """See `Tokenizer.token_text`."""
        return self._tokenizer.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        return self._tokenizer.token_bytes(token_id)

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._tokenizer.vocab_size

    @property
    def eos_token_id(self) -> int | None:
        """None when the vocabulary has none."""
        return self._tokenizer.eos_token_id

    @property
    def bos_token_id(self) -> int | None:
        """None when the vocabulary has none."""
        return self._tokenizer.bos_token_id

    @property
    def eos_token(self) -> str | None:
        """The text of `eos_token_id`."""
        return self._text(self.eos_token_id)

    @property
    def bos_token(self) -> str | None:
        """The text of `bos_token_id`."""
        return self._text(self.bos_token_id)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        return self._tokenizer.special_ids

    @property
    def all_special_ids(self) -> list[int]:
        """The same in order."""
        return sorted(self._tokenizer.special_ids)

    @property
    def chat_template(self) -> str | None:
        """Jinja source; None for a model without one."""
        return self._tokenizer.chat_template

    @property
    def named_chat_templates(self) -> Mapping[str, str]:
        """See `Tokenizer`."""
        return self._tokenizer.named_chat_templates

    def _text(self, token_id: int | None) -> str | None:
        return None if token_id is None else self._tokenizer.token_text(token_id)


def _encoding(ids: list[int]) -> dict[str, list[int]]:
    return {"input_ids": ids, "attention_mask": [1] * len(ids)}
