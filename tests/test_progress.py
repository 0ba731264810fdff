"""What a long job says: lines by a fake clock, the choice between bar, log and stderr."""

import contextlib
import io
import logging
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import rich.console
from fake_parts import Fakes

from jaxserve import LLM, assemble, progress
from jaxserve.config import load_config
from jaxserve.models import plan_model
from jaxserve.progress import EVERY_S, Lines, show_progress
from jaxserve.runtime import build
from jaxserve.runtime.compile import Compiled


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_phase_tells_its_beginning_its_end_and_now_and_then_that_it_lives() -> None:
    written: list[str] = []
    clock = Clock()
    lines = Lines(written.append, clock)
    lines.tick()
    lines.end()
    assert written == [], "nothing has begun"
    lines.begin("loading weights")
    assert written == ["loading weights"]
    for _ in range(50):  # one step of 25 seconds
        clock.now += 0.5
        lines.tick()
    lines.begin("reading the tokenizer")
    clock.now += 0.9
    lines.begin("compiling")
    clock.now += 1.2
    lines.end()
    lines.end()
    assert written[1:] == [
        "loading weights (10 s)",
        "loading weights (20 s)",
        "loading weights: done in 25 s",
        "reading the tokenizer",
        "compiling",
        "compiling: done in 1 s",
    ]


def test_counts_wait_for_a_line_that_is_due() -> None:
    written: list[str] = []
    clock = Clock()
    lines = Lines(written.append, clock, every_s=2.0)
    lines.begin("compiling")
    for done in range(1, 11):
        clock.now += 0.5
        lines.count(done, 10, f"part {done}")
    lines.end()
    assert written == [
        "compiling",
        "compiling: 4 of 10, part 4 (2 s)",
        "compiling: 8 of 10, part 8 (4 s)",
        "compiling: done in 5 s",
    ]


def test_a_new_phase_forgets_the_counts_of_the_last() -> None:
    written: list[str] = []
    clock = Clock()
    lines = Lines(written.append, clock)
    lines.begin("compiling")
    lines.count(1, 1)
    lines.begin("loading weights")
    clock.now += EVERY_S
    lines.tick()
    assert written[-1] == "loading weights (10 s)"


def test_a_phase_that_fails_is_not_told_as_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SHORT_S", 0.0)
    written: list[str] = []

    def fail() -> None:
        with show_progress(write=written.append) as shown:
            shown.begin("reading the tokenizer")
            shown.begin("loading weights")
            raise _Stop

    with pytest.raises(_Stop):
        fail()
    assert written == ["reading the tokenizer", "reading the tokenizer: done in 0 s", "loading weights"]


def test_the_heart_beats_while_a_step_blocks_and_stops_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real threads: the step below ends only when a line was written meanwhile."""
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    monkeypatch.setattr(progress, "_BEAT_S", 0.001)
    beaten = threading.Event()
    with show_progress(write=lambda line: beaten.set() if "(" in line else None) as shown:
        shown.begin("compiling")
        assert beaten.wait(60)
    assert not [t for t in threading.enumerate() if t.name == "jaxserve-progress"]


def test_lines_go_to_stderr_where_no_log_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress() as shown:
        shown.begin("loading weights")
    assert capsys.readouterr() == ("", "jaxserve: loading weights\n")
    with show_progress(shown=False) as shown:
        shown.begin("loading weights")
        shown.count(1, 2)
    assert capsys.readouterr() == ("", "")


def test_lines_go_to_the_log_where_that_shows_them(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="jaxserve"), show_progress() as shown:
        shown.begin("loading weights")
    assert caplog.messages == ["loading weights"]
    assert capsys.readouterr() == ("", "")


def test_a_terminal_has_one_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = rich.console.Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(rich.console, "Console", lambda **_: console)
    written: list[str] = []
    with show_progress(write=written.append) as shown:
        shown.begin("loading [weights]")
        shown.begin("compiling")
        shown.count(3, 7, "decode 16x16")
    assert written == []
    assert "compiling: 3 of 7 decode 16x16" in screen.getvalue()
    assert "\x1b[2K" in screen.getvalue().rpartition("16x16")[2], "the line is erased"


ON_A_TERMINAL = """
import logging
from jaxserve.config.schema import RuntimeConfig
from jaxserve.offline.console import BatchBar, set_up_logging
from jaxserve.offline import Counts
from jaxserve.progress import show_progress

set_up_logging(RuntimeConfig())
log = logging.getLogger("jaxserve.test")
with show_progress() as shown:
    for number in range(3):
        shown.begin(f"phase {number}")
        log.info("line %d", number)
        shown.count(1, 2, "part")
with BatchBar(2) as bar:
    log.info("line 3")
