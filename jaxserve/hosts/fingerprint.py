"""The facts that must be the same in all processes of one service, as short texts to compare.

`leader` and `follower` exchange them. They are texts and not one hash, since an operator must read which setting
differs, and on which host.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

from jaxserve.config.schema import Config
from jaxserve.files.gguf_file import find_gguf, parts_of
from jaxserve.sched import Limits

# Settings that may differ between hosts: paths, and settings that only the front door or the scheduler of process 0
# reads; a batch there takes other steps than a service.
_LOCAL_FIELDS = {
    "hosts": {"coordinator", "process_id", "secret_file", "tls_cert", "tls_key", "tls_ca"},
    "model": {"path", "tokenizer", "name", "pooling"},
    "cache": {"scales"},  # a path: the scales themselves are a fact of the built device
    "sched": {"max_mixed_tokens", "policy"},
    "store": {"location", "secret_file", "tls_ca", "tls_cert", "tls_key"},  # each keeps its own part of the pages
    "speculation": {"model"},  # a path: samples of its files are a fact
    "runtime": {
        "compile_cache",
        "compile_cache_bytes",
        "compile_threads",
        "kept_weights_bytes",
        "log_level",
        "step_log",
    },
}
_LOCAL_SECTIONS = {"serve", "route", "rerank"}
_PACKAGES = ("jax", "jaxlib", "flax", "numpy")
_SAMPLE_BYTES = 4096
_STRIDE = 1 << 20  # bytes from sample to sample where a file does not say where its tensors are


def config_facts(config: Config, checkpoint: Path, version_here: str) -> dict[str, str]:
    """Versions, settings and the checkpoint.

    `checkpoint` is a directory or a GGUF file, of which samples are read; `version_here` is jaxserve's, installed or
    not.
    """
    facts = {"version of jaxserve": version_here}
    facts |= {f"version of {name}": version(name) for name in _PACKAGES}
    for section, values in config.model_dump(mode="json").items():
        if section in _LOCAL_SECTIONS:
            continue
        local = _LOCAL_FIELDS.get(section, set())
        facts |= {f"{section}.{key}": json.dumps(value) for key, value in values.items() if key not in local}
    facts["checkpoint"] = checkpoint_digest(checkpoint, config.model.random_weights)
    if config.speculation.model is not None:
        facts["drafts"] = checkpoint_digest(Path(config.speculation.model).expanduser(), config_only=False)
    return facts


def device_facts(limits: Limits, model: Mapping[str, str]) -> dict[str, str]:
    """Facts of the built device: sizes of the pool, compiled shapes, and its own description."""
    return {
        "rows": str(limits.max_rows),
        "pages": f"{limits.num_pages} of {limits.page_size} tokens",
        "host slots": str(limits.slots.num_slots),
        "page groups": " ".join("all" if g.window is None else str(g.window) for g in limits.page_groups),
        "context": str(limits.max_model_len),
        "buckets": " ".join(f"{b.tokens}x{b.rows}{'d' * b.decode_only}" for b in limits.buckets),
        **model,
    }


def differences(own: Mapping[str, str], other: Mapping[str, str], name: str) -> list[str]:
    """One text for each fact that process `name` sees differently."""
    return [
        f"{fact} is {_short(own.get(fact))} on process 0 and {_short(other.get(fact))} on {name}"
        for fact in dict.fromkeys([*own, *other])
        if own.get(fact) != other.get(fact)
    ]


def _short(value: str | None) -> str:
    return "absent" if value is None else value if len(value) <= 120 else f"{value[:120]}…"


def checkpoint_digest(checkpoint: Path, config_only: bool) -> str:
    """Names and sizes of the files, and samples of their content, with which steps of one training are told apart
    without reading the whole.

    Hosts compare it, and pages of keys and values in a store are found again by it. A training may change some tensors
    alone (an adapter that is merged), the last rows of one (new tokens), and in bfloat16 few numbers of each. So each
    tensor of a safetensors file has two samples of 4 KiB; if one number in a hundred changes, the chance that a sample
    of bfloat16 has none of them is 1e-9. What changes outside of all samples is not seen.

    `checkpoint` is a directory or a GGUF file, whose metadata are its config.
    """
    gguf = find_gguf(checkpoint) if checkpoint.is_file() else None
    directory = checkpoint if gguf is None else gguf.parent
    if gguf is not None:
        files = [*parts_of(gguf)]
    else:
        files = sorted(p for p in directory.rglob("*") if p.is_file() and not _is_hidden(p.relative_to(directory)))
        files += _shared_files(directory)
    digest, total = hashlib.blake2b(digest_size=8), 0
    for file in files:
        name, size = os.path.relpath(file, directory), file.stat().st_size
        if config_only and gguf is None and name != "config.json":
            continue
        digest.update(f"{name} {size}\n".encode())
        total += size
        with file.open("rb") as opened:
            for start in _samples(opened, file.suffix, size):
                opened.seek(start)
                digest.update(opened.read(_SAMPLE_BYTES))
    return f"{total} bytes, digest {digest.hexdigest()}"


def _samples(opened: BinaryIO, suffix: str, size: int) -> list[int]:
    """Where samples begin: in a safetensors file at its head, and in the middle and at the end of each tensor; in
    others at even distances and at the end."""
    if suffix == ".safetensors":
        try:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(length, size)))
            header.pop("__metadata__", None)
            spans = [tensor["data_offsets"] for tensor in header.values()]
            if all(type(begin) is type(end) is int and 0 <= begin <= end for begin, end in spans):
                last = [(begin, end - _SAMPLE_BYTES) for begin, end in spans]
                within = {max(begin, start) for begin, at in last for start in ((begin + at) // 2, at)}
                return [0, *sorted(8 + length + start for start in within)]
        except (ValueError, TypeError, AttributeError, KeyError):
            pass  # whoever reads the weights says what is wrong with it
    return sorted({*range(0, size, _STRIDE), max(0, size - _SAMPLE_BYTES)})


def _shared_files(directory: Path) -> list[Path]:
    """The weights in the directory above that an index names (`safetensors_files`)."""
    index = directory / "model.safetensors.index.json"
    try:
        named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        shared = [directory.parent / Path(name).name for name in named if name.startswith("../")]
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return []  # no index, or one that whoever reads the weights refuses or passes over
    return [file for file in shared if file.is_file()]


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)
