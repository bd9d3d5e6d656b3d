"""Delete an account: personal data is deleted, and what others rely on stays without a name.

Others' charts, ledgers and credit depend on what this person's machines did, and a run they
launched may be training. Those rows stay, without the person's data. Each app with personal data
receives the signal `account_deleted` within the transaction.
"""

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
from coordinator.eventlog import writer
from coordinator.lib.exceptions import UserError


def delete_account(person: User, actor: User) -> None:
    """Delete a person's account permanently.

    The staff take over active runs. Machines are revoked, and their peers are informed.

    Raises:
        UserError: the actor may not delete this account.
    """
    if person.left:
        return
    if actor != person and person.is_staff and not actor.is_superuser:
        raise UserError("only a superuser deletes the account of somebody of the staff")
    with writer.log_transaction():
        for team in list(person.teams.all()):
            team.remove_member(person, actor)
        for machine in list(person.machines.all()):
            machine.revoke(actor=actor, reason="its owner left")
            writer.record("machine.describe", machine.key, {"content_digest": None})
        now = timezone.now()
        erase_personal_data(person, now)
        writer.record("access.delete", person.pk, {})
        writer.record("person.leave", person.pk, {"at": now})
        record("user.leave", person, actor=actor)


def erase_personal_data(person: User, left: datetime) -> None:
    """Delete personal data from this site, within `log_transaction`.

    It runs also when the person deleted the account at another mirror.
    """
    addresses = [
        person.email,
        *EmailAddress.objects.filter(user=person).values_list("email", flat=True),
    ]
    machines = list(person.machines.all())
    account_deleted.send(User, person=person)
    for session in UserSession.objects.filter(user=person):
        session.end()
    with recording_suspended():
        for model in (EmailAddress, Authenticator):
            model.objects.filter(user=person).delete()
    for address in addresses:
        TeamInvitation.objects.filter(email__iexact=address).delete()
    TeamInvitation.objects.filter(by=person).delete()
    Enrolment.objects.filter(decided_by=person).delete()
    Enrolment.objects.filter(key__in=[machine.key for machine in machines]).delete()
    person.machines.update(**BLANK_DESCRIPTION)
    anonymise(person, *machines)
    person.user_permissions.clear()
    person.set_unusable_password()
    User.objects.filter(pk=person.pk).update(
        email=placeholder_address(person.pk),
        name="",
        password=person.password,
        ban_reason="",
        last_login=None,
        is_active=False,
        is_staff=False,
        is_superuser=False,
        organiser=False,
        left=left,
    )
    person.refresh_from_db()


def placeholder_address(person: UUID) -> str:
    """Return what replaces a deleted address."""
    return f"{person.hex}@left.invalid"
