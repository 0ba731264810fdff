"""The process of `jaxserve` and of `python -m jaxserve`, where the folder of scripts is not on PATH.

An interrupt (Ctrl-C) during the first imports is caught here, before there is a command line to catch it. So this
module imports nothing at the top but modules that the interpreter itself has loaded.
"""

import sys


def main() -> int:
    """Returns the exit code."""
    try:
        from jaxserve.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
