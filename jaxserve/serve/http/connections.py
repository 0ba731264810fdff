"""The connections of the port: accepted, counted, bounded.

At the bound the connection that has been idle for longest is closed for the new one, as nginx does: a client that keeps
connections open without asking anything, and needs no key for that, must not keep others out. Where all are busy the
new one is a spare: it may ask how the server is, and nothing else; a balancer must not take a busy server for a dead
one.

asyncio's own acceptor is not used, since it knows no bound, and when descriptors run out it tries again for each place
in the backlog and logs a traceback for each: megabytes a second.
"""

import asyncio
import collections
import errno
import logging
import socket
import ssl
from collections.abc import Callable

logger = logging.getLogger(__name__)

_AT_ONCE = 16  # connections accepted before other tasks have their turn
_SPARES = 16
_PAUSE_S = 1.0  # when the system has no room: connections wait in the backlog meanwhile, and one line is logged
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Client(asyncio.Protocol):
    """A connection, which reports to `Connections` when it is busy and when idle."""

    def abandon(self) -> None:
        """Closes the connection at once. Does nothing before it is made."""
        raise NotImplementedError


class Connections:
    """All open connections. Mutated on one event loop.

    Attributes:
      most: number that may be open, without a few spares.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._tasks: dict[Client, asyncio.Task[None]] = {}  # of each one, the task that makes it
        self._idle: collections.OrderedDict[Client, None] = collections.OrderedDict()  # longest first
        self._spares: collections.OrderedDict[Client, None] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, client: Client, task: asyncio.Task[None]) -> None:
        """Adds a new connection without a request. Another one may be closed for it."""
        if len(self._tasks) - len(self._spares) >= self.most and not self.close_longest_idle():
            if len(self._spares) >= _SPARES:
                self._close(next(iter(self._spares)))
            self._spares[client] = None
        else:
            self._idle[client] = None
        self._tasks[client] = task

    def is_spare(self, client: Client) -> bool:
        """Whether the connection came when all others were busy."""
        return client in self._spares

    def begin(self, client: Client) -> None:
        """The connection has a request; until `rest` it is not closed for others."""
        self._idle.pop(client, None)

    def rest(self, client: Client) -> None:
        """The connection has its answer."""
        if client in self._tasks and client not in self._spares:
            self._idle[client] = None

    def remove(self, client: Client) -> None:
        """The connection is closed. May be called twice."""
        self._tasks.pop(client, None)
        self._idle.pop(client, None)
        self._spares.pop(client, None)

    def close_longest_idle(self) -> bool:
        """Closes the one that has been idle for longest. False when none is idle."""
        if not self._idle:
            return False
        self._close(next(iter(self._idle)))
        return True

    def _close(self, client: Client) -> None:
        task = self._tasks[client]
        self.remove(client)
        task.cancel()  # of a handshake of TLS that is not over; else it is done
        client.abandon()


class Acceptor:
    """Accepts on one listening socket until it is closed. Used on one event loop."""

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], Client],
        connections: Connections,
        tls: ssl.SSLContext | None,
        handshake_timeout_s: float,
    ) -> None:
        """`make`: a new protocol. `listener` does not block, and stays its owner's."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make = make
        self._connections = connections
        self._tls = tls
        self._handshake_timeout_s = None if tls is None else handshake_timeout_s
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accepts no more."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                self._wait_for_room(error)
                return
            accepted.setblocking(False)
            protocol = self._make()
            self._connections.add(protocol, self._loop.create_task(self._connect(accepted, protocol)))

    async def _connect(self, accepted: socket.socket, protocol: Client) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol, accepted, ssl=self._tls, ssl_handshake_timeout=self._handshake_timeout_s
            )
        except OSError as error:  # a handshake that failed; the client has gone
            logger.debug("a connection was not made: %r", error)
            self._connections.remove(protocol)
        except BaseException:
            self._connections.remove(protocol)
            raise

    def _wait_for_room(self, error: OSError) -> None:
        closed = sum(self._connections.close_longest_idle() for _ in range(_AT_ONCE))
        logger.error(
            "no connection can be accepted: %s; %d are open and %d idle ones were closed; trying again in %g s",
            error.strerror,
            len(self._connections),
            closed,
            _PAUSE_S,
        )
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(_PAUSE_S, self._loop.add_reader, self._listener, self._accept)
