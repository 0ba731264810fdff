"""Orders that tests of `runtime.apart` have carried out: without JAX, whose import takes longer than all of them."""

import dataclasses
import os
import sys
import threading


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """In the place of `apart.Orders`: the names themselves say what to do."""

    names: tuple[str, ...] = ()


def carry_out(orders: Names, tell) -> None:
    for name in orders.names:
        if name == "bad":
            tell(name, None, ValueError("no such\ninstruction"))
        elif name == "exit":
            print("out of order", file=sys.stderr)
            sys.exit(3)
        elif name == "hang":
            threading.Event().wait()
        elif name == "facts":
            print("a library prints this")
            tell(name, None, RuntimeError(f"{os.getpid()} {os.getpgid(0)} {os.nice(0)}"))
        else:
            tell(name, 0.25, None)
