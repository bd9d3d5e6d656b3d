"""Who is asking: a machine, by a signature made for this one request."""

import secrets
import time

from django.http import HttpRequest
from django.utils import timezone

from barnraise.errors import MessageError
from barnraise.identity import check_request
from coordinator import mirror
from coordinator.accounts.models import Machine
from coordinator.telemetry import stream

SCHEME = "Barnraise "
SPENT_SECONDS = 180  # a request's id is remembered longer than its signature lives, in either direction
SEEN_EVERY = 60.0  # seconds between two writes of a machine's last_seen


class Refusal(Exception):
    """An answer with a status and a sentence; `fields` maps dotted names to sentences."""

    def __init__(self, status: int, sentence: str, fields: dict[str, str] | None = None):
        self.status, self.sentence, self.fields = status, sentence, fields or {}
        super().__init__(sentence)


def signed_by_machine(request: HttpRequest) -> Machine:
    """The machine that signed this request, for this mirror, method, path and body, once. Raises Refusal."""
    header = request.headers.get("Authorization", "")
    if not header.startswith(SCHEME):
        raise Refusal(401, "sign this request with your machine's key: Authorization: Barnraise <token>")
    token = header.removeprefix(SCHEME)
    method, path = request.method or "", request.get_full_path()
    try:
        key, jti = check_request(token, mirror.identity().key, method, path, request.body, time.time())
    except MessageError as error:
        raise Refusal(401, str(error)) from None
    machine = Machine.objects.select_related("owner").filter(key=key).first()
    if machine is None:
        raise Refusal(401, f"the key {key[:8]}… is not enrolled here: run `barnraise login` on this machine")
    if machine.revoked or not machine.owner.is_active:
        raise Refusal(403, f"the machine {machine.name} was revoked here; its owner can enrol it with a new key")
    ours = secrets.token_hex(8)  # tells a retry of our own, over a connection that broke, from a replay
    if stream.client().set(f"jti:{key}:{jti}", ours, nx=True, get=True, ex=SPENT_SECONDS) not in (None, ours):
        raise Refusal(401, "this request was made before; sign each one afresh")
    now = timezone.now()
    if machine.last_seen is None or (now - machine.last_seen).total_seconds() > SEEN_EVERY:
        Machine.objects.filter(pk=machine.pk).update(last_seen=now)
    return machine


def limit(request: HttpRequest, what: str, most: int, seconds: int, machine: Machine | None = None) -> None:
    """No more than `most` of these from one machine, or else one address, in so many seconds. Raises Refusal."""
    whose = machine.pk if machine else request.META.get("REMOTE_ADDR", "")
    key = f"limit:{what}:{whose}:{int(time.time()) // seconds}"
    with stream.client().pipeline() as pipe:
        count, _ = pipe.incr(key).expire(key, seconds).execute()
    if count > most:
        who = "this machine" if machine else "your address"
        raise Refusal(429, f"too many of these from {who}; try again in {max(1, seconds // 60)} minutes")
