"""One account at every mirror: addresses and second factors travel, none is passed by, and codes work once."""

import time
from base64 import urlsafe_b64encode

import pytest
from allauth.account.models import EmailAddress
from allauth.mfa.models import Authenticator
from allauth.mfa.recovery_codes.internal.auth import RecoveryCodes
from allauth.mfa.totp.internal.auth import TOTP, format_hotp_value, generate_totp_secret, hotp_value
from allauth.mfa.webauthn.internal.auth import WebAuthn
from cryptography.hazmat.primitives.asymmetric import ec
from django.core.cache import cache
from django.test import Client
from fido2.cose import ES256
from fido2.webauthn import AttestationObject, AttestedCredentialData, AuthenticatorData
from helpers.mirror_lists import list_entry, signed_list
from helpers.rebuild_site import all_events, all_private_data, empty_tables, rebuild_in_random_order

from barnraise.protocol.signing import Identity
from coordinator.accounts import credential_sync, mfa_forms
from coordinator.accounts.deletion import delete_account
from coordinator.accounts.models import User
from coordinator.eventlog import ingest, private_data, projection
from coordinator.eventlog.models import Aggregate, LogEvent, PrivateData
from coordinator.eventlog.writer import log_transaction, record, record_existing_rows
from coordinator.lib import site_identity
from coordinator.replication import mirror_list, one_time_codes

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("valkey")]
PASSWORD = "wooden-barn-9"
LOGIN = {"login": "ada@example.org", "password": PASSWORD}


@pytest.fixture
def ada(person):
    made = person(name="Ada")
    EmailAddress.objects.create(user=made, email=made.email, verified=True, primary=True)
    return made


@pytest.fixture
def secret(ada) -> str:
    """Return a code of Ada's authenticator app."""
    made = generate_totp_secret()
    TOTP.activate(ada, made)
    RecoveryCodes.activate(ada)
    return made


