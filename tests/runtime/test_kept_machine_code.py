"""A second process with the same `runtime.compile_cache`: it traces nothing, Numba compiles nothing, and it answers.

An executable calls machine code by name. One that is read from a disk is never traced, so nothing would tell XLA those
names but what every start does first.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxserve.kernels.cpu import machine_code
from jaxserve.runtime import store

ROOT = Path(__file__).parents[2]

_SCRIPT = """
import json, sys
import jax
from whole import FIXTURES, build, run
from jaxserve.api import SamplingParams
from jaxserve.kernels.cpu import implementation, machine_code
from jaxserve.kernels.packed_weight import PackedWeight

calls = []
def counted(fn, name):
    def call(*args, **kwargs):
        calls.append(name)
        return fn(*args, **kwargs)
    return call

PackedWeight.multiply = counted(PackedWeight.multiply, "multiply")
implementation.attend = counted(implementation.attend, "attend")
implementation.attend.__module__ = implementation.__name__
engine = build(
    FIXTURES / "llama_llama3",
    model__skip_tokenizer=True,
    model__max_len=64,
    cache__page_size=16,
    cache__num_pages=40,
    kernels__matmul="numba_cpu",
    kernels__paged_attention="numba_cpu",
    kernels__self_check=False,
    sched__max_step_tokens=8,
    runtime__token_buckets=[8],
    runtime__compile_cache=sys.argv[1],
)
held = [machine_code._register(kernel, "float32")[1] for kernel in ("matmul", "attention")]
asked = [(list(range(n)), SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)) for n in (3, 20)]
json.dump(
    {
        "tokens": [result.token_ids for [result] in run(engine, asked)],
        "traced": sorted(set(calls)),
        "read": [code.read for code in held],
    },
    sys.stdout,
)
"""

_PROVIDE = """
import sys
from pathlib import Path
from jaxserve.kernels.cpu import machine_code

machine_code.keep_machine_code(Path(sys.argv[1]))
print(machine_code.provide("matmul", "float32"))
"""


def start(folder: Path) -> dict[str, Any]:
    """What one process says of itself."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/e2e")])}
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(folder)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No executable yet. The kernels, which take Numba half a minute, are those of the whole run."""
    found, shared = tmp_path_factory.mktemp("compile_cache"), Path(os.environ["JAXSERVE_COMPILE_CACHE"])
    (shared / "machine_code").mkdir(exist_ok=True)
    (found / "machine_code").symlink_to(shared / "machine_code")
    return found


@pytest.fixture(scope="module")
def first(folder: Path) -> dict[str, Any]:
    return start(folder)


@pytest.fixture(scope="module")
def second(first: dict[str, Any], folder: Path) -> dict[str, Any]:
    return start(folder)


@pytest.mark.slow
def test_the_first_process_traces(first: dict[str, Any]) -> None:
    """Or the second one would show nothing. What it finds of machine code, the rest of the run has made."""
    assert first["traced"] == ["attend", "multiply"]
    assert all(len(tokens) == 9 for tokens in first["tokens"])


@pytest.mark.slow
def test_stored_executables_find_machine_code_though_nothing_was_traced(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    assert second["traced"] == []
    assert second["tokens"] == first["tokens"]
    assert second["read"] == [True, True]


def test_what_no_start_has_used_for_a_month_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of former kernels. A start marks its own directory, so that processes of other versions leave it alone."""
    monkeypatch.setattr(machine_code, "_KEPT", machine_code._Kept())
    machine_code.keep_machine_code(tmp_path)
    [mine] = (tmp_path / "machine_code").iterdir()
    assert not machine_code.is_kept()
    names = {"long-ago": 1.01, "lately": 0.99, mine.name: 5.0}
    for name, share in names.items():
        (mine.parent / name).mkdir(exist_ok=True)
        (mine.parent / name / "matmul_float32-of-one-processor").write_bytes(b"code")
        read_s = time.time() - share * 30 * 86400
        os.utime(mine.parent / name, (read_s, read_s))
    machine_code.keep_machine_code(tmp_path)
    assert {path.name for path in mine.parent.iterdir()} == {"lately", mine.name}
    assert machine_code.is_kept()
    assert mine.stat().st_mtime > (mine.parent / "lately").stat().st_mtime, "it is marked"
    assert machine_code._UNUSED_S == store._UNUSED_S, "as long as executables"


