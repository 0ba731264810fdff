"""Orders, which process 0 gives to the stores of all processes, and the outcomes that come back: values and their JSON.

An order has a number, the `seq` of its frame. Fills, writes and flushes are answered with one outcome by each process;
a settlement and a cancellation concern an earlier order, and are not answered.
"""

from typing import Annotated, Literal

import pydantic

from jaxserve.errors import PlanCorrupt
from jaxserve.hosts.frames import Frame, Kind
from jaxserve.sched.loading import StoreKey

_MAX_REASON = 2000  # characters
_Slot = Annotated[int, pydantic.Field(ge=0)]


class _Value(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(
        strict=True, frozen=True, extra="forbid", ser_json_bytes="hex", val_json_bytes="hex", allow_inf_nan=False
    )


class Page(_Value):
    """A page as process 0 names it. Each process makes a key of its own store from that."""

    salt: str
    content: Annotated[bytes, pydantic.Field(min_length=32, max_length=32)]

    @property
    def key(self) -> StoreKey:
        return StoreKey(self.salt, self.content)


class Fill(_Value):
    """Fill the slots within `deadline_s` seconds of the arrival. Outcome: of each slot, whether it has its page."""

    do: Literal["fill", "prefetch"]
    pages: Annotated[list[Page], pydantic.Field(min_length=1)]
    slots: list[_Slot]
    deadline_s: Annotated[float, pydantic.Field(gt=0)]

    @pydantic.model_validator(mode="after")
    def _fits(self) -> "Fill":
        if len(self.pages) != len(self.slots):
            raise ValueError(f"{len(self.pages)} pages are for {len(self.slots)} slots")
        return self


class Write(_Value):
    """Write the slot. Outcome: of no slot; the write has ended, well or not."""

    do: Literal["write"] = "write"
    page: Page
    slot: _Slot


class Settle(_Value):
    """The earlier order `of` was a prefetch, and so many of its pages were used."""

    do: Literal["settle"] = "settle"
    of: int
    num_used: Annotated[int, pydantic.Field(ge=0)]


class Cancel(_Value):
    """The pages of the earlier order `of` are not needed any more. Its outcome still comes."""

    do: Literal["cancel"] = "cancel"
    of: int


class Flush(_Value):
    """Remove the pages of a salt, or all. Outcome: of no slot, with a reason if pages may remain."""

    do: Literal["flush"] = "flush"
    salt: str | None


Order = Fill | Write | Settle | Cancel | Flush
_ORDER: pydantic.TypeAdapter[Order] = pydantic.TypeAdapter(Annotated[Order, pydantic.Field(discriminator="do")])


class Outcome(_Value):
    """What one process has done of an order.

    Attributes:
      ok: see the orders.
      reason: why a flush has failed; empty where it has not.
    """

    ok: list[bool] = []
    reason: Annotated[str, pydantic.Field(max_length=_MAX_REASON)] = ""

    @classmethod
    def failed(cls, error: Exception) -> "Outcome":
        """Of a flush."""
        return cls(reason=f"{type(error).__name__}: {error}"[:_MAX_REASON])


def encode_order(order: Order) -> bytes:
    """The payload of a frame of kind ORDER."""
    return order.model_dump_json().encode()


def decode_order(frame: Frame) -> Order:
    """The order in a frame of kind ORDER. Raises PlanCorrupt where it holds none."""
    try:
        return _ORDER.validate_json(frame.payload)
    except pydantic.ValidationError as error:
        raise PlanCorrupt(f"order {frame.seq} cannot be read: {_first(error)}") from error


def outcome_frame(number: int, outcome: Outcome) -> Frame:
    """The frame that reports the outcome of order `number`."""
    return Frame(Kind.OUTCOME, number, outcome.model_dump_json().encode())


def decode_outcome(frame: Frame) -> Outcome:
    """The outcome in a frame of kind OUTCOME. Raises PlanCorrupt where it holds none."""
    try:
        return Outcome.model_validate_json(frame.payload)
    except pydantic.ValidationError as error:
        raise PlanCorrupt(f"the outcome of order {frame.seq} cannot be read: {_first(error)}") from error


def _first(error: pydantic.ValidationError) -> str:
    """The first thing that is wrong, without the content: salts may be secrets of tenants."""
    found = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(map(str, found["loc"]))
    return f"{place}: {found['msg']}" if place else found["msg"]
