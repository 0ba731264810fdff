"""Typed fields of preprocessor_config.json, with errors that name the file and the field."""

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError

_RESCALE = 1 / 255


class Fields:
    """A JSON object. A field given as null counts as absent."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._origin = origin

    def table(self, name: str) -> "Fields":
        """A nested object; an empty one where it is absent."""
        value = self._values.get(name, {})
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self._origin}: {name} is {value!r:.80}, but must be an object")
        return Fields(value, f"{self._origin}: {name}")

    def require(self, name: str, *allowed: Any) -> None:
        """Refuses a field that is present with a value that is not implemented."""
        value = self._values.get(name, allowed[0])
        if value not in allowed:
            known = " or ".join(dict.fromkeys(map(repr, allowed)))
            raise CheckpointError(f"{self._origin}: {name} is {value!r:.80}, which is not supported (only {known})")

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1; without a default the field must be there."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self._origin}: {name} is {value!r:.80}, but must be a whole number of at least 1")
        return value

    def channels(self, name: str) -> tuple[float, ...]:
        """Three numbers, of red, green and blue."""
        value = self._values.get(name)
        if not isinstance(value, list) or len(value) != 3 or not all(isinstance(v, int | float) for v in value):
            raise CheckpointError(f"{self._origin}: {name} is {value!r:.80}, but must be a list of three numbers")
        return tuple(map(float, value))

    def check_common(self, *, resample: int) -> None:
        """Refuses steps that are switched off, or others than Pillow's `resample`, in what all processors share."""
        for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            self.require(name, True)
        self.require("resample", resample)
        factor = self._values.get("rescale_factor", _RESCALE)
        if not isinstance(factor, float) or abs(factor - _RESCALE) > 1e-9:
            raise CheckpointError(f"{self._origin}: rescale_factor is {factor!r:.80}, but only 1/255 is supported")
