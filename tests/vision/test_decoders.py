"""The processes that decode pictures: the same pixels, and neither their time, their memory nor their death costs more
than one picture."""

import concurrent.futures
import gc
import io
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from picture_files import jpeg_of_scans, use_program
from PIL import Image
from serve_parts import WAIT_S, wait_until

from jaxserve.errors import InvalidRequest, JaxserveError
from jaxserve.vision import decoding
from jaxserve.vision.decoder_program import decode
from jaxserve.vision.decoding import Decoders

EXAMPLE = Path(decoding.__file__).parents[1] / "demo_model" / "vision" / "example.png"
FIXTURES = Path(__file__).parents[1] / "fixtures"


def decoders_of(**limits: Any) -> Decoders:
    return Decoders(**{"max_pixels": 25_000_000, "max_scans": 100, "seconds": 60.0, "memory_bytes": 2**31, **limits})


def encoded(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


SMALL = encoded(Image.effect_noise((30, 20), 50).convert("RGB"))


def opened(decoders: Decoders, data: bytes) -> Image.Image:
    return decoders.open(data, decoders.allow())


def test_pixels_are_those_of_the_same_decoder_in_this_process() -> None:
    noise, exif = Image.effect_noise((223, 151), 70), Image.Exif()
    colours = Image.merge("RGB", [noise, noise.rotate(180), noise.transpose(Image.Transpose.FLIP_LEFT_RIGHT)])
    exif[0x0112] = 6  # turned by a quarter
    files = [
        encoded(colours, "JPEG", exif=exif),
        encoded(colours, "JPEG", progressive=True, quality=95),
        encoded(colours.convert("CMYK"), "JPEG"),
        encoded(noise, "JPEG"),
        encoded(colours, "WEBP"),
        encoded(colours.convert("RGBA"), "WEBP", lossless=True),
        encoded(colours, "GIF", save_all=True, append_images=[colours.rotate(90)]),
        encoded(noise.convert("P"), "PNG", transparency=bytes(range(256))),
        encoded(noise.convert("I;16"), "PNG"),
        jpeg_of_scans(5, 999),
        EXAMPLE.read_bytes(),
        *(
            path.read_bytes()
            for path in sorted(FIXTURES.rglob("*"))
            if path.suffix in {".png", ".jpg", ".jpeg", ".webp"}
        ),
    ]
    decoders = decoders_of()
    for data in files:
        expected, found = decode(data, 25_000_000, 100), opened(decoders, data)
        assert found.size == expected.size and found.tobytes() == expected.tobytes()
    assert len(decoders._living) == 1, "the process is kept"


def test_what_is_refused_costs_the_process_nothing() -> None:
    decoders = decoders_of(max_pixels=1000)
    for data, words in (
        (b"hello", "none of the formats PNG, JPEG, WEBP"),
        (SMALL[:100], "cannot be decoded"),
        (encoded(Image.new("L", (100, 11))), "100 x 11 pixels is more than the 1000 .*vision.max_source_pixels"),
        (jpeg_of_scans(101, 16), "more than 100 scans.*vision.max_scans"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            opened(decoders, data)
    [decoder] = decoders._living
    assert opened(decoders, SMALL).size == (30, 20)
    assert decoders._living == {decoder}


def test_a_picture_that_takes_too_long_is_ended_and_the_next_one_works(caplog: pytest.LogCaptureFixture) -> None:
    decoders = decoders_of(seconds=0.3)
    with pytest.raises(InvalidRequest, match=r"more than 0.3 s of processor time .*vision\.decode_s"):
        opened(decoders, jpeg_of_scans(100, 5000))
    assert not decoders._living
    [line] = [record for record in caplog.records if record.name == decoding.__name__]
    assert line.levelno == logging.WARNING and "vision.decode_s" in line.getMessage()
    assert opened(decoders, SMALL).size == (30, 20)


def test_all_pictures_of_a_request_share_their_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The program says what it was allowed, and that it took 0.4 s."""
    use_program(monkeypatch, tmp_path, "text = f'{seconds:.1f}'.encode(); answer(1, 0.4, len(text), 0, text)")
    decoders = decoders_of(seconds=1.0)
    for _ in range(2):
        allowed = decoders.allow()
        for said in ("1.0", "0.6", "0.2", "more than 1 s of processor time"):
            with pytest.raises(InvalidRequest, match=said):
                decoders.open(b"a", allowed)


def test_a_process_that_stands_still_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(decoding, "_LEAST_CLOCK_S", 0.05)
    use_program(monkeypatch, tmp_path, "signal.pause()")
    decoders = decoders_of(seconds=0.001)
    with pytest.raises(InvalidRequest, match=r"not decoded in 0.05 s.*vision\.decode_s"):
        opened(decoders, b"a")
    assert not decoders._living


def test_memory_has_a_limit_and_the_process_survives_it() -> None:
    decoders = decoders_of(memory_bytes=200 * 2**20)
    large = encoded(Image.new("L", (5000, 5000)))
    for data in (large, bytes(300 * 2**20)):  # its pixels, and the file itself
        with pytest.raises(InvalidRequest, match=r"more than 209715200 bytes of memory .*vision\.decode_bytes"):
            opened(decoders, data)
        assert opened(decoders, SMALL).size == (30, 20)
    assert len(decoders._living) == 1


def test_the_death_of_a_process_costs_its_picture_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    decoders = decoders_of()
    for name in ("SIGKILL", "SIGSEGV", "SIGABRT"):
        with monkeypatch.context() as patch:
            use_program(patch, tmp_path, f"os.kill(os.getpid(), signal.{name})")
            with pytest.raises(InvalidRequest, match=f"its decoder was ended by {name}"):
                opened(decoders, b"a")
        assert opened(decoders, SMALL).size == (30, 20)
        [decoder] = decoders._living
        os.kill(decoder._process.pid, signal.SIGTERM)  # as a supervisor does to all of a service, which then drains
        assert opened(decoders, SMALL).size == (30, 20)
        assert decoders._living == {decoder}
        os.kill(decoder._process.pid, signal.SIGKILL)  # while nobody uses it
        decoder._process.wait(WAIT_S)


@pytest.mark.parametrize(
    "body",
    [
        "answer(0, 0.0, 6000, 6000)",
        "answer(0, 0.0, 2**32 - 1, 2**32 - 1)",
        "answer(1, 0.0, 2**31, 0)",
        "answer(2, 0.0, 7, 0)",
        "answer(9, 0.0, 0, 0)",
    ],
)
def test_what_a_process_says_is_not_trusted(body: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_program(monkeypatch, tmp_path, body)
    decoders = decoders_of()
    with pytest.raises(InvalidRequest, match="what its decoder answers is no picture"):
        opened(decoders, b"a")
    assert not decoders._living


def test_a_program_that_cannot_run_is_no_fault_of_the_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(decoding, "_PROGRAM", tmp_path / "missing.py")
    with pytest.raises(JaxserveError, match="ended with status 2") as caught:
        opened(decoders_of(), SMALL)
    assert type(caught.value) is JaxserveError


def test_threads_have_a_process_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One stands still until its process is killed; others are answered meanwhile."""
    body = "signal.pause() if data == b'still' else answer(0, 0.0, 1, 1, b'abc')"
    use_program(monkeypatch, tmp_path, body)
    decoders = decoders_of()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(opened, decoders, b"still")
        wait_until(lambda: bool(decoders._living), "it has a process")
        [stuck] = decoders._living
        for _ in range(2):
            assert opened(decoders, b"other").tobytes() == b"abc"
        assert len(decoders._living) == 2 and not waiting.done()
        os.kill(stuck._process.pid, signal.SIGKILL)
        with pytest.raises(InvalidRequest, match="SIGKILL"):
            waiting.result(WAIT_S)


def test_nothing_is_decoded_for_a_caller_that_has_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_program(monkeypatch, tmp_path, "signal.pause()")
    decoders, left = decoders_of(), threading.Event()
    work = decoders.for_caller(left.is_set, lambda: opened(decoders, b"a"))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(work)
        wait_until(lambda: bool(decoders._living), "it has a process")
        left.set()
        with pytest.raises(concurrent.futures.CancelledError, match="has left"):
            waiting.result(WAIT_S)
        assert not decoders._living
        with pytest.raises(concurrent.futures.CancelledError, match="has left"):
            pool.submit(work).result(WAIT_S)
        monkeypatch.undo()
        assert pool.submit(opened, decoders, SMALL).result(WAIT_S).size == (30, 20), "the next caller of the thread"


def test_processes_end_with_their_owner() -> None:
    decoders = decoders_of()
    threads = [threading.Thread(target=opened, args=(decoders, SMALL)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    living = list(decoders._living)
    assert living and all(decoder.is_alive() for decoder in living)
    del decoders
    gc.collect()
    assert not any(decoder.is_alive() for decoder in living)


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_processes_end_with_the_server_however_it_ends(end: str) -> None:
    """They have its standard error, which is at its end when all have ended."""
    program = f"""
import os, signal
from jaxserve.vision.decoding import Decoders
decoders = Decoders(max_pixels=1000, max_scans=100, seconds=60.0, memory_bytes=2**31)
print(decoders.open({SMALL!r}, decoders.allow()).size, flush=True)
{end}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, timeout=WAIT_S)
    assert done.stdout == b"(30, 20)\n" and done.stderr == b""
    assert done.returncode == (-signal.SIGKILL if end else 0)
