"""Open websockets of one process are bounded, and one network leaves room for others."""

from asgiref.testing import ApplicationCommunicator

from coordinator.live import consumers
from coordinator.live.watcher_limits import WatcherLimits


def test_flood_of_sockets_from_one_network_leaves_room_for_others():
    limits = WatcherLimits(most=100, most_of_network=10)
    flood = [limits.admit("flood") for _ in range(200)]
    assert flood.count(True) == 50, "half of all places, while nobody else wants them"
    assert all(limits.admit(f"visitor{number}") for number in range(50))
    assert not limits.admit("late"), "the process has a bound"
    limits.remove("flood")
    assert not limits.admit("flood") and limits.admit("late")


async def test_socket_without_a_place_is_refused_before_any_query(monkeypatch):
    monkeypatch.setattr(consumers, "limits", WatcherLimits(most=0))
    scope = {
        "type": "websocket",
        "url_route": {"kwargs": {"run": "01890000-0000-7000-8000-000000000001"}},
        "headers": [],
        "client": ("203.0.113.7", 1),
    }
    socket = ApplicationCommunicator(consumers.watch_run, scope)
    await socket.send_input({"type": "websocket.connect"})
    assert (await socket.receive_output(60))["type"] == "websocket.close"
