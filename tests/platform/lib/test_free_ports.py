import socket

import pytest

from coordinator.lib.free_ports import FIRST_PORT, LAST_PORT, free_port, is_free, random_free_port


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
