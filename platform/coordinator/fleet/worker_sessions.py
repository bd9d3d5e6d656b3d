"""Recognise a key that trains on two machines at once.

A worker draws a random session when it starts, and sends it with its reports. A machine that was
started again has a new session, and its old one falls silent. Where the old one goes on reporting
after the new one began, the key was copied: the newer worker is refused, before it can publish
updates that contradict those of the older one.
"""

import time
import uuid

from coordinator.lib.valkey import valkey_client

ALIVE_SECONDS = 90.0  # without a report, after which a session counts as ended
MAX_SESSIONS = 32  # of one machine; one that starts more often than that is not watched
KEY_SECONDS = 3600  # after its last report a machine's sessions are forgotten

Sessions = dict[str, tuple[float, float]]  # session → first and last report, seconds since 1970


def is_copy(sessions: Sessions, session: str, now: float) -> bool:
    """Return whether another worker with the same key began earlier and reports still. Pure."""
    began = sessions[session][0]
    return any(
        first < began < last and now - last < ALIVE_SECONDS
        for other, (first, last) in sessions.items()
        if other != session
    )


def report_session(run: uuid.UUID, machine: uuid.UUID, session: str) -> bool:
    """Record that a session reports, and return whether its key was copied from another machine."""
    now = time.time()
    key = f"sessions:{run}:{machine}"
    client = valkey_client()
    with client.pipeline() as pipe:
        pipe.hsetnx(key, f"{session} first", now)
        pipe.hset(key, f"{session} last", str(now))
        pipe.expire(key, KEY_SECONDS)
        pipe.hgetall(key)
        fields = {name: float(value) for name, value in pipe.execute()[-1].items()}
    if len(fields) > 2 * MAX_SESSIONS:
        client.delete(key)
        return False
    names = {name.split()[0] for name in fields}
    sessions = {
        name: (fields[f"{name} first"], fields[f"{name} last"])
        for name in names
        if f"{name} first" in fields and f"{name} last" in fields
    }
    return is_copy(sessions, session, now)
