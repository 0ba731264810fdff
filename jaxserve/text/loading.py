"""From a model directory or a GGUF file to one of the two kinds of tokenizers. Nothing is downloaded."""

import os
from pathlib import Path

from jaxserve.errors import CheckpointError
from jaxserve.files.gguf_file import SUFFIX, find_gguf
from jaxserve.text.base import Tokenizer
from jaxserve.text.gguf_tokenizer import read_gguf_tokenizer
from jaxserve.text.hf_tokenizer import HfTokenizer
from jaxserve.text.sentencepiece_tokenizer import SentencePieceTokenizer
from jaxserve.text.tokenizer_files import REMEDY, read_tokenizer_files


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a Hugging Face style model directory, or of a GGUF file.

    `tokenizer.json` is taken when both files exist: it is complete in itself (normaliser, added tokens, post
    processor), it is what transformers loads and what the authors' own evaluations ran, while `tokenizer.model`
    needs the small files beside it and in newer checkpoints is sometimes not a sentencepiece model at all.

    A directory with neither may have one GGUF file, as for models.

    Raises CheckpointError when none exists or one is unreadable; the message names the file and the remedy.
    """
    path = Path(directory)
    if path.suffix == SUFFIX and (file := find_gguf(path)) is not None:
        return read_gguf_tokenizer(file)
    if not path.is_dir():
        raise CheckpointError(f"the tokenizer directory {path} does not exist; {REMEDY}")
    files = read_tokenizer_files(path)
    if (path / "tokenizer.json").is_file():
        return HfTokenizer(files)
    if (path / "tokenizer.model").is_file():
        return SentencePieceTokenizer(files)
    if (file := find_gguf(path)) is not None:
        return read_gguf_tokenizer(file)
    raise CheckpointError(f"{path} has neither tokenizer.json nor tokenizer.model; {REMEDY}")
