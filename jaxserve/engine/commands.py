"""What other threads ask of the loop; each goes through its inbox.

Owns the four shapes. Refuses to do what they ask: the loop does (`engine`).
"""

import queue
from typing import NamedTuple

from jaxserve.api import Request
from jaxserve.engine.outputs import Sink


class Submit(NamedTuple):
    request: Request
    sink: Sink
    echo: bool
    submitted_s: float


class Abort(NamedTuple):
    request_id: str
    request: Request | None  # None: whichever request has the id


class Wake(NamedTuple):
    """Makes the loop look at its flags."""


class Interrupt(NamedTuple):
    error: BaseException


Command = Submit | Abort | Wake | Interrupt


def unheard(inbox: queue.SimpleQueue[Command]) -> list[Submit]:
    """Empties the inbox of a loop that ends; requests that it never took."""
    found: list[Submit] = []
    while not inbox.empty():
        command = inbox.get()
        if isinstance(command, Submit):
            found.append(command)
    return found
