"""Test codes that machines show and people approve: decided once, in time, by one person."""

from datetime import timedelta

import pytest
from django.utils import timezone
from helpers.site.enrolment_requests import ABOUT, enrolment_request

from barnraise.protocol.signing import Identity
from coordinator.accounts import enrolment
from coordinator.accounts.models import Enrolment, Machine, UserError
from coordinator.audit.models import AuditEntry
from coordinator.telemetry.tasks import delete_expired_rows


def open_code(seed: int = 5, **changed) -> Enrolment:
    """Open an enrolment of the key of this seed; `changed` replaces fields of the request."""
    return Enrolment.open(enrolment_request(Identity(bytes([seed]) * 32), **changed))


def test_second_login_of_a_machine_updates_its_description(person):
    ada = person()
    first = open_code().approve(ada)
    stale = open_code()
    fresh = open_code(machine=ABOUT.model_copy(update={"cores": 16}))
    assert Enrolment.find(stale.code) is None
    assert fresh.approve(ada).pk == first.pk
    assert Machine.objects.get().cores == 16


def test_name_of_another_machine_of_the_person_gets_a_number(person):
    ada = person()
    names = [open_code(seed).approve(ada).name for seed in (5, 6, 7)]
    assert names == ["barn-pc", "barn-pc 2", "barn-pc 3"]
    assert open_code(8).approve(person("bob@example.org")).name == "barn-pc"
    again = open_code(6).approve(ada)
    assert again.name == "barn-pc 2", "it keeps its name when it enrols again"
    again.revoke()
    assert open_code(9).approve(ada).name == "barn-pc 2", "a revoked machine's name is free"
    long = ABOUT.model_copy(update={"hostname": "x" * 100})
    assert len({open_code(seed, machine=long).approve(ada).hostname for seed in (1, 2)}) == 2


def test_enrolment_of_a_foreign_or_revoked_key_is_refused(person):
    ada = person()
    bob = person("bob@example.org")
    machine = open_code().approve(ada)
    code = open_code()
    with pytest.raises(UserError, match="somebody else"):
        code.approve(bob)
    assert code.status == "pending" and Machine.objects.get().owner == ada
    machine.revoke()
    with pytest.raises(UserError, match="revoked"):
        code.approve(ada)


def test_tidying_deletes_only_long_expired_codes(db):
    def create_expired_code(seed: int, hours: float) -> Enrolment:
        code = open_code(seed)
        expired = timezone.now() - timedelta(hours=hours)
        Enrolment.objects.filter(pk=code.pk).update(expires=expired)
        return code

    old, recent = create_expired_code(1, 25), create_expired_code(2, 1)
    assert delete_expired_rows() == 1
    assert not Enrolment.find(old.code) and Enrolment.find(recent.code)


def test_code_is_found_as_people_type_it(db):
    code = open_code().code
    for typed in (code, code.lower(), code.replace("-", ""), f" {code[:2]} {code[2:]}\n"):
        assert Enrolment.find(typed).code == code
    for wrong in ("", code[:-1], code + "B", "\0", "AEIOU-01", "é" * 8, "B" * 100_000):
        assert Enrolment.find(wrong) is None


def test_new_code_replaces_the_keys_pending_one_and_no_other(db, person):
    decided, pending, foreign = open_code(), open_code(), open_code(6)
    assert Enrolment.find(decided.code) is None
    pending.refuse(person())
    fresh = open_code()
    codes = set(Enrolment.objects.values_list("code", flat=True))
    assert codes == {pending.code, foreign.code, fresh.code}


def test_code_in_use_is_drawn_again(db, monkeypatch):
    letters = iter("B" * 16 + "C" * 8)
    monkeypatch.setattr(enrolment.secrets, "choice", lambda alphabet: next(letters))
    assert [open_code(seed).code for seed in (5, 6)] == ["BBBB-BBBB", "CCCC-CCCC"]


@pytest.mark.parametrize(("decide", "status"), [("approve", "approved"), ("refuse", "refused")])
def test_code_is_decided_once(person, decide, status):
    ada = person()
    code = open_code()
    getattr(code, decide)(ada)
    assert (code.status, code.decided_by) == (status, ada)
    for again in (code.approve, code.refuse):
        with pytest.raises(UserError, match=f"this code is {status}; run `barnraise login`"):
            again(ada)
    assert Machine.objects.count() == (status == "approved")
    assert AuditEntry.objects.filter(action__startswith="machine.").count() == 1


def test_expired_code_is_neither_approved_nor_refused(person):
    code = open_code()
    assert 0 < code.seconds_left <= 60 * enrolment.CODE_MINUTES and code.status == "pending"
    Enrolment.objects.update(expires=timezone.now())
    code.refresh_from_db()
    assert (code.status, code.seconds_left) == ("expired", 0.0)
    ada = person()
    for decide in (code.approve, code.refuse):
        with pytest.raises(UserError, match="this code is expired"):
            decide(ada)
    assert not AuditEntry.objects.filter(action__startswith="machine.").exists()
    assert not Machine.objects.exists()
