"""What a server says on stdout once a port is open, to whoever has started it. The log does not repeat it."""

from collections.abc import Callable

# What is done at a port ("serving HTTP"), its HOST:PORT, and what else there is to say.
Announce = Callable[[str, str, str], None]


def opened(what: str, address: str, more: str = "") -> str:
    """The line that people read, and programs that start a server: the address follows the last " on "."""
    return f"{what} on {address}{more}"


def announce(what: str, address: str, more: str = "") -> None:
    """Prints that line. See `cli.announcer` for a log in JSON."""
    print(opened(what, address, more), flush=True)
