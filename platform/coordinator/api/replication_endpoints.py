"""What mirrors ask each other, and the list that machines ask for. Mirrors sign their requests as machines do."""

from typing import Annotated

from django.http import HttpRequest
from ninja import Path, Query

from barnraise.errors import MessageError
from barnraise.protocol.messages import Signed
from barnraise.protocol.mirror_list import MirrorLists
from coordinator.api.authentication import ApiError, authenticate_mirror, enforce_rate_limit
from coordinator.api.ninja_api import api, responses
from coordinator.eventlog import truncate
from coordinator.eventlog.writer import read_events
from coordinator.lib import site_identity
from coordinator.replication import encryption, mirror_list, one_time_codes, pull, tasks
from coordinator.replication import protocol as between
from coordinator.telemetry.remote import export
from coordinator.telemetry.remote.protocol import SignedTelemetryPage, TelemetryRequest

ORIGIN = r"^[0-9a-f]{32}$"
Number = Annotated[int, Query(ge=0, lt=1 << 53)]


@api.get("/mirrors/list", response=responses(MirrorLists), tags=["Mirrors"])
def get_mirror_list(request: HttpRequest, after: Number = 0):
    """The newest mirror list, and what leads to it from the version that the asker holds."""
    enforce_rate_limit(request, "lists", 600, 60)
    return MirrorLists(lists=mirror_list.lists_since(after))


@api.get("/mirrors/heads", response=responses(Signed), auth=authenticate_mirror, tags=["Mirrors"])
def get_log_heads(request: HttpRequest):
    """How far this mirror has come in every log it holds, signed for the mirror that asks."""
    return site_identity.identity().sign("heads", pull.local_heads(request.auth))


@api.get(
    "/mirrors/logs/{origin}",
    response=responses(between.LogPart),
    auth=authenticate_mirror,
    tags=["Mirrors"],
)
def get_log(
    request: HttpRequest,
    origin: Annotated[str, Path(pattern=ORIGIN)],
    after: Number = 0,
    most: Annotated[int, Query(ge=1, le=between.PAGE_EVENTS)] = between.PAGE_EVENTS,
):
    """A log's events from number `after` + 1 on, of whatever mirror it is."""
    page, size = [], 0
    found = read_events(origin, after, most)
    for event in found:
        size += len(event.body.encode())
        if page and size > between.PAGE_BYTES:
            break
        page.append(event)
    return between.LogPart(events=page, more=len(page) < len(found) or len(found) == most)


@api.get(
    "/mirrors/fork-evidence",
    response=responses(between.ForkEvidenceList),
    auth=authenticate_mirror,
    tags=["Mirrors"],
)
def get_fork_proofs(request: HttpRequest):
    """Of each log that signed two events with one number, both."""
    pairs = truncate.list_fork_proofs()[-100:]
    return between.ForkEvidenceList(
        proofs=[between.ForkEvidence(first=first, second=second) for first, second in pairs]
    )


@api.post(
    "/mirrors/private-data",
    response=responses(between.EncryptedPrivateData),
    auth=authenticate_mirror,
    tags=["Mirrors"],
)
def post_private_data_request(request: HttpRequest, wants: between.PrivateDataRequest):
    """Personal data that events name by digest, sealed to a key that goes with the request."""
    try:
        return encryption.encrypt_private_data(wants)
    except MessageError as error:
        raise ApiError(422, str(error), {"key": str(error)}) from None


@api.post(
    "/mirrors/news",
    response=responses(SignedTelemetryPage),
    auth=authenticate_mirror,
    tags=["Mirrors"],
)
def post_telemetry_request(request: HttpRequest, wanted: TelemetryRequest):
    """What changed past a place of the machines that report to this mirror; signed for the mirror that asks."""
    return export.build_signed_page(wanted, request.auth)


@api.post(
    "/mirrors/change-notice",
    response=responses(between.Acknowledgement),
    auth=authenticate_mirror,
    tags=["Mirrors"],
)
def post_nudge(request: HttpRequest, said: between.ChangeNotice):
    """The mirror that signed this has something new."""
    enforce_rate_limit(request, "nudges", 600, 60)
    tasks.schedule_pull(request.auth)
    return between.Acknowledgement()


@api.post(
    "/mirrors/used-codes",
    response=responses(between.Acknowledgement),
    auth=authenticate_mirror,
    tags=["Mirrors"],
)
def post_used_codes(request: HttpRequest, said: between.UsedCodes):
    """What works once was used at the mirror that signed this."""
    enforce_rate_limit(request, "spent", 6000, 60)
    for mark in said.marks:
        one_time_codes.mark_used(mark)
    return between.Acknowledgement()
