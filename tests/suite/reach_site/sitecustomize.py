"""In a process that a test starts while `--reach` records: writes each module as it is imported, and each file as it
is opened.

A line is written at once, since many of these processes end by SIGKILL.
"""

import os
import sys

_file = os.environ.get("JAXSERVE_TEST_REACH")
if _file and os.path.exists(_file):
    _out = os.open(_file, os.O_WRONLY | os.O_APPEND)

    def _reached(event: str, arguments: tuple[object, ...]) -> None:
        if event == "exec" and getattr(arguments[0], "co_name", "") == "<module>":
            os.write(_out, f"{arguments[0].co_filename}\n".encode())  # type: ignore[attr-defined]
        elif event == "open" and isinstance(arguments[0], str):
            os.write(_out, f"{os.path.abspath(arguments[0])}\n".encode())

    sys.addaudithook(_reached)
