"""The engine's side: one process that loads one engine and answers runs until its input ends.

    python -m peers.worker ENGINE        (started by `process`, in the engine's environment)

`engine_NAME` has a class `Engine`, made from `Settings`, with `about` (versions and settings, for the record) and
`run`. Standard output belongs to the lines, so whatever a library prints goes to standard error.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any, Protocol, TextIO

from peers.values import Answer, Ask, Settings, answers_to_json, asks_from_json


class Engine(Protocol):
    """What `engine_NAME.Engine` must be.

    Attributes:
      about: versions and settings that the engine ended up with, as JSON values.
    """

    about: dict[str, Any]

    def __init__(self, settings: Settings) -> None:
        """Loads the model, and compiles and warms up whatever the engine has for that."""
        ...

    def run(self, asks: list[Ask]) -> list[Answer]:
        """Answers all, in their order. The run starts with this call."""
        ...


_PR_SET_PDEATHSIG = 1


def main() -> None:
    if sys.platform == "linux":  # a process that is stopped would not notice that the other side has gone
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # for libraries written in C, which know nothing of sys.stdout
    sys.stdout = sys.stderr
    try:
        settings = Settings(**json.loads(sys.stdin.readline()))
        engine: Engine = importlib.import_module(f"peers.engine_{sys.argv[1]}").Engine(settings)
        _say(lines, {"about": engine.about})
        for line in sys.stdin:
            _say(lines, {"answers": answers_to_json(engine.run(asks_from_json(json.loads(line))))})
    except Exception as error:  # whatever it is, the other side must not wait for an answer
        traceback.print_exc()
        _say(lines, {"error": f"{type(error).__name__}: {error}"})
    lines.flush()
    os._exit(0)  # threads that engines leave behind must not keep the process


def _say(lines: TextIO, value: dict[str, Any]) -> None:
    lines.write(json.dumps(value) + "\n")


if __name__ == "__main__":
    main()
