"""Pictures of prompts: sizes, placeholders, positions, and what is refused. No JAX."""

import io
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from picture_files import jpeg_of_scans
from PIL import Image

from jaxserve.errors import CheckpointError, InvalidRequest, how_to_install
from jaxserve.values.content import Picture
from jaxserve.vision import PictureLimits, find_processor
from jaxserve.vision.decoder_program import Refused, decode, has_more_scans
from jaxserve.vision.decoding import Decoders, silence_pillow
from jaxserve.vision.qwen2_vl import Qwen2VLProcessor

PAD = 9
CONFIG = {"architectures": ["Qwen2VLForConditionalGeneration"], "image_token_id": PAD}
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "min_pixels": 56 * 56,
    "max_pixels": 280 * 280,
}


def qwen(**limits: int) -> Qwen2VLProcessor:
    found = find_processor(CONFIG, PREPROCESSOR, PictureLimits(**limits), "somewhere")
    assert isinstance(found, Qwen2VLProcessor)
    return found


def png(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 60)).save(out, "PNG")
    return out.getvalue()


def of_grid(rows: int, columns: int) -> Picture:
    return Picture(digest=bytes([rows, columns]), grid=(1, rows, columns), num_tokens=rows * columns // 4, pixels=b"")


def test_placeholders_are_repeated_and_positions_are_counted_in_three_ways() -> None:
    processor = qwen()
    pictures = [of_grid(4, 6), of_grid(2, 2)]
    token_ids, placed = processor.expand([5, PAD, PAD, 6, 7], pictures)
    assert token_ids == [5, *[PAD] * 7, 6, 7]
    assert [(p.start, p.picture.num_tokens) for p in placed] == [(1, 6), (7, 1)]
    assert placed[0].span == (1, 6, bytes([4, 6]))
    positions = processor.positions(len(token_ids), placed)
    assert positions.of_tokens.tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5, 6],
        [0, 1, 1, 1, 2, 2, 2, 4, 5, 6],
        [0, 1, 2, 3, 1, 2, 3, 4, 5, 6],
    ]
    assert positions.delta == 7 - 10


@pytest.mark.parametrize(
    ("token_ids", "count", "said"),
    [
        ([5, 6], 1, "0 placeholders"),
        ([PAD, 5, PAD], 1, "2 placeholders"),
        ([PAD], 0, "no text may hold"),
        ([], 3, "3 pictures, but"),
    ],
)
def test_a_placeholder_without_its_picture_is_refused(token_ids: list[int], count: int, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        qwen(max_pictures=2).expand(token_ids, [of_grid(2, 2)] * count)


def test_no_picture_exceeds_the_patches_that_are_promised() -> None:
    for max_pixels in (28 * 28, 60 * 60, 280 * 280, 1000 * 1000):
        processor = qwen(max_pixels=max_pixels)
        for short in (1, 3, 13, 28, 41, 57, 100, 999):
            for aspect in (1, 1.37, 5, 99, 200):
                height, width = processor.resized(short, int(short * aspect))
                assert height * width // 14**2 <= processor.max_patches, (max_pixels, short, aspect)


@pytest.mark.parametrize(("width", "height"), [(28, 28), (1, 200), (5601, 28)])
def test_shapes(width: int, height: int) -> None:
    processor = qwen()
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(InvalidRequest, match="too thin"):
            processor.process(png(width, height))
        return
    picture = processor.process(png(width, height))
    assert picture.num_tokens * 4 == picture.num_patches
    assert len(picture.pixels) == picture.num_patches * 3 * 14 * 14


def test_equal_pixels_have_equal_digests_whatever_the_file() -> None:
    processor, one = qwen(), Image.effect_noise((80, 60), 50).convert("RGB")
    files = []
    for kind in ("PNG", "WEBP"):
        out = io.BytesIO()
        one.save(out, kind, lossless=True)
        files.append(out.getvalue())
    digests = {processor.process(file).digest for file in files}
    assert digests == {processor.process(one).digest}
    turned = processor.process(one.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    assert turned.digest not in digests


def test_a_header_with_too_many_pixels_is_refused_before_it_is_decoded() -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    with pytest.raises(Refused, match="pixels"):
        decode(bomb, 50_000_000, 100)


def test_the_scans_of_a_jpeg_are_counted_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    few = jpeg_of_scans(100, 64)
    assert decode(few, 50_000_000, 100).size == (64, 64)
    with pytest.raises(Refused, match=r"more than 99 scans.*vision\.max_scans"):
        decode(few, 50_000_000, 99)
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("it is decoded"))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda _: pytest.fail("it is decoded"))
    with pytest.raises(Refused, match="more than 100 scans"):
        decode(jpeg_of_scans(40_000, 4000), 50_000_000, 100)


