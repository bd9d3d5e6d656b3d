"""The line to a peer is measured, and no peer can be made to send or receive without bound."""

from concurrent.futures import ThreadPoolExecutor

from helpers.network.raw_peer import connect_raw_peer
from helpers.wait_for import wait_until

from barnraise.peering.links import bandwidth_probe as line_test
from barnraise.peering.links.bandwidth_meter import LineRates
from barnraise.peering.transports.framing import unpack
from barnraise.protocol.messages import (
    MAX_LINE_TEST_BYTES,
    LineTestPart,
    LineTestReceipt,
    LineTestRequest,
)

SECONDS = 60.0


def test_line_is_measured_both_ways_and_slower_where_it_is_slower(world):
    machine, peer = (world.machine(number).start() for number in (1, 2))
    world.network.uplinks = {machine.identity.key: 4e5}
    machine.add_peers(peer)
    wait_until(lambda: machine.exchange.stats.peers == 1, SECONDS)
    rates = machine.exchange.measure_line()
    assert 0 < rates.up < 5e5 < rates.down
    for _ in range(3):  # the peer serves a few tests of one machine
        rates = machine.exchange.measure_line()
    assert rates == LineRates()


def test_machine_alone_measures_nothing(world):
    assert world.machine(1).start().exchange.measure_line() == LineRates()


def test_peer_that_sends_more_than_a_test_has_is_dropped(world, caplog):
    machine = world.machine(1).start()
    with connect_raw_peer(world, machine) as send:
        send(LineTestReceipt(size=5, seconds=0.0))  # nothing was sent to it
        send(LineTestRequest(size=1))
        for _ in range(1 + MAX_LINE_TEST_BYTES // 500_000):
            send(LineTestPart(), b"x" * 500_000)
        wait_until(lambda: "more bytes than a test of the line" in caplog.text, SECONDS)


def test_peer_that_requests_more_than_a_test_has_gets_no_more(world):
    machine = world.machine(1).start()
    server = machine.exchange.server
    with connect_raw_peer(world, machine) as send:
        wait_until(lambda: machine.exchange.stats.peers == 1, SECONDS)
        (connection,) = server.peers.connections.values()
        for _ in range(50):
            send(LineTestRequest(size=MAX_LINE_TEST_BYTES))
        send(LineTestPart(is_last=True), b"x")
        wait_until(lambda: connection.channel.bytes_sent > MAX_LINE_TEST_BYTES, SECONDS)
        assert connection.channel.bytes_sent < 1.2 * MAX_LINE_TEST_BYTES


def test_late_bytes_of_a_download_count_in_no_other_step(world, monkeypatch):
    machine = world.machine(1).start()
    channels = []
    with (
        connect_raw_peer(world, machine, reads=False, channels=channels) as send,
        ThreadPoolExecutor(1) as thread,
    ):
        channel, run = channels[0]

        def wait_for(is_awaited) -> None:
            async def receive() -> None:
                while not is_awaited(unpack(await channel.receive())[0]):
                    pass

            run(receive())

        def wait_for_request() -> None:
            wait_for(lambda message: isinstance(message, LineTestRequest))

        def wait_for_upload() -> None:
            wait_for(lambda message: isinstance(message, LineTestPart) and message.is_last)

        wait_until(lambda: machine.exchange.stats.peers == 1, SECONDS)
        measuring = thread.submit(machine.exchange.measure_line)
        wait_for_request()
        monkeypatch.setattr(line_test, "STEP_LIMIT_SECONDS", SECONDS)  # from the next step on
        for _ in range(2):  # the rest is late
            send(LineTestPart(), b"x" * 1000)
        wait_for_upload()
        for _ in range(2):
            send(LineTestPart(), b"x" * 1000)
        send(LineTestReceipt(size=1000, seconds=1.0))
        rates = measuring.result(SECONDS)
        assert rates.up == 1000.0 and rates.down > 0
        measuring = thread.submit(machine.exchange.measure_line)
        wait_for_request()
        send(LineTestPart(is_last=True), b"x" * 1000)
        send(LineTestReceipt(size=7, seconds=1.0))
        send(LineTestPart(), b"x")
        send(LineTestPart(is_last=True), b"x" * 10)
        wait_for_upload()
        for _ in range(2):  # bytes that nothing waits for
            send(LineTestPart(is_last=True), b"x" * 1000)
        send(LineTestReceipt(size=500, seconds=1.0))
        rates = measuring.result(SECONDS)
        assert rates.up == 500.0 and 0 < rates.down <= 10_000.0
