"""Builds the demo model's vocabulary by hand: `tokenizer.model`, and `tokenizer.json` from it.

A trained vocabulary would merge digits and split words by frequency; here whole words exist only after a space (or,
with a capital, at the start of a text), so a digit of a sum is one piece and any word inside quotes, or unknown, falls
apart into letters.

The second file holds the same vocabulary for the `tokenizers` library, which transformers and other servers read:
they would take the first one for a BPE, as Llama's is, and cut texts otherwise.
"""

from __future__ import annotations

import argparse
import string
from pathlib import Path

import tokenizers
from demo_tasks import spoken_words
from sentencepiece import sentencepiece_model_pb2 as sp_model
from tokenizers import decoders, models, normalizers, processors

CHAT_TAGS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
SPACE = "\u2581"
UNSPELLED = -1e4  # the score of a piece that no text is cut into
# Bits of JSON and arithmetic that always occur together, and the two-digit values of lists: with
# its value as the very next piece, a key is found by the simplest of attention patterns.
GLUED = (
    *('{"', '":', SPACE + '"', '",', '"}', SPACE + "+", SPACE + "="),
    *('"name"', '"age"', '"city"', '"pet"', '"color"'),
    *(f":{value}" for value in range(10, 100)),
)


def build(path: Path) -> int:
    """Write the model to ``path`` and return its number of pieces (a multiple of 8)."""
    words, opening = spoken_words()
    proto = sp_model.ModelProto()
    kind = sp_model.ModelProto.SentencePiece

    def piece(text: str, score: float, what: int) -> None:
        proto.pieces.add(piece=text, score=score, type=what)

    piece("<unk>", 0.0, kind.UNKNOWN)
    piece("<s>", 0.0, kind.CONTROL)
    piece("</s>", 0.0, kind.CONTROL)
    for tag in CHAT_TAGS:
        piece(tag, 0.0, kind.USER_DEFINED)
    for byte in range(256):
        piece(f"<0x{byte:02X}>", 0.0, kind.BYTE)
    characters = [c for c in string.printable if c.isprintable() and c != " "]
    for char in [SPACE, *characters]:
        piece(char, -10.0, kind.NORMAL)
    glued = list(GLUED)
    known = {SPACE, *characters}
    texts = glued + sorted(SPACE + w for w in words) + sorted(w for w in opening if len(w) > 1)
    for text in texts:
        if text not in known:
            known.add(text)
            piece(text, -2.0, kind.NORMAL)
    spare = -len(proto.pieces) % 8
    for index in range(spare):
        piece(f"<spare{index}>", 0.0, kind.CONTROL)

    trainer = proto.trainer_spec
    trainer.model_type = sp_model.TrainerSpec.UNIGRAM
    trainer.vocab_size = len(proto.pieces)
    trainer.byte_fallback = True
    trainer.unk_id, trainer.bos_id, trainer.eos_id, trainer.pad_id = 0, 1, 2, -1
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = False
    proto.normalizer_spec.remove_extra_whitespaces = False
    proto.normalizer_spec.escape_whitespaces = True
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(proto.SerializeToString())
    return len(proto.pieces)


def convert(model: Path, path: Path) -> None:
    """Write the vocabulary of ``model`` as a tokenizer.json that gives the same ids."""
    proto = sp_model.ModelProto.FromString(model.read_bytes())
    kind = sp_model.ModelProto.SentencePiece
    # Text never becomes a byte piece that it spells ("<0x0A>"), so such a match must lose against all others.
    pieces = [(p.piece, UNSPELLED if p.type == kind.BYTE else p.score) for p in proto.pieces]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    cut_out = (kind.UNKNOWN, kind.CONTROL, kind.USER_DEFINED)
    special = [p.piece for p in proto.pieces if p.type in cut_out]
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in special])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(path), pretty=False)


def main() -> None:
    """Command line: one argument, where to write tokenizer.model; tokenizer.json is put beside it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, nargs="?", default=Path("jaxserve/demo_model/tokenizer.model"))
    args = parser.parse_args()
    print(f"{build(args.path)} pieces in {args.path}")
    convert(args.path, args.path.with_name("tokenizer.json"))


if __name__ == "__main__":
    main()
