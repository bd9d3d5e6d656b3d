"""Updates of a stranger: valid ones, and those that break a rule."""

import time

import torch
from blake3 import blake3

from barnraise.ledger.anchor import compute_sketch
from barnraise.ledger.codec import encode
from barnraise.protocol.messages import BlobPart, FragmentUpdate, Ticket, Update, UpdatePush
from barnraise.protocol.signing import Identity, digest

RUN = "01890000-0000-7000-8000-000000000001"
STRANGER = Identity(bytes([9]) * 32)


def build_push(world, identity, under=None, sign_as="update", **changed):
    """Return a push of an identity's first update, of noise, under a ticket."""
    parts = [
        FragmentUpdate(digest=blake3(payload).hexdigest(), size=len(payload), sketch=sketch)
        for payload, sketch in noise_payloads(world)
    ]
    ticket = under or world.ticket(identity.key, volunteer=9)
    now_ms = int(1000 * time.time())
    fields = {
        "run": RUN,
        "peer": identity.key,
        "incarnation": "9" * 16,
        "seq": 1,
        "previous": digest(""),
        "tokens": 10,
        "total": changed.get("tokens", 10),
        "started_ms": now_ms - 1000,
        "time_ms": now_ms,
        "ticket": digest(ticket.body),
        "volunteer": Ticket.model_validate_json(ticket.body).volunteer,
        "fragments": parts,
    }
    return UpdatePush(header=identity.sign(sign_as, Update(**(fields | changed))), ticket=ticket)


def noise_payloads(world):
    """Return the payload and the sketch of each fragment of an update."""
    payloads = []
    for fragment in world.spec.model.fragments():
        values = torch.arange(fragment.size, dtype=torch.int32) % 127 - 50
        payload, sent = encode(values)
        payloads.append((payload, compute_sketch(sent)))
    return payloads


def describe_payload(data: bytes) -> BlobPart:
    """Return the message with which a whole payload is sent."""
    return BlobPart(digest=blake3(data).hexdigest(), offset=0, total=len(data))


def send_payloads(world, send):
    """Send the payloads of the updates that `build_push` builds."""
    for data, _ in noise_payloads(world):
        send(describe_payload(data), data)


def send_update(send, ledger, update, has_payloads=True):
    """Send an update of a ledger, or its header alone."""
    header = ledger.header(update.author, update.seq)
    ticket = ledger.tickets.get(update.ticket)
    send(UpdatePush(header=header, ticket=ticket, has_payloads=has_payloads))
    for part in update.payload_parts if has_payloads else ():
        data = ledger.blobs.read(part.digest)
        send(describe_payload(data), data)
