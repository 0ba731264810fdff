"""Every command of README.md, pasted as a newcomer would, in one fresh shell on a terminal.

    python scripts/check_readme.py [--python python3.12] [--json OUT.json] [--pass-on PIP_INDEX_URL]
    python scripts/check_readme.py --here          with the environment of this interpreter, nothing is installed

A clone of this checkout's last commit, an empty home, no environment but HOME, PATH and TERM. Blocks of bash are pasted
into one `bash -i` as they stand; blocks of Python that follow each other are one script. Of each block are reported:
the exit status of its last command, seconds, the longest time without a byte on the terminal, and the executables that
are new in the compile cache. Exit code 1 when a block failed, printed a traceback, or was silent for longer than
--silence; and when programs were compiled for more than --settings settings of sizes on the way from the first prompt
to the server. The digest in the name of an executable says for which it is.

The output of a block is not judged. `make test` is left out: it is what CI does.
"""

import argparse
import dataclasses
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LEFT_OUT = ("make test",)
_INSTALLS = re.compile(r"^(make |python3 -m venv |\. \S*activate|pip install )")
_TIMEOUT_S = 1800.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One thing to paste. `line`: where it begins in the README."""

    language: str
    text: str
    line: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a block; `status` of its last command, `silent_s` the longest time without output."""

    line: int
    language: str
    begins: str
    status: int
    seconds: float
    silent_s: float
    compiled: list[str]
    output: str

    @property
    def failed(self) -> bool:
        return (
            self.status != 0 or "Traceback (most recent call last)" in self.output or "command not found" in self.output
        )


def read_blocks(text: str) -> list[Block]:
    """All blocks of bash, line by line where a line is left out, and of Python, those in a row as one."""
    blocks: list[Block] = []
    for found in _BLOCK.finditer(text):
        language, content = found[1], found[2]
        line = text[: found.start()].count("\n") + 2
        if language == "bash":
            kept = [one for one in content.splitlines(True) if not one.startswith(_LEFT_OUT)]
            blocks.append(Block(language=language, text="".join(kept), line=line))
        elif blocks and blocks[-1].language == "python":
            before = blocks.pop()
            blocks.append(dataclasses.replace(before, text=f"{before.text}\n{content}"))
        else:
            blocks.append(Block(language=language, text=content, line=line))
    return blocks


def without_installing(blocks: Sequence[Block]) -> list[Block]:
    """The same for an environment that is there: no line that makes or fills one."""
    kept = []
    for block in blocks:
        lines = [one for one in block.text.splitlines(True) if block.language != "bash" or not _INSTALLS.match(one)]
        if any(one.strip() for one in lines):
            kept.append(dataclasses.replace(block, text="".join(lines)))
    return kept