def test_what_is_no_scan_is_not_counted() -> None:
    """Marks of scans in what a camera or a program wrote beside the pixels, and behind the end; and coded data."""
    noise = Image.effect_noise((300, 200), 90).convert("RGB")
    thumbnail = encoded(noise.resize((60, 40)), "JPEG", progressive=True)
    for options in ({}, {"progressive": True}, {"restart_marker_blocks": 3}):
        plain = encoded(noise, "JPEG", quality=97, **options)
        scans = 1 if "progressive" not in options else plain.count(b"\xff\xda")
        assert scans == 1 or 5 < scans < 12
        beside = b"\xff\xe5" + struct.pack(">H", 2 + len(thumbnail)) + thumbnail
        for data in (plain, plain[:2] + beside + plain[2:], plain + thumbnail * 3, plain[:2] + b"\xff" * 9 + plain[2:]):
            assert has_more_scans(data, scans - 1) and not has_more_scans(data, scans)
            found = decode(data, 50_000_000, scans)
            np.testing.assert_array_equal(np.asarray(found), np.asarray(decode(plain, 50_000_000, scans)))


@pytest.mark.parametrize("data", [b"", b"GIF89a" + bytes(40), b"\xff\xd8\xff\xe0" + bytes(30), png(300, 300)[:200]])
def test_what_is_no_picture_is_refused(data: bytes) -> None:
    with pytest.raises(Refused, match=r"PNG, JPEG, WEBP|cannot be decoded"):
        decode(data, 50_000_000, 100)


def encoded(picture: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def test_every_kind_of_file_becomes_upright_rgb() -> None:
    """As `convert` of Pillow has it, which is what transformers does; transparency and further frames are dropped."""
    noise = Image.effect_noise((40, 30), 60)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    palette = noise.convert("P")
    kinds = [
        (noise, encoded(noise, "PNG")),
        (noise.convert("RGBA"), encoded(noise.convert("RGBA"), "PNG")),
        (palette, encoded(palette, "PNG", transparency=bytes(range(256)))),
        (
            noise.convert("RGB"),
            encoded(noise.convert("RGB"), "WEBP", lossless=True, save_all=True, append_images=[noise]),
        ),
        (palette, encoded(palette, "GIF", save_all=True, append_images=[palette.rotate(90)])),
        (noise.rotate(-90, expand=True), encoded(noise, "PNG", exif=exif)),
    ]
    decoders = Decoders(max_pixels=50_000_000, max_scans=100, seconds=5.0, memory_bytes=2**30)
    for expected, data in kinds:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            silence_pillow.cache_clear()
            found = decoders.open(data, decoders.allow())
            again = decoders.open(Image.open(io.BytesIO(data)), decoders.allow())
        assert again.tobytes() == found.tobytes()
        assert found.mode == "RGB"
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected.convert("RGB")))


def test_pixels_lie_in_blocks_of_merged_patches() -> None:
    """Against a plain loop over the order that the tower reads."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (56, 84, 3), dtype=np.uint8)
    patches, grid = qwen().patches(Image.fromarray(pixels))
    assert grid == (1, 4, 6)
    expected = [
        pixels[14 * y : 14 * y + 14, 14 * x : 14 * x + 14].transpose(2, 0, 1).reshape(-1)
        for top in (0, 2)
        for left in (0, 2, 4)
        for y in (top, top + 1)
        for x in (left, left + 1)
    ]
    np.testing.assert_array_equal(patches, expected)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("image_processor_type", "Other", "known: Qwen2VLImageProcessor"),
        ("do_resize", False, "do_resize is False"),
        ("patch_size", 16, "patch_size is 16"),
        ("image_mean", [0.5], "three numbers"),
        ("rescale_factor", 1.0, "1/255"),
        ("max_pixels", 0, "at least 1"),
    ],
)
def test_processors_that_are_not_implemented_are_refused(field: str, value: object, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        find_processor(CONFIG, PREPROCESSOR | {field: value}, PictureLimits(), "somewhere")


_WITHOUT_PILLOW = """
import sys
sys.modules["PIL"] = None  # as if it were not installed
from jaxserve import LLM, SamplingParams
from jaxserve.assemble.pictures import find_pictures
from jaxserve.config import load_config
from jaxserve.errors import ConfigError
fixtures = sys.argv[1]
vision = {"model.path": f"{fixtures}/vision/qwen2_vl", "model.skip_tokenizer": True}
try:
    LLM.from_config(None, vision)
except ConfigError as error:
    print(error)
print(find_pictures(load_config(None, {**vision, "vision.max_pictures": 0}, environ={}).config) is not None)
small = {"model.max_len": 64, "sched.max_rows": 1, "sched.max_step_tokens": 16, "runtime.token_buckets": [16]}
llm = LLM.from_config(None, {"model.path": f"{fixtures}/llama", "model.skip_tokenizer": True, **small})
[answer] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False), use_tqdm=False)
print(len(answer.outputs[0].token_ids), [name for name in sys.modules if name.split(".")[0] == "PIL"])
"""


@pytest.mark.slow
def test_text_needs_no_pillow_and_pictures_say_how_to_install_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_PILLOW, str(Path(__file__).parents[1] / "fixtures")],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    assert f"{how_to_install('vision')}; or serve its text alone, with vision.max_pictures: 0" in lines[0]
    assert lines[1:] == ["True", "2 ['PIL']"]
