"""Where in a schema the part is that cannot be compiled: llguidance says what is wrong, and not where."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from jaxserve.text.json_schema import parts_of, schemas_in

_MOST_TRIALS = 256
_SEARCH_S = 3.0  # then the place that was found so far has to do
_WHOLE = "/$defs/whole"  # where the schema stands while a part of it is tried: references in it still lead to all of it
_NOT_SATISFIED = "Unsatisfiable"  # begins the reason of a part as well as of those around it


class Fault(NamedTuple):
    """`place`: a JSON pointer to the part. `reason`: llguidance's words for it."""

    place: str
    reason: str


def find_fault(schema: dict[str, Any], reason_of: Callable[[str], str | None]) -> Fault | None:
    """The innermost part that cannot be compiled, also behind references within the schema; None: all of it can.

    `reason_of`: why a schema, as text, cannot be compiled, or None.
    """
    inner: dict[str, Any] = json.loads(json.dumps(schema))
    parts = dict(schemas_in(inner))
    for part in parts.values():
        if isinstance(reference := part.get("$ref"), str) and (reference == "#" or reference.startswith("#/")):
            part["$ref"] = f"#{_WHOLE}{reference[1:]}"
    inner.pop("$id", None)
    dialect = {"$schema": inner.pop("$schema")} if "$schema" in inner else {}

    def reason_at(place: str) -> str | None:
        reason = reason_of(json.dumps({**dialect, "$ref": f"#{_WHOLE}{quote(place)}", "$defs": {"whole": inner}}))
        return None if reason is None else reason.replace(_WHOLE, "")

    def target_of(place: str) -> str | None:
        reference = parts[place].get("$ref")
        return unquote(reference.removeprefix(f"#{_WHOLE}")) if isinstance(reference, str) else None

    def below(place: str) -> Iterator[str]:
        yield from (place + step for step, _ in parts_of(parts[place]))
        if (target := target_of(place)) is not None:
            yield target

    reason = reason_at("")
    if reason is None:
        return None
    found, seen, num_trials = Fault("", reason), {""}, 0
    candidates = below("")
    until = time.monotonic() + _SEARCH_S
    while num_trials < _MOST_TRIALS and time.monotonic() < until and (place := next(candidates, None)) is not None:
        if place in seen or place not in parts or target_of(place) in seen:
            continue  # a part that only leads back is as wrong as the part that it leads to
        seen.add(place)
        num_trials += 1
        reason = reason_at(place)
        both_unsatisfied = all((why or "").startswith(_NOT_SATISFIED) for why in (reason, found.reason))
        if reason is not None and (reason == found.reason or both_unsatisfied):
            found, candidates = Fault(place, reason), below(place)
    return found
