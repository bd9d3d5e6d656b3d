"""A person deletes their account: what is personal goes, what others rely on stays without a name.

Others' charts, ledgers and credit rest on what this person's machines did, and a run they launched may be training: the
rows that hold those together stay, empty of who it was. Each app that holds something personal receives `account_deleted`,
within the transaction."""

from datetime import datetime
from uuid import UUID

from allauth.account.models import EmailAddress
from allauth.mfa.models import Authenticator
from allauth.usersessions.models import UserSession
from django.utils import timezone

from coordinator.accounts.credential_sync import recording_suspended
from coordinator.accounts.machines import BLANK_DESCRIPTION
from coordinator.accounts.models import Enrolment, TeamInvitation, User
from coordinator.accounts.signals import account_deleted
from coordinator.audit.log import anonymise, record
from coordinator.eventlog import writer as mirrors
from coordinator.lib.exceptions import UserError


def delete_account(person: User, actor: User) -> None:
    """For good. Runs under way pass into the staff's hands; machines are revoked, and their peers hear of that. Raises
    UserError."""
    if person.left:
        return
    if actor != person and person.is_staff and not actor.is_superuser:
        raise UserError("only a superuser deletes the account of somebody of the staff")
    with mirrors.log_transaction():
        for team in list(person.teams.all()):
            team.remove_member(person, actor)
        for machine in list(person.machines.all()):
            machine.revoke(actor=actor, reason="its owner left")
            mirrors.record("machine.about", machine.key, {"about": None})
        now = timezone.now()
        erase_personal_data(person, now)
        mirrors.record("access.forget", person.pk, {})
        mirrors.record("person.leave", person.pk, {"at": now})
        record("user.leave", person, actor=actor)


def erase_personal_data(person: User, left: datetime) -> None:
    """What is personal goes, here; also when they left at another mirror. Within `writer.log_transaction`."""
    addresses = [
        person.email,
        *EmailAddress.objects.filter(user=person).values_list("email", flat=True),
    ]
    machines = list(person.machines.all())
    account_deleted.send(User, person=person)
    for session in UserSession.objects.filter(user=person):
        session.end()
    with recording_suspended():
        for kind in (EmailAddress, Authenticator):
            kind.objects.filter(user=person).delete()
    for each in addresses:
        TeamInvitation.objects.filter(email__iexact=each).delete()
    TeamInvitation.objects.filter(by=person).delete()
    Enrolment.objects.filter(decided_by=person).delete()
    Enrolment.objects.filter(key__in=[machine.key for machine in machines]).delete()
    person.machines.update(**BLANK_DESCRIPTION)
    anonymise(person, *machines)
    person.user_permissions.clear()
    person.set_unusable_password()
    User.objects.filter(pk=person.pk).update(
        email=placeholder_address(person.pk), name="", password=person.password, ban_reason="", last_login=None,
        is_active=False, is_staff=False, is_superuser=False, organiser=False, left=left,
    )  # fmt: skip
    person.refresh_from_db()


def placeholder_address(person: UUID) -> str:
    """What stands where an address was."""
    return f"{person.hex}@left.invalid"
