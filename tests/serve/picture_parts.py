"""A fake engine that takes pictures, behind ports: what tests of doors share. The processor is Qwen2-VL's."""

import base64
import io
from typing import Any

from PIL import Image
from serve_parts import Served

from jaxserve.testing import ByteTokenizer
from jaxserve.vision import PictureLimits, find_processor

PLACEHOLDER = "<|image|>"


class PictureTokenizer(ByteTokenizer):
    """With a placeholder, which its template writes for each picture."""

    vocab_size = 260
    special_ids = frozenset({256, 257, 258, 259})
    chat_template = (
        "{% for m in messages %}<|chat|>{{ m['role'] }}: "
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
        "{% if c['type'] == 'image' %}<|image|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}\n"
        "{% endfor %}{% if add_generation_prompt %}<|chat|>assistant: {% endif %}"
    )
    _names = {**ByteTokenizer._names, 259: PLACEHOLDER}  # noqa: RUF012


def picture_parts(limits: PictureLimits | None = None, **options: Any) -> Served:
    """`limits`: of pictures; None: small ones. `options`: of `Served`."""
    config = {"architectures": ["Qwen2VLForConditionalGeneration"], "image_token_id": 259}
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "min_pixels": 28 * 28,
        "max_pixels": 28 * 28 * 40,
    }
    limits = limits or PictureLimits(max_source_pixels=1_000_000, max_pictures=3)
    pictures = find_processor(config, preprocessor, limits, "somewhere")
    return Served(tokenizer=PictureTokenizer(), pictures=pictures, mode="context", **options)


def png(width: int = 56, height: int = 84, colour: int = 0, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (colour, 30, 60)).save(out, kind)
    return out.getvalue()


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
