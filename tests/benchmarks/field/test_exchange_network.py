"""Test the benchmark's lines: a packet takes as long as the line says, and nothing remains."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO

from helpers.paths import ROOT

sys.path.append(str(ROOT / "benchmarks" / "field"))

from field_network import LARGE_MTU, FieldNetwork, NamespaceError

from barnraise.planning.lines import Line

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
random_bytes = random.Random(7).randbytes
with socket.create_connection((host, 5001)) as stream:
    content = random_bytes(streamed)
    stream.sendall(content)
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, size)
several = random_bytes(sent)
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


def start_program(
    network: FieldNetwork, worker: int, program: str, *arguments: object
) -> subprocess.Popen[str]:
    """Start a program at a worker; its first argument is the address of worker 0."""
    words = [program, network.host(0), *map(str, arguments)]
    return subprocess.Popen(
        [*network.command_prefix(worker), sys.executable, "-c", *words],
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def serving(network: FieldNetwork, program: str, *arguments: object) -> Iterator[IO[str]]:
    """Run a program at worker 0 from when it is ready, and yield its output."""
    server = start_program(network, 0, program, *arguments)
    try:
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        yield server.stdout
    finally:
        server.kill()
        server.wait()


def run_program(network: FieldNetwork, program: str, *arguments: object) -> list[str]:
    """Run a program at worker 1, and return the words that it prints."""
    client = start_program(network, 1, program, *arguments)
    output, _ = client.communicate()
    assert client.returncode == 0
    return output.split()


def test_line_delays_packets_limits_bytes_and_is_removed():
    with ExitStack() as cleanup:
        network = create_network(DELAY, cleanup)
        if network is None:
            return
        network.shape(Line("slow", 0.1, 0.1))
        before = network.bytes_sent()
        with serving(network, ECHO):
            small, large = map(float, run_program(network, PROBE))
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
        before = network.frames_sent()[1]
        with serving(network, RECEIVER, SENT) as received:
            stream_digest, datagrams_digest = run_program(network, SENDER, SENT, STREAMED, DATAGRAM)
            assert received.readline().strip() == stream_digest
            assert received.readline().split() == [datagrams_digest, str(DATAGRAM)]
        assert network.frames_sent()[1] - before < STREAMED / LARGE_MTU / 2
