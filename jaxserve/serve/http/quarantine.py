"""Routes for operators of a router: the contents that it refuses, see `Quarantine`.

They exist only with `serve.admin_tokens_file`.
"""

from typing import Annotated, Self

import pydantic
from fastapi import APIRouter, Query

from jaxserve.serve.http.bodies import REFUSALS
from jaxserve.serve.http.errors import HttpRefusal
from jaxserve.serve.http.keys import ADMIN_FOLDER
from jaxserve.serve.quarantine import LISTED, MAX_QUARANTINED, Quarantine, Quarantined, not_quarantined


class QuarantinedEntry(pydantic.BaseModel):
    """As `quarantine.Quarantined`."""

    digest: str
    request_id: str
    why: str
    since_s: float
    left_s: float
    num_refused: int

    @classmethod
    def of(cls, entry: Quarantined) -> Self:
        return cls(**entry._asdict())


class QuarantineReply(pydantic.BaseModel):
    """`entries`: the newest first; `total`: how many there are."""

    entries: list[QuarantinedEntry]
    total: int


def quarantine_router(quarantine: Quarantine) -> APIRouter:
    routes = APIRouter(prefix=ADMIN_FOLDER.rstrip("/"), responses=REFUSALS, tags=["Operators"])

    @routes.get("/quarantine")
    async def quarantined(limit: Annotated[int, Query(ge=1, le=MAX_QUARANTINED)] = LISTED) -> QuarantineReply:
        """Contents that are refused."""
        return QuarantineReply(
            entries=[QuarantinedEntry.of(entry) for entry in quarantine.listed(limit)], total=len(quarantine)
        )

    @routes.delete("/quarantine/{digest}", status_code=204)
    async def remove(digest: str) -> None:
        """Takes requests of one content again."""
        if not quarantine.remove(digest):
            raise HttpRefusal(404, not_quarantined(digest))

    return routes
