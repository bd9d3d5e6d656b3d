"""Read what the site answers to a machine."""

from barnraise.protocol.coordinator_messages import Directive, ReportReply
from barnraise.protocol.signing import open_signed
from coordinator.lib import site_identity


def read_reply(answer) -> ReportReply:
    """Return the content of a response to reports."""
    assert answer.status_code == 200, answer.content
    return ReportReply.model_validate_json(answer.content)


def read_directive(reply) -> Directive:
    """Return the directive of a reply, which this site signed."""
    key = site_identity.identity().key
    return open_signed(reply.directive, "directive", Directive, key=key)
