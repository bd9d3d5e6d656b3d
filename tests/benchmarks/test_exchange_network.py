"""Test the benchmark's lines: a packet takes as long as the line says, and nothing remains."""

import subprocess
import sys
from contextlib import ExitStack

from helpers.paths import ROOT

sys.path.append(str(ROOT / "benchmarks" / "exchange"))

from field_network import FieldNetwork, NamespaceError

from barnraise.exchange.pacing.lines import Line

DELAY = 0.05
ECHO = """
import socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind((sys.argv[1], 5000))
print("ready", flush=True)
while True:
    server.sendto(*server.recvfrom(2000))
"""
PROBE = """
import socket, sys, time
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.settimeout(60)
client.connect((sys.argv[1], 5000))
for size in (10, 1000):
    client.send(bytes(size)); client.recv(2000)
    started = time.monotonic()
    client.send(bytes(size)); client.recv(2000)
    print(time.monotonic() - started)
"""


def list_namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def test_line_delays_packets_limits_bytes_and_is_removed():
    with ExitStack() as cleanup:
        network = FieldNetwork(2, DELAY, cleanup)
        try:
            network.create()
        except NamespaceError as error:
            assert "needs Linux and root" in str(error) or "cannot be made" in str(error)
            return
        network.shape(Line("slow", 0.1, 0.1))
        echo = subprocess.Popen(
            [*network.command_prefix(0), sys.executable, "-c", ECHO, network.host(0)],
            stdout=subprocess.PIPE,
            text=True,
        )
        cleanup.callback(echo.wait)
        cleanup.callback(echo.kill)
        assert echo.stdout is not None and echo.stdout.readline() == "ready\n"
        before = network.bytes_sent()
        probe = subprocess.run(
            [*network.command_prefix(1), sys.executable, "-c", PROBE, network.host(0)],
            capture_output=True,
            text=True,
            check=True,
        )
        small, large = map(float, probe.stdout.split())
        assert small >= 2 * DELAY and large >= 2 * DELAY
        sent = [now - then for now, then in zip(network.bytes_sent(), before, strict=True)]
        assert all(2020 <= each < 20_000 for each in sent)
        assert network.namespace(0) in list_namespaces()
        name = network.namespace(0)
    assert name not in list_namespaces()
