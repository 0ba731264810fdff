"""From a model directory to one of the two kinds of tokenizers. Nothing is downloaded."""

import os
from pathlib import Path

from jaxserve.errors import CheckpointError
from jaxserve.text.base import Tokenizer
from jaxserve.text.hf_tokenizer import HfTokenizer
from jaxserve.text.sentencepiece_tokenizer import SentencePieceTokenizer
from jaxserve.text.tokenizer_files import REMEDY, read_tokenizer_files


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a Hugging Face style model directory.

    `tokenizer.json` is taken when both files exist: it is complete in itself (normaliser, added tokens, post
    processor), it is what transformers loads and what the authors' own evaluations ran, while `tokenizer.model`
    needs the small files beside it and in newer checkpoints is sometimes not a sentencepiece model at all.

    Raises CheckpointError when neither exists or one is unreadable; the message names the file and the remedy.
    """
    path = Path(directory)
    if not path.is_dir():
        raise CheckpointError(f"the tokenizer directory {path} does not exist; {REMEDY}")
    files = read_tokenizer_files(path)
    if (path / "tokenizer.json").is_file():
        return HfTokenizer(files)
    if (path / "tokenizer.model").is_file():
        return SentencePieceTokenizer(files)
    raise CheckpointError(f"{path} has neither tokenizer.json nor tokenizer.model; {REMEDY}")
