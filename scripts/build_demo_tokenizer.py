"""Builds the demo model's SentencePiece vocabulary by hand.

Owns the choice of pieces. A trained vocabulary would merge digits and split words by frequency;
here whole words exist only after a space (or, with a capital, at the start of a text), so a
digit of a sum is one piece and any word inside quotes, or unknown, falls apart into letters.
"""

from __future__ import annotations

import argparse
import string
from pathlib import Path

from demo_tasks import spoken_words
from sentencepiece import sentencepiece_model_pb2 as sp_model

CHAT_TAGS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
SPACE = "\u2581"
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


def main() -> None:
    """Command line: one argument, where to write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, nargs="?", default=Path("jaxserve/demo_model/tokenizer.model"))
    args = parser.parse_args()
    print(f"{build(args.path)} pieces in {args.path}")


if __name__ == "__main__":
    main()
