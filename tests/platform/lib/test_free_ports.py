import socket

import pytest

from coordinator.lib import free_ports
from coordinator.lib.free_ports import (
    FIRST_PORT,
    LAST_PORT,
    ReservedPort,
    free_port,
    is_free,
    random_free_port,
)


def test_free_port_skips_a_port_in_use():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not is_free(port)
        assert free_port(port) > port


def test_free_port_without_a_free_one_is_refused():
    with pytest.raises(RuntimeError, match="no port from 70000 to 70199 is free"):
        free_port(70_000)


def test_random_port_is_free_and_no_connection_gets_it():
    ports = [random_free_port() for _ in range(20)]
    assert all(is_free(port) and FIRST_PORT <= port < LAST_PORT + 200 for port in ports)
    assert len(set(ports)) > 1


def test_reserved_port_refuses_connections_and_is_free_for_nobody():
    port = ReservedPort()
    assert not is_free(port.number) and free_port(port.number) > port.number
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port.number), 20)
    port.release()
    with socket.create_server(("127.0.0.1", port.number)):
        port.release()


def test_reserved_ports_differ_where_others_are_taken_meanwhile(monkeypatch):
    taken = ReservedPort()
    free = random_free_port()
    choices = iter([taken.number, taken.number, free])
    monkeypatch.setattr(free_ports, "random_free_port", lambda: next(choices))
    assert ReservedPort().number == free


def test_port_that_cannot_be_reserved_is_refused(monkeypatch):
    taken = ReservedPort()
    monkeypatch.setattr(free_ports, "random_free_port", lambda: taken.number)
    with pytest.raises(RuntimeError, match="no free port could be reserved"):
        ReservedPort()
