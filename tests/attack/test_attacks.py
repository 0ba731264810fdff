"""Each kind of `scripts/attack.py`, on small sizes and against a fake engine: what can be said of it without a clock.

While the attack goes on another key is answered; nothing that the attacker is told is a defect of the server; and once
it has left, no request, page, file or thread of it remains. How long others wait, a script measures (docs/attacks.md).
"""

import io
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import PIL.Image
import pytest
from attack_kinds import KINDS, jpeg_of_scans, png_of_zeros
from attack_parts import Remains, assert_at_rest, attacked, guarded, others_answer
from picture_parts import picture_parts
from serve_parts import Served, serve_bytes

REFUSALS = {  # of HTTP and gRPC: what a server says that is well
    "200", "206", "400", "404", "405", "408", "413", "414", "415", "416", "429", "431", "503",
    "OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "NOT_FOUND",
}  # fmt: skip
ENDED_BY_THE_ATTACKER = {
    "no answer until the end", "held", "held until the end", "closed", "left", "ended", "open", "CANCELLED",
    "ValueError", "TimeoutError", "OSError",
}  # fmt: skip
ENDED_BY_THE_SERVER = {"ConnectionResetError", "BrokenPipeError", "BadStatusLine", "RemoteDisconnected"}
TEXT = [kind.name for kind in KINDS.values() if kind.server == "text"]
VISION = [kind.name for kind in KINDS.values() if kind.server == "vision"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    parts = serve_bytes(vocab_size=259, max_model_len=2048, num_pages=4096, max_rows=64, policy="fair")
    with guarded(parts, tmp_path_factory.mktemp("text")):
        yield parts


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with guarded(picture_parts(), tmp_path_factory.mktemp("vision"), max_body_bytes=2**23) as parts:
        yield parts


def check(parts: Served, name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "jaxserve")
    with attacked(parts, name):  # the first one starts the threads that a server starts when it needs them
        others_answer(parts)
    before = Remains.now()
    with attacked(parts, name) as by:
        assert len(others_answer(parts)) > 0
    assert_at_rest(parts, before)
    assert not set(by.outcomes) - REFUSALS - ENDED_BY_THE_ATTACKER - ENDED_BY_THE_SERVER, by.examples
    assert not [record.getMessage() for record in caplog.records if record.name.startswith("jaxserve")]


@pytest.mark.parametrize("name", TEXT)
def test_an_attack_stops_nobody_and_leaves_nothing(text: Served, name: str, caplog: pytest.LogCaptureFixture) -> None:
    check(text, name, caplog)


@pytest.mark.parametrize("name", VISION)
def test_an_attack_of_pictures(vision: Served, name: str, caplog: pytest.LogCaptureFixture) -> None:
    check(vision, name, caplog)


def test_pictures_of_attacks_are_such() -> None:
    """Else they would be refused for what they are not."""
    picture = PIL.Image.open(io.BytesIO(png_of_zeros(50, 70)))
    assert picture.size == (50, 70) and picture.convert("RGB").getpixel((49, 69)) == (0, 0, 0)
    data = jpeg_of_scans(1200, 3)
    assert data.count(b"\xff\xda") == 2 + 3
    picture = PIL.Image.open(io.BytesIO(data))
    picture.load()
    assert picture.size == (1200, 1200) and picture.info["progressive"]


def test_the_docs_have_each_kind() -> None:
    told = (Path(__file__).parents[2] / "docs/attacks.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", told, re.MULTILINE) == list(KINDS)
