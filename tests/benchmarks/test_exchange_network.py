"""Test the benchmark's lines: a packet takes as long as the line says, and nothing remains."""

import subprocess
import sys
from contextlib import ExitStack

from helpers.paths import ROOT

sys.path.append(str(ROOT / "benchmarks" / "exchange"))

from field_network import LARGE_MTU, FieldNetwork, NamespaceError

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

# Receives a stream, then datagrams, and prints the digest of each.
RECEIVER = """
import hashlib, socket, sys
host, sent = sys.argv[1], int(sys.argv[2])
server = socket.create_server((host, 5001))
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.bind((host, 5002))
datagrams.settimeout(60)
print("ready", flush=True)
stream, _ = server.accept()
digest = hashlib.sha256()
while received := stream.recv(1 << 20):
    digest.update(received)
print(digest.hexdigest(), flush=True)
parts = []
while sum(map(len, parts)) < sent:
    parts.append(datagrams.recv(1 << 16))
print(hashlib.sha256(b"".join(parts)).hexdigest(), max(map(len, parts)))
"""
# Sends a stream, and one call of datagrams that the kernel cuts (UDP_SEGMENT), as QUIC does.
SENDER = """
import hashlib, random, socket, sys
UDP_SEGMENT = 103
host, sent, streamed, size = sys.argv[1], *map(int, sys.argv[2:])
bytes_of = random.Random(7).randbytes
with socket.create_connection((host, 5001)) as stream:
    content = bytes_of(streamed)
    stream.sendall(content)
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, size)
several = bytes_of(sent)
datagrams.sendto(several, (host, 5002))
print(hashlib.sha256(content).hexdigest(), hashlib.sha256(several).hexdigest())
"""
STREAMED, SENT, DATAGRAM = 4_000_000, 24_000, 1200  # bytes


def list_namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def create_network(delay: float, cleanup: ExitStack) -> FieldNetwork | None:
    """Create a network of two workers; None where this system's refusal is a clear sentence."""
    network = FieldNetwork(2, delay, cleanup)
    try:
        network.create()
    except NamespaceError as error:
        assert "needs Linux and root" in str(error) or "cannot be made" in str(error)
        return None
    return network


def test_line_delays_packets_limits_bytes_and_is_removed():
    with ExitStack() as cleanup:
        network = create_network(DELAY, cleanup)
        if network is None:
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


def test_kernel_hands_many_packets_over_as_one_and_none_is_damaged():
    with ExitStack() as cleanup:
        network = create_network(0.001, cleanup)
        if network is None:
            return
        network.shape(None)
        receiver = subprocess.Popen(
            [
                *network.command_prefix(0),
                *(sys.executable, "-c", RECEIVER, network.host(0), str(SENT)),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        cleanup.callback(receiver.wait)
        cleanup.callback(receiver.kill)
        assert receiver.stdout is not None and receiver.stdout.readline() == "ready\n"
        before = network.frames_sent()[1]
        sender = subprocess.run(
            [
                *network.command_prefix(1),
                *(sys.executable, "-c", SENDER, network.host(0)),
                *(str(SENT), str(STREAMED), str(DATAGRAM)),
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        stream_digest, datagrams_digest = sender.stdout.split()
        assert receiver.stdout.readline().strip() == stream_digest
        assert receiver.stdout.readline().split() == [datagrams_digest, str(DATAGRAM)]
        assert network.frames_sent()[1] - before < STREAMED / LARGE_MTU / 2