"""


def printed_on_a_terminal(command: list[str]) -> str:
    """What a command writes on a terminal of its own. It must end with 0."""
    ours, its = pty.openpty()
    chunks: list[bytes] = []
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env={**os.environ, "TERM": "xterm"}) as child:
        os.close(its)
        with contextlib.suppress(OSError):  # how Linux tells that the other end is closed
            while chunk := os.read(ours, 4096):
                chunks.append(chunk)
        os.close(ours)
    printed = b"".join(chunks).decode()
    assert child.returncode == 0, printed
    return printed


def test_bars_move_aside_for_lines_of_the_log() -> None:
    """In a real terminal: whatever a bar has drawn on a line is erased before the log writes there."""
    arguments = ["-W", "error", "-c", ON_A_TERMINAL]
    printed = printed_on_a_terminal([sys.executable, *arguments])
    lines = [row for row in printed.split("\n") if "INFO" in row]
    assert len(lines) == 4, printed
    for number, row in enumerate(lines):
        before = re.split(r"\r|\x1b\[2K", row.partition("INFO")[0])[-1]
        assert re.fullmatch(r"(\x1b\[[\d;?]*\w|\[\d\d:\d\d:\d\d\]|\s)*", before), (before, printed)
        assert f"line {number}" in re.sub(r"\x1b\[[\d;?]*\w", "", row)


class _Stop(Exception):
    pass


class _Told:
    """A `Progress` that keeps what it was told."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def begin(self, phase: str) -> None:
        self.phases.append(phase)

    def count(self, done: int, total: int, newest: str = "") -> None:
        self.phases.append(f"{done} of {total} {newest}")


def _watch(monkeypatch: pytest.MonkeyPatch, told: _Told, owner: object, name: str, *, last: bool = False) -> list[str]:
    """The phases that had been announced when `owner.name` was called; `last` ends the start there."""
    seen: list[str] = []
    real = getattr(owner, name)

    def call(*args: object, **kwargs: object) -> object:
        seen.extend(told.phases)
        if last:
            raise _Stop
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return seen


@pytest.mark.parametrize(
    ("kept", "words"), [(False, "Numba compiles kernels (once"), (True, "reading Numba's kernels")]
)
def test_every_phase_of_a_start_is_announced_before_its_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: bool, words: str
) -> None:
    told = _Told()
    monkeypatch.setattr(build.machine_code, "is_kept", lambda: kept)
    at_tokenizer = _watch(monkeypatch, told, assemble, "load_tokenizer")
    at_checkpoint = _watch(monkeypatch, told, assemble, "plan_model")
    at_kernels = _watch(monkeypatch, told, build, "choose")
    at_compiling = _watch(monkeypatch, told, build, "_compile_stages", last=True)
    xla = {"kernels.matmul": "xla", "kernels.paged_attention": "xla"}
    with pytest.raises(_Stop):
        assemble.assemble(load_config(None, {"runtime.compile_cache": str(tmp_path), **xla}), progress=told)
    assert at_tokenizer[-1:] == ["reading the tokenizer"]
    assert at_checkpoint[-1:] == ["looking for devices and at the checkpoint"]
    assert at_kernels[-1].startswith(words)
    assert at_compiling[-1:] == ["loading weights and compiling steps"]


def test_compiling_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    told = _Told()

    def in_no_time(compilers, jobs, threads, tell, *, ahead):
        [jobs] = jobs
        parts = [
            Compiled(name=job.name, call=None, seconds=0.0, stored=True, temporary_bytes=0, code_bytes=0)  # type: ignore[arg-type]
            for job in jobs
        ]
        for done, part in enumerate(parts, start=1):
            tell(done, len(jobs), part)
        return [{part.name: part for part in parts}]

    monkeypatch.setattr(build, "build_replicas", in_no_time)
    _watch(monkeypatch, told, build, "_executables", last=True)
    settings = {"runtime.compile_cache": None, "kernels.matmul": "xla", "kernels.paged_attention": "xla"}
    with pytest.raises(_Stop):
        build.build_runners(
            load_config(None, settings).config, [plan_model("demo")], progress=told, say=lambda line: None
        )
    begun = told.phases.index("loading weights and compiling steps")
    assert told.phases[begun + 1] == "1 of 8 mixed 512x32"
    assert "8 of 8 make_state" in told.phases
    assert told.phases[-1] == "placing the KV pages"


def test_llm_speaks_at_once_and_can_be_told_not_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Fakes().install(monkeypatch.setattr)
    LLM("demo").close()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxserve: starting with model demo: loading JAX\n")
    assert err.endswith("jaxserve: building the fake\n")
    LLM("demo", progress=False).close()
    LLM.from_config(None, progress=False).close()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "start",
    [
        "import runpy\nsys.argv = ['run', '--prompt', 'a']\nrunpy.run_module('jaxserve.run', run_name='__main__')\n",
        "from jaxserve import LLM\nLLM('demo')\n",
    ],
    ids=["run", "LLM"],
)
def test_it_speaks_before_it_loads_jax(start: str) -> None:
    """A fresh process, stopped where JAX would be imported."""
    program = (
        "import sys\n"
        "class Guard:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('jax', 'flax'): raise SystemExit('JAX is imported')\n"
        "sys.meta_path.insert(0, Guard())\n"
    )
    done = subprocess.run([sys.executable, "-c", program + start], capture_output=True, text=True, check=False)
    assert done.stdout == ""
    assert "starting with model demo: loading JAX" in done.stderr.splitlines()[0]
    assert done.stderr.endswith("JAX is imported\n")
