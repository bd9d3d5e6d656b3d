"""A person deletes their account: what is personal goes, what others rely on stays without a name.

Others' charts, ledgers and credit rest on what this person's machines did, and a run they launched may be training: the
rows that hold those together stay, empty of who it was. Each app that holds something personal listens to `leaving`,
within the transaction."""

from allauth.account.models import EmailAddress
from allauth.mfa.models import Authenticator
from allauth.usersessions.models import UserSession
from django.db import transaction
from django.dispatch import Signal
from django.utils import timezone

from coordinator.accounts.models import Enrolment, Invitation, User
from coordinator.audit.log import forget, record
from coordinator.refusals import Refused

leaving = Signal()  # person: receivers delete or blank what they hold of them; what they raise undoes it all
NOTHING = {"hostname": "", "system": "", "processor": "", "cores": 0, "memory_bytes": 0, "accelerator": ""}


def leave(person: User, actor: User) -> None:
    """For good. Runs under way pass into the staff's hands; machines are revoked, and their peers hear of that. Raises
    Refused."""
    if person.left:
        return
    if actor != person and person.is_staff and not actor.is_superuser:
        raise Refused("only a superuser deletes the account of somebody of the staff")
    with transaction.atomic():
        addresses = [person.email, *EmailAddress.objects.filter(user=person).values_list("email", flat=True)]
        for team in list(person.teams.all()):
            team.part(person, actor)
        machines = list(person.machines.all())
        for machine in machines:
            machine.revoke(actor=actor, reason="its owner left")
        leaving.send(User, person=person)
        for session in UserSession.objects.filter(user=person):
            session.end()
        for kind in (EmailAddress, Authenticator):
            kind.objects.filter(user=person).delete()
        for address in addresses:
            Invitation.objects.filter(email__iexact=address).delete()
        Invitation.objects.filter(by=person).delete()
        Enrolment.objects.filter(decided_by=person).delete()
        Enrolment.objects.filter(key__in=[machine.key for machine in machines]).delete()
        person.machines.update(**NOTHING)
        forget(person, *machines)
        person.user_permissions.clear()
        person.set_unusable_password()
        User.objects.filter(pk=person.pk).update(
            email=f"{person.pk.hex}@left.invalid", name="", password=person.password, ban_reason="", last_login=None,
            is_active=False, is_staff=False, is_superuser=False, organiser=False, left=timezone.now(),
        )  # fmt: skip
        person.refresh_from_db()
        record("user.leave", person, actor=actor)
