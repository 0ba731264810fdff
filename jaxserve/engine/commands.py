"""The commands that other threads put into the loop's inbox; `engine` carries them out."""

from typing import NamedTuple

from jaxserve.api import Request
from jaxserve.engine.outputs import Sink


class Submit(NamedTuple):
    request: Request
    sink: Sink
    submitted_s: float


class Abort(NamedTuple):
    request_id: str
    request: Request | None  # None: any request that has the id


class Wake(NamedTuple):
    """Makes the loop look at its flags."""


class Interrupt(NamedTuple):
    error: BaseException


Command = Submit | Abort | Wake | Interrupt
