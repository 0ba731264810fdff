"""Addresses: how they are written, and which stay inside a machine: doors without a secret listen on no others."""

import ipaddress
import re

LISTENABLE = "a host name or an IP address without a port, 0.0.0.0 or :: for all of this machine"

_LABEL = "[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NUMBER = r"(0x[0-9a-f]*|[0-9]+)\.?$"  # as the last part of a name it makes an address, which sockets complete: 127.1
_NAME = re.compile(rf"(?=.{{1,254}}$)(?!(.*\.)?{_NUMBER}){_LABEL}(\.{_LABEL})*\.?", re.IGNORECASE)


def address_of(host: str, port: int) -> str:
    """HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listening_host(host: str) -> str:
    """A host to listen on, as sockets take it: an IPv6 address without brackets. Raises ValueError for what is none.

    An empty text, which to sockets means every address, is refused: it is what a variable without a value leaves.
    """
    in_brackets = re.fullmatch(r"\[(.*:.*)\]", host)
    bare = host if in_brackets is None else in_brackets[1]
    if not is_address(bare) and _NAME.fullmatch(host) is None:
        raise ValueError(f"{host!r} is not {LISTENABLE}")
    return bare


def is_address(host: str) -> bool:
    """Whether it is an IPv4 or an IPv6 address, without brackets, and no name."""
    return _parse(host) is not None


def is_everywhere(host: str) -> bool:
    """Whether to listen on it is to listen on all addresses of the machine; an IPv6 one in brackets or not."""
    address = _parse(host.strip("[]"))
    return address is not None and address.is_unspecified


def is_loopback(host: str) -> bool:
    """Whether a host name or address, an IPv6 one in brackets or not, is reached from its own machine alone."""
    address = _parse(host.strip("[]"))
    return host == "localhost" if address is None else address.is_loopback


def reached_at(address: str) -> str:
    """The HOST:PORT in URLs by which a machine reaches what listens on HOST:PORT there."""
    host, _, port = address.rpartition(":")
    if is_everywhere(host):
        host = "[::1]" if ":" in host else "127.0.0.1"
    return f"{host.replace('%', '%25')}:{port}"  # of a zone: [fe80::1%eth0]


def _parse(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