class Shell:
    """A `bash -i` on a terminal of its own. To be used by one thread."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._terminal, theirs = pty.openpty()
        self._process = subprocess.Popen(
            ["setsid", "--ctty", "bash", "--noprofile", "--norc", "-i"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env=environment,
        )
        os.close(theirs)
        self._number = 0
        self.paste("PS1= PS2=; bind 'set enable-bracketed-paste off' 2>/dev/null; stty -echo\n")

    def paste(self, text: str) -> tuple[int, str, float, float]:
        """Status, output, seconds and the longest silence. Raises TimeoutError."""
        self._number += 1
        begin_s = last_s = time.monotonic()
        silent_s, output = 0.0, ""
        # The mark is no text of the command itself, which a terminal may still echo.
        os.write(self._terminal, f"{text}printf 'done-%d=%d;\\n' {self._number} $?\n".encode())
        mark = re.compile(rf"done-{self._number}=(\d+);")
        for piece in self._pieces(begin_s + _TIMEOUT_S):
            now_s = time.monotonic()
            silent_s, last_s = max(silent_s, now_s - last_s), now_s
            output += piece
            if found := mark.search(output):
                return int(found[1]), output[: found.start()], now_s - begin_s, silent_s
        raise TimeoutError(f"{text!r:.80} did not end in {_TIMEOUT_S:.0f} s: ...{output[-2000:]}")

    def _pieces(self, until_s: float) -> Iterator[str]:
        while time.monotonic() < until_s:
            if select.select([self._terminal], [], [], 1.0)[0]:
                yield os.read(self._terminal, 65536).decode(errors="replace")

    def close(self) -> None:
        """Ends the shell, and what it has left in the background."""
        os.close(self._terminal)
        self._process.send_signal(signal.SIGHUP)
        self._process.wait()


def run_block(shell: Shell, block: Block, folder: Path, cache: Path) -> Outcome:
    text = block.text
    if block.language == "python":
        script = folder / f".readme_line_{block.line}.py"
        script.write_text(block.text)
        text = f"python {shlex.quote(str(script))}\n"
    before = executables(cache)
    status, output, seconds, silent_s = shell.paste(text)
    return Outcome(
        line=block.line,
        language=block.language,
        begins=block.text.strip().splitlines()[0][:60],
        status=status,
        seconds=round(seconds, 1),
        silent_s=round(silent_s, 1),
        compiled=sorted(executables(cache) - before),
        output=output,
    )


def executables(cache: Path) -> set[str]:
    """Names of the executables that are kept: what is computed, a dash, the digest of all that it depends on.

    The second name of each, by which an equal program of other settings finds it, is left out.
    """
    return {path.name for path in cache.glob("*/executables/*") if not path.name.startswith("program-")}


def settings_until_served(outcomes: Sequence[Outcome], blocks: Sequence[Block]) -> int:
    """For how many settings of sizes programs were compiled, up to the last block that asks the first server."""
    last = max((k for k, block in enumerate(blocks) if "http://127.0.0.1:8000" in block.text), default=-1)
    return len({name.rpartition("-")[2] for outcome in outcomes[: last + 1] for name in outcome.compiled})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="of which python3 is the name in the shell")
    parser.add_argument("--here", action="store_true", help="install nothing: use the environment of --python")
    parser.add_argument("--pass-on", action="append", default=[], metavar="NAME", help="variables to keep")
    parser.add_argument("--silence", type=float, default=3.0, metavar="S", help="longest time without output; 3")
    parser.add_argument("--settings", type=int, default=2, metavar="N", help="settings compiled up to the server; 2")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    blocks = read_blocks((ROOT / "README.md").read_text())
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="readme") as name:
        home, clone = Path(name) / "home", Path(name) / "jaxserve"
        (home / "bin").mkdir(parents=True)
        (home / "bin/python3").symlink_to(args.python)
        environment = {"HOME": str(home), "PATH": f"{home / 'bin'}:/usr/bin:/bin", "TERM": "xterm-256color"}
        environment |= {key: os.environ[key] for key in args.pass_on if key in os.environ}
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        if args.here:
            blocks = without_installing(blocks)
            scripts = Path(args.python).absolute().parent
            environment |= {"PATH": f"{scripts}:/usr/bin:/bin", "PYTHONPATH": str(clone)}
        shell = Shell(clone, environment)
        try:
            for block in blocks:
                outcome = run_block(shell, block, clone, home / ".cache/jaxserve")
                outcomes.append(outcome)
                too_silent = outcome.silent_s > args.silence
                word = "FAILED" if outcome.failed else "TOO SILENT" if too_silent else "ok"
                print(
                    f"README.md:{outcome.line} {outcome.language}: {word}, status {outcome.status}, "
                    f"{outcome.seconds:.1f} s, silent for {outcome.silent_s:.1f} s at most, "
                    f"{len(outcome.compiled)} executables compiled: {outcome.begins}",
                    flush=True,
                )
                if outcome.failed:
                    print(outcome.output[-3000:], flush=True)
        finally:
            shell.close()
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    num_settings = settings_until_served(outcomes, blocks)
    print(f"from the first prompt to the server, programs were compiled for {num_settings} settings of sizes")
    bad = any(outcome.failed or outcome.silent_s > args.silence for outcome in outcomes)
    return 1 if bad or num_settings > args.settings else 0


if __name__ == "__main__":
    sys.exit(main())
