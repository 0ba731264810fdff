"""Ports that are held from before the loading until there are answers."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest
from serve_parts import WAIT_S, serve_bytes

from jaxserve.config.schema import GrpcConfig, HttpConfig, ServeConfig
from jaxserve.errors import ConfigError
from jaxserve.serve.ports import HeldPort, HeldPorts, hold_ports
from jaxserve.serve.service import Addresses, Shutdown, serve

BOTH = ServeConfig(grpc=GrpcConfig(port=0), http=HttpConfig(port=0))


@contextlib.contextmanager
def _listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_port_that_is_listened_on_is_told_with_the_setting_to_change() -> None:
    with _listening() as port:
        for setting in ("serve.http.port", "--port"):
            with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: .* in use; set serve.host or {setting}, 0"):
                HeldPort("127.0.0.1", port, setting)


def test_a_held_port_refuses_clients_and_belongs_to_nobody_else() -> None:
    held = HeldPort("127.0.0.1", 0, "serve.grpc.port")
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", held.number), timeout=WAIT_S)
        with pytest.raises(ConfigError, match="in use"):
            HeldPort("127.0.0.1", held.number, "serve.grpc.port")
    finally:
        held.close()
    HeldPort("127.0.0.1", held.number, "serve.grpc.port").close()


def test_a_restart_takes_the_port_of_connections_that_linger() -> None:
    held = HeldPort("127.0.0.1", 0, "serve.http.port")
    with held.take() as listener:
        listener.listen()
        with socket.create_connection(("127.0.0.1", held.number)) as client:
            accepted, _ = listener.accept()
            accepted.close()  # the server's side ends first, and lingers
            assert client.recv(1) == b""
    HeldPort("127.0.0.1", held.number, "serve.http.port").close()


def test_the_first_of_two_is_let_go_when_the_second_cannot_be_had() -> None:
    with _listening() as port:
        probe = HeldPort("127.0.0.1", 0, "")
        probe.close()
        config = ServeConfig(grpc=GrpcConfig(port=probe.number), http=HttpConfig(port=port))
        with pytest.raises(ConfigError, match=r"serve\.http\.port"):
            HeldPorts.of(config)
    HeldPort("127.0.0.1", probe.number, "").close()


@pytest.mark.parametrize(("host", "written"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_doors_open_on_the_ports_that_were_held(host: str, written: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
    engine, shutdown, opened = serve_bytes().engine, Shutdown(), []
    config = BOTH.model_copy(update={"host": host})

    def on_ready(addresses: Addresses) -> None:
        opened.append(addresses)
        shutdown.drain.set()

    async def main(ports: HeldPorts) -> int:
        return await serve(engine, config, shutdown, on_ready, ports=ports)

    with hold_ports(config) as ports:
        assert ports.grpc is not None and ports.http is not None
        assert asyncio.run(asyncio.wait_for(main(ports), WAIT_S)) == 0
        assert opened == [Addresses(f"{written}:{ports.grpc.number}", f"{written}:{ports.http.number}")]