def code(secret: str, ahead: int = 0) -> str:
    return format_hotp_value(hotp_value(secret, int(time.time()) // 30 + ahead))


def sign_in(code: str = "") -> tuple[Client, object]:
    """With the password, and then the code where one is given; the last answer."""
    client = Client()
    answer = client.post("/accounts/login/", LOGIN)
    return client, client.post("/accounts/2fa/authenticate/", {"code": code}) if code else answer


def is_in(client: Client) -> bool:
    return "_auth_user_id" in client.session


def elsewhere(*, without: str = "") -> list[private_data.PrivateRecord]:
    """This site becomes another one, which has all that the log says, and of particulars those without that word in
    them. Returns the rest."""
    events, kept = all_events(), all_private_data()
    late = [each for each in kept if without and without in each.body]
    cache.clear()
    rebuild_in_random_order(events, [each for each in kept if each not in late])
    return late


def test_the_same_account_and_second_factor_open_another_mirror(ada, secret):
    codes = RecoveryCodes(Authenticator.objects.get(type="recovery_codes")).generate_codes()
    elsewhere()
    client, answer = sign_in()
    assert answer["Location"].startswith("/accounts/2fa/authenticate/") and not is_in(client)
    assert not is_in(sign_in("000000")[0])
    assert is_in(sign_in(code(secret))[0])
    assert is_in(sign_in(codes[0])[0])


def test_a_recovery_code_that_was_used_at_one_mirror_is_used_at_all(ada, secret):
    codes = RecoveryCodes(Authenticator.objects.get(type="recovery_codes")).generate_codes()
    assert is_in(sign_in(codes[3])[0])
    elsewhere()
    client, answer = sign_in(codes[3])
    assert not is_in(client) and b"Incorrect code" in answer.content
    assert is_in(sign_in(codes[4])[0])


def test_a_code_of_an_app_works_once_for_as_long_as_it_works(ada, secret):
    now = code(secret)
    assert is_in(sign_in(now)[0])
    cache.delete(
        f"allauth.mfa.totp.used?user={ada.pk}&code={now}"
    )  # half a minute later allauth forgets it
    client, answer = sign_in(now)
    assert not is_in(client) and b"used already" in answer.content
    assert is_in(sign_in(code(secret, 1))[0])


def test_a_code_of_an_app_that_was_used_at_another_mirror_is_used_here(ada, secret):
    row = Authenticator.objects.get(type="totp")
    there = Identity(b"m" * 32)
    ours = list_entry(site_identity.identity(), "https://here.example.org")
    first = signed_list(1, ours, list_entry(there, "https://there.example.org"))
    mirror_list.ingest_lists([first], vouched=first.digest)
    body = f'{{"marks":["{mfa_forms.code_fingerprint(row, code(secret))}"]}}'.encode()
    path = "/api/v1/mirrors/used-codes"
    token = there.sign_request(site_identity.identity().key, "POST", path, body, time.time())
    told = {"content_type": "application/json", "headers": {"Authorization": f"Barnraise {token}"}}
    assert Client().post(path, body, **told).status_code == 200
    assert not is_in(sign_in(code(secret))[0])
    assert is_in(sign_in(code(secret, 1))[0])
    assert not one_time_codes.mark_used(mfa_forms.code_fingerprint(row, code(secret, 1))), (
        "others would hear of this one"
    )


def test_nobody_is_let_in_where_their_second_factor_has_not_come(ada, secret):
    late = elsewhere(without=secret)
    assert late
    client, answer = sign_in()
    assert (
        answer.status_code == 503
        and b"second factor has not been copied" in answer.content
        and not is_in(client)
    )
    private_data.ingest(late)
    assert sign_in()[1]["Location"].startswith("/accounts/2fa/authenticate/")
    assert is_in(sign_in(code(secret))[0])


def test_sign_in_waits_until_the_addresses_have_been_replicated(ada):
    late = elsewhere(without='"verified"')
    client, answer = sign_in()
    assert (
        answer.status_code == 503
        and b"addresses have not been copied" in answer.content
        and not is_in(client)
    )
    assert not EmailAddress.objects.exists(), "none is made up meanwhile"
    private_data.ingest(late)
    assert is_in(sign_in()[0])


def test_a_second_factor_that_was_removed_at_one_mirror_is_removed_at_all(ada, secret):
    before = all_events(), all_private_data()
    Authenticator.objects.filter(user=ada).delete()
    after = all_events()
    rebuild_in_random_order(*before)
    assert sign_in()[1]["Location"].startswith("/accounts/2fa/")
    ingest.ingest_events(after)
    assert not Authenticator.objects.exists() and is_in(sign_in()[0])
    assert not PrivateData.objects.filter(body__contains=secret).exists()


def test_an_app_in_the_place_of_another_counts_alone(ada, secret):
    before = all_events(), all_private_data()
    Authenticator.objects.filter(type="totp").delete()
    fresh = generate_totp_secret()
    TOTP.activate(ada, fresh)
    after, kept = all_events(), all_private_data()
    cache.clear()
    rebuild_in_random_order(*before)
    ingest.ingest_events(after)
    assert sign_in()[1].status_code == 503, "the old one no more, and the new one not yet"
    private_data.ingest(kept)
    assert not is_in(sign_in(code(secret))[0]) and is_in(sign_in(code(fresh))[0])


def test_addresses_and_their_verification_are_the_last_word(ada):
    before = all_events(), all_private_data()
    second = EmailAddress.objects.create(user=ada, email="countess@example.org")
    second.set_verified()
    second.set_as_primary()
    after, kept = all_events(), all_private_data()
    rebuild_in_random_order(*before)
    ingest.ingest_events(after)
    private_data.ingest(kept)
    rows = EmailAddress.objects.order_by("email").values_list("email", "verified", "primary")
    assert list(rows) == [("ada@example.org", True, False), ("countess@example.org", True, True)]
    assert User.objects.get(pk=ada.pk).email == "countess@example.org"


def test_a_site_that_is_older_than_this_tells_what_it_holds(ada, secret):
    known = projection.current_state(f"access:{ada.pk}")
    LogEvent.objects.all().delete()
    Aggregate.objects.all().delete()
    PrivateData.objects.all().delete()
    for row in Authenticator.objects.all():
        Authenticator.objects.filter(pk=row.pk).update(
            data={k: v for k, v in row.data.items() if k != "id"}
        )
    record_existing_rows()
    told = projection.current_state(f"access:{ada.pk}")
    assert sorted(kind for kind, _ in told["factors"].values()) == sorted(
        kind for kind, _ in known["factors"].values()
    )
    assert (
        is_in(sign_in(code(secret))[0]) and projection.current_state(f"access:{ada.pk}") == told
    ), "and nothing of it twice"


def test_no_secret_is_in_any_event_and_nothing_stays_of_who_leaves(ada, secret):
    seed = Authenticator.objects.get(type="recovery_codes").data["seed"]
    kept = "".join(PrivateData.objects.values_list("body", flat=True))
    assert secret in kept and seed in kept
    said = "".join(
        [
            *LogEvent.objects.values_list("body", flat=True),
            *Aggregate.objects.values_list("state", flat=True),
        ]
    )
    assert secret not in said and seed not in said and "ada@" not in said
    before = all_events(), all_private_data()
    delete_account(ada, ada)
    after = all_events()
    for _ in ("here", "elsewhere"):
        assert not Authenticator.objects.exists() and not EmailAddress.objects.exists()
        assert (
            not PrivateData.objects.exists()
            and projection.current_state(f"access:{ada.pk}") is None
        )
        empty_tables()
        rebuild_in_random_order(*before)
        ingest.ingest_events(after)


def test_invalid_second_factor_is_not_replicated(ada):
    with log_transaction():
        for kind, odd in (
            ("totp", {"secret": "A"}),
            ("webauthn", {"name": "x", "credential": {"response": {}}}),
        ):
            about = private_data.store(f"access:{ada.pk}", {"created": 1.0, **odd})
            factor = f"00000000-0000-7000-8000-00000000000{len(kind)}"
            record("access.add", ada.pk, {"factor": factor, "type": kind, "about": about})
    elsewhere()
    assert not Authenticator.objects.exists()
    assert sign_in()[1].status_code == 503


def test_who_has_only_a_passkey_is_told_where_it_works(ada, known_passkey):
    RecoveryCodes.activate(ada)
    (unused, *_) = RecoveryCodes(Authenticator.objects.get(type="recovery_codes")).generate_codes()
    elsewhere()
    client, _ = sign_in()
    page = client.get("/accounts/2fa/authenticate/").content.decode()
    assert "added at a.example.org" in page and "Use a security key" not in page
    assert client.post(
        "/accounts/2fa/authenticate/", {"code": unused}
    ).status_code == 302 and is_in(client)
    client, _ = sign_in()
    page = client.get("/accounts/2fa/authenticate/", headers={"host": "a.example.org"})
    assert page.status_code == 400 or "Use a security key" in page.content.decode()


@pytest.fixture
def known_passkey(ada) -> Authenticator:
    """As a browser makes one at a.example.org: a P-256 key, attested by nobody."""
    public = ES256.from_cryptography_key(ec.generate_private_key(ec.SECP256R1()).public_key())
    held = AttestedCredentialData.create(b"\0" * 16, b"credential", public)
    flags = AuthenticatorData.FLAG.UP | AuthenticatorData.FLAG.UV | AuthenticatorData.FLAG.AT
    data = AuthenticatorData.create(b"\1" * 32, flags, 0, held)

    def text(raw: bytes) -> str:
        return urlsafe_b64encode(raw).decode().rstrip("=")

    said = b'{"type":"webauthn.create","challenge":"eA","origin":"https://a.example.org","crossOrigin":false}'
    credential = {
        "id": text(b"credential"), "rawId": text(b"credential"), "type": "public-key", "clientExtensionResults": {},
        "response": {
            "clientDataJSON": text(said),
            "attestationObject": text(bytes(AttestationObject.create("none", data, {}))),
        },
    }  # fmt: skip
    return WebAuthn.add(ada, "This laptop", credential).instance


def test_a_passkey_and_its_name_are_the_same_elsewhere(ada, known_passkey):
    passkey = known_passkey.wrap()
    passkey.name = "The old laptop"
    known_passkey.save()
    elsewhere()
    (row,) = Authenticator.objects.filter(type="webauthn")
    assert row.wrap().name == "The old laptop" and mfa_forms.passkey_host(row) == "a.example.org"
    assert row.wrap().authenticator_data.credential_data.credential_id == b"credential"
    assert credential_sync.missing_credentials(ada) == ""