_SMALL = """
import sys
sys.path.insert(0, sys.argv[2])
import small
sys.modules["jaxserve.kernels.cpu.matmul"] = small
"""
# A file is written under another name, and gets its own with `os.replace`.
_FULL = """
import errno, os
def refuse(*paths): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
os.replace = refuse
"""
# For root no mode of a folder is a hindrance.
_READ_ONLY = """
import errno, os, tempfile
def refuse(*args, **kwargs): raise OSError(errno.EROFS, os.strerror(errno.EROFS))
tempfile.TemporaryFile = refuse
"""
# As above, but found out when the folder has been taken already.
_READ_ONLY_LATER = """
import sys
from pathlib import Path
from jaxserve.kernels.cpu import machine_code
machine_code.keep_machine_code(Path(sys.argv[1]))
machine_code.keep_machine_code = lambda folder: None
import errno, os, tempfile
def refuse(*args, **kwargs): raise OSError(errno.EROFS, os.strerror(errno.EROFS))
tempfile.NamedTemporaryFile = refuse
"""


def provide(tmp_path: Path, script: str) -> subprocess.CompletedProcess[str]:
    """A process that asks for two kernels, which are small: what they compute is no matter."""
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    (source / "small.py").write_text("".join(f"def matmul_{d}(frame): return 0\n" for d in ("float32", "bfloat16")))
    script += _PROVIDE + 'print(machine_code.provide("matmul", "bfloat16"))\n'
    command = [sys.executable, "-c", _SMALL + script, str(tmp_path), str(source)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.stdout == "jaxserve_matmul_float32\njaxserve_matmul_bfloat16\n", ended.stderr[-2000:]
    return ended


def kept(tmp_path: Path) -> dict[Path, int]:
    """Files of machine code, and when each was written."""
    return {path: path.stat().st_mtime_ns for path in (tmp_path / "machine_code").glob("*/*")}


def test_damaged_machine_code_is_made_again(tmp_path: Path) -> None:
    """As after a full disk, or of a disk that changes bits: LLVM would end the process."""
    provide(tmp_path, "")
    written = kept(tmp_path)
    assert len(written) == 2
    short, changed = sorted(written)
    data = short.read_bytes(), bytearray(changed.read_bytes())
    short.write_bytes(data[0][:100])
    data[1][len(data[1]) // 2] ^= 1
    changed.write_bytes(data[1])
    ended = provide(tmp_path, "")
    assert ended.stderr.count("cannot be read, and is made anew") == 2, ended.stderr
    made_again = kept(tmp_path)
    assert made_again.keys() == written.keys() and short.stat().st_size == len(data[0])
    provide(tmp_path, "")
    assert kept(tmp_path) == made_again, "it is read"


def test_a_second_kernel_is_made_by_another_process_meanwhile(tmp_path: Path) -> None:
    """What that process cannot make, this one makes itself."""
    prelude = _SMALL.replace("sys.argv[2]", repr(str(tmp_path / "source")))
    script = f"""
from pathlib import Path
from jaxserve.kernels.cpu import machine_code
machine_code._PROGRAM = {prelude!r} + "import json\\n" + machine_code._PROGRAM
machine_code.keep_machine_code(Path(sys.argv[1]))
for dtype in ("bfloat16", "float16"):
    machine_code.make_beside("matmul", dtype)
assert [*machine_code._KEPT.making] == ["matmul_bfloat16", "matmul_float16"]
assert machine_code._KEPT.making["matmul_float16"].wait(), "there is no such kernel"
assert machine_code._register("matmul", "bfloat16")[1].read
machine_code.make_beside("matmul", "bfloat16")
assert [*machine_code._KEPT.making] == ["matmul_float16"], "it is there"
"""
    provide(tmp_path, script)
    assert len(kept(tmp_path)) == 2


def test_another_checkout_reads_the_same_machine_code(tmp_path: Path) -> None:
    """Of equal text, whatever its place and its time."""
    provide(tmp_path, "")
    written = kept(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(machine_code._FOLDER, elsewhere, ignore=shutil.ignore_patterns("__pycache__"))
    script = "from pathlib import Path\nfrom jaxserve.kernels.cpu import machine_code\n"
    provide(tmp_path, script + f"machine_code._FOLDER = Path({str(elsewhere)!r})\n")
    assert kept(tmp_path) == written
    with open(elsewhere / "simd.py", "a") as file:
        file.write("# changed\n")
    provide(tmp_path, script + f"machine_code._FOLDER = Path({str(elsewhere)!r})\n")
    assert len(kept(tmp_path)) == 4


@pytest.mark.parametrize(
    ("hindrance", "text"),
    [(_FULL, "No space left on device"), (_READ_ONLY, "Read-only file system"), (_READ_ONLY_LATER, "Read-only")],
)
def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path, hindrance: str, text: str) -> None:
    """It costs time at each start, and one line of the log."""
    ended = provide(tmp_path, hindrance)
    assert ended.stderr.count("are compiled at each start") == 1, ended.stderr
    assert text in ended.stderr
    assert not kept(tmp_path)
