"""Steps that another process compiles into the store, from which this one reads them.

A compile in a thread takes the interpreter and the cores from the steps that run, and cannot be interrupted: a program
that ends would wait for it. A process has a priority of its own, can be stopped for a while, and can be killed. It
needs no weights, since a program follows from shapes; `build.store_steps` is its work, and `apart_program` how it
begins.

For CPUs only: a GPU or TPU lets no second process compile for it while the first one has it.
"""

import contextlib
import dataclasses
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import jax

from jaxserve.config.schema import Config

logger = logging.getLogger(__name__)

_PROGRAM = Path(__file__).with_name("apart_program.py")
# While steps are in flight the process is stopped half of the time, and gets to its end under any load. In the other
# half it has what they leave of the cores.
_TURN_S = 0.2
_TAIL_BYTES = 2000


class Unavailable(Exception):
    """No process builds the step. The text says why."""


class StepFailed(Exception):
    """The step cannot be built. The text is the error of the process that tried."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """All that the other process must know to make the same programs.

    Attributes:
      config: of this process.
      total_bytes: memory of a device, as it was when the sizes were decided here.
      digest: of the store: the other process must come to the same one.
      settings: of JAX, where they are plain values.
      names: of the steps, in the order in which they are to be built.
    """

    config: Config
    total_bytes: int
    digest: str
    settings: Mapping[str, bool | int | float | str | None]
    names: tuple[str, ...] = ()


def plain_settings() -> Mapping[str, bool | int | float | str | None]:
    """The settings of JAX in this process that another one can take over."""
    return {name: v for name, v in jax.config.values.items() if isinstance(v, bool | int | float | str | None)}


def use_settings(settings: Mapping[str, bool | int | float | str | None]) -> None:
    """Takes over the settings of another process, before anything is compiled. No cache of JAX is used: an executable
    that came out of one cannot be stored."""
    for name, value in settings.items():
        if jax.config.values.get(name) != value:
            jax.config.update(name, value)
    jax.config.update("jax_enable_compilation_cache", False)


class _Life:
    """Of the process. `why`: the reason why it builds nothing more; None as long as it may."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.why: str | None = None


class StepsApart:
    """The process, for all replicas of an engine: the first that begins starts it, the last that ends kills it.

    Any thread. It holds no array, so it may be used while the interpreter ends.
    """

    def __init__(self, module: str, orders: Orders) -> None:
        """`module` has a function `carry_out(orders, tell)`, which tells of each step its name, and the seconds that it
        took or its error. Nothing runs before `begin`."""
        self._module = module
        self._orders = orders
        self._changed = threading.Condition()
        self._users: set[object] = set()
        self._busy: set[object] = set()
        self._seconds: dict[str, float] = {}
        self._errors: dict[str, str] = {}
        self._life: _Life | None = None

    def begin(self, user: object, names: Sequence[str]) -> None:
        """Has these steps built, which are the same for all users. Never waits."""
        with self._changed:
            self._users.add(user)
            if self._life is not None:
                return
            life = self._life = _Life()
        orders = dataclasses.replace(self._orders, names=tuple(names))
        # The thread that starts the process reads from it until its end: Linux kills the process with this thread.
        threading.Thread(target=self._run, args=(life, orders), name="jaxserve-apart", daemon=True).start()

    def wait(self, name: str) -> float:
        """Waits until the step is in the store. Returns the seconds that it took. Raises StepFailed, and Unavailable
        when the process has ended before."""
        with self._changed:
            life = self._life
            self._changed.wait_for(
                lambda: name in self._seconds or name in self._errors or life is None or life.why is not None
            )
            if name in self._errors:
                raise StepFailed(self._errors[name])
            if name not in self._seconds:
                raise Unavailable("it was ended" if life is None else life.why)
            return self._seconds[name]

    def note_work(self, user: object, working: bool) -> None:
        """Steps of this user are in flight, or no longer. Never waits."""
        if working:
            self._busy.add(user)
        else:
            self._busy.discard(user)

    def end(self, user: object) -> None:
        """The user needs no more steps. The last one kills the process, and whoever waits hears it."""
        self._busy.discard(user)
        with self._changed:
            self._users.discard(user)
            if self._users or self._life is None:
                return
            life, self._life = self._life, None
            life.why = "it was ended"
            self._changed.notify_all()
            if life.process is not None:
                life.process.kill()  # also where it is stopped

    def _run(self, life: _Life, orders: Orders) -> None:
        with tempfile.TemporaryFile() as errors:
            try:
                why = self._follow(life, orders, errors)
            except OSError as error:
                why = f"it cannot be started: {error}"
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - _TAIL_BYTES))
            said = errors.read().decode(errors="replace").strip()
        with self._changed:
            if life.why is None:
                life.why = f"{why}: {said}" if said else why
            self._changed.notify_all()

    def _follow(self, life: _Life, orders: Orders, errors: IO[bytes]) -> str:
        """Starts the process and takes its answers. Returns how it ended."""
        if not sys.executable:
            raise OSError("this interpreter has no program of its own")
        # A group of its own: Ctrl-C in a terminal is for this process. The same session, since Linux may share the time
        # between sessions first, and looks at priorities within each.
        process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            process_group=0,
            bufsize=0,
        )
        assert process.stdin is not None and process.stdout is not None
        with process:
            with self._changed:
                life.process = process
                if life.why is not None:  # ended meanwhile
                    process.kill()
            try:
                given = memoryview(pickle.dumps((os.getpid(), sys.path, self._module)) + pickle.dumps(orders))
                with contextlib.suppress(BrokenPipeError):  # it says why before it ends
                    while given:
                        given = given[process.stdin.write(given) :]
                self._take_answers(process, process.stdout)
                process.send_signal(signal.SIGCONT)  # in case it was stopped on its last way
                process.wait()
            finally:
                process.kill()
        return f"it ended with status {process.returncode}"

    def _take_answers(self, process: "subprocess.Popen[bytes]", stdout: IO[bytes]) -> None:
        """Until the process ends. While steps are in flight here, it is stopped and goes on by turns."""
        stopped, text = False, b""
        while True:
            busy = bool(self._busy)
            if stopped or busy:
                stopped = not stopped
                process.send_signal(signal.SIGSTOP if stopped else signal.SIGCONT)
            if not select.select([stdout], [], [], _TURN_S)[0]:
                continue
            part = os.read(stdout.fileno(), 1 << 16)
            if not part:
                return
            *lines, text = (text + part).split(b"\n")
            for line in lines:
                self._note(*line.decode().split("\t", 2))

    def _note(self, kind: str, name: str, text: str) -> None:
        with self._changed:
            if kind == "built":
                self._seconds[name] = float(text)
            else:
                self._errors[name] = text
            self._changed.notify_all()
