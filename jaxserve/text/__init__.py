"""Text to token ids and back: everything between a string and a `Request`.

Models, the scheduler and the step see integers only. This package is the one place where text and integers meet:
a `Tokenizer` (two implementations, chosen by the files a checkpoint has), a `Detokenizer` per sequence that turns
a growing list of ids into text that is safe to show, and a `ChatTemplate` that turns messages into one prompt.

The reference for ids is Hugging Face transformers 5 (and sentencepiece itself where the two differ, see
`sentencepiece_tokenizer`). The package imports neither JAX nor transformers.
"""

from jaxserve.text.base import Tokenizer
from jaxserve.text.chat import ChatTemplate, check_special_text, encode_chat
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.encoding_cache import CachingTokenizer
from jaxserve.text.loading import load_tokenizer
from jaxserve.text.long_text import check_text_fits
from jaxserve.text.special_text import PromptText, SpecialText

__all__ = [
    "CachingTokenizer",
    "ChatTemplate",
    "Detokenizer",
    "PromptText",
    "SpecialText",
    "Tokenizer",
    "check_special_text",
    "check_text_fits",
    "encode_chat",
    "load_tokenizer",
]
