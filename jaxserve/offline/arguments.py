"""Arguments that a method does not have: what they are here, in place of Python's TypeError, which says less."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from jaxserve.errors import UnsupportedOption
from jaxserve.values.other_names import Place, answer

_P = ParamSpec("_P")
_R = TypeVar("_R")


def refuses_unknown(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wraps a method: an argument that it does not have is an UnsupportedOption which says what to write."""
    known = [name for name in inspect.signature(method).parameters if name != "self"]

    @functools.wraps(method)
    def checked(*args: _P.args, **options: _P.kwargs) -> _R:
        for name in options:
            if name not in known:
                here = answer(name, Place.CALL)
                if here is not None and options[name] is None:
                    here = f"None is not needed, leave it out; with a value {here}"
                raise UnsupportedOption(f"{method.__name__} has no argument {name!r}; {here or hint(name, known)}")
        return method(*args, **options)

    return checked


def hint(name: str, known: Iterable[str]) -> str:
    """The known name that is most like `name`, or all of them."""
    close = difflib.get_close_matches(name, known := list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}"
