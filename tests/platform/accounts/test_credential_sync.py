"""Test that sign-in works alike at every mirror: replicated factors, one-time codes."""

import json
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
from helpers.mirrors.mirror_lists import list_entry, signed_list
from helpers.mirrors.rebuild_site import (
    all_events,
    all_private_data,
    empty_tables,
    rebuild_in_random_order,
)

from barnraise.protocol.signing import Identity
from coordinator.accounts import credential_sync, mfa_forms
from coordinator.accounts.deletion import delete_account
from coordinator.accounts.models import User
from coordinator.eventlog import ingest, private_data, projection
from coordinator.eventlog.models import Aggregate, LogEvent, PrivateData
from coordinator.eventlog.writer import record_existing_rows
from coordinator.lib import site_identity
from coordinator.replication import mirror_list, one_time_codes

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("valkey")]
PASSWORD = "wooden-barn-9"
LOGIN = {"login": "ada@example.org", "password": PASSWORD}


@pytest.fixture
def ada(person):
    user = person(name="Ada")
    EmailAddress.objects.create(user=user, email=user.email, verified=True, primary=True)
    return user


@pytest.fixture
def secret(ada) -> str:
    """Activate an authenticator app and recovery codes for Ada; return the app's secret."""
    totp_secret = generate_totp_secret()
    TOTP.activate(ada, totp_secret)
    RecoveryCodes.activate(ada)
    return totp_secret


def totp_code(secret: str, ahead: int = 0) -> str:
    """Return the authenticator app's code, `ahead` periods of 30 seconds from now."""
    return format_hotp_value(hotp_value(secret, int(time.time()) // 30 + ahead))


def sign_in(code: str = "") -> tuple[Client, object]:
    """Sign in with the password, and with the code if one is given.

    Returns:
        The client and the last response.
    """
    client = Client()
    answer = client.post("/accounts/login/", LOGIN)
    return client, client.post("/accounts/2fa/authenticate/", {"code": code}) if code else answer


def is_signed_in(client: Client) -> bool:
    """Return whether the client has a session of a person."""
    return "_auth_user_id" in client.session


def move_to_another_mirror(*, without: str = "") -> list[private_data.PrivateRecord]:
    """Rebuild the site from its log, as another mirror would.

    Args:
        without: Private data that contains this text does not arrive; "" if all arrives.

    Returns:
        The private data that did not arrive.
    """
    events = all_events()
    records = all_private_data()
    missing = [record for record in records if without and without in record.body]
    cache.clear()
    rebuild_in_random_order(events, [record for record in records if record not in missing])
    return missing


def test_account_and_second_factor_work_at_another_mirror(ada, secret):
    codes = RecoveryCodes(Authenticator.objects.get(type="recovery_codes")).generate_codes()
    move_to_another_mirror()
    client, answer = sign_in()
    assert answer["Location"].startswith("/accounts/2fa/authenticate/") and not is_signed_in(client)
    assert not is_signed_in(sign_in("000000")[0])
    assert is_signed_in(sign_in(totp_code(secret))[0])
    assert is_signed_in(sign_in(codes[0])[0])


def test_recovery_code_used_at_one_mirror_is_refused_at_another(ada, secret):
    codes = RecoveryCodes(Authenticator.objects.get(type="recovery_codes")).generate_codes()
    assert is_signed_in(sign_in(codes[3])[0])
    move_to_another_mirror()
    client, answer = sign_in(codes[3])
    assert not is_signed_in(client) and b"Incorrect code" in answer.content
    assert is_signed_in(sign_in(codes[4])[0])


def test_authenticator_code_is_accepted_once_while_it_is_valid(ada, secret):
    current_code = totp_code(secret)
    assert is_signed_in(sign_in(current_code)[0])
    # After half a minute allauth no longer remembers that the code was used.
    cache.delete(f"allauth.mfa.totp.used?user={ada.pk}&code={current_code}")
    client, answer = sign_in(current_code)
    assert not is_signed_in(client) and b"used already" in answer.content
    assert is_signed_in(sign_in(totp_code(secret, 1))[0])


def test_authenticator_code_used_at_another_mirror_is_refused_here(ada, secret):
    authenticator = Authenticator.objects.get(type="totp")
    other_mirror = Identity(b"m" * 32)
    own_entry = list_entry(site_identity.identity(), "https://here.example.org")
    signed = signed_list(1, own_entry, list_entry(other_mirror, "https://there.example.org"))
    mirror_list.ingest_lists([signed], vouched=signed.digest)
    # A code is of one half minute: each is computed once, as the test may last until the next.
    used_code, next_code = totp_code(secret), totp_code(secret, 1)
    fingerprint = mfa_forms.code_fingerprint(authenticator, used_code)
    body = f'{{"marks":["{fingerprint}"]}}'.encode()
    path = "/api/v1/mirrors/used-codes"
    token = other_mirror.sign_request(site_identity.identity().key, "POST", path, body, time.time())
    request = {
        "content_type": "application/json",
        "headers": {"Authorization": f"Barnraise {token}"},
    }
    assert Client().post(path, body, **request).status_code == 200
    assert not is_signed_in(sign_in(used_code)[0])
    assert is_signed_in(sign_in(next_code)[0])
    assert not one_time_codes.mark_used(mfa_forms.code_fingerprint(authenticator, next_code)), (
        "the code was not recorded as used"
    )


def test_sign_in_waits_until_the_second_factor_is_replicated(ada, secret):
    missing_records = move_to_another_mirror(without=secret)
    assert missing_records
    client, answer = sign_in()
    assert answer.status_code == 503
    assert b"second factor has not been copied" in answer.content
    assert not is_signed_in(client)
    private_data.ingest(missing_records)
    assert sign_in()[1]["Location"].startswith("/accounts/2fa/authenticate/")
    assert is_signed_in(sign_in(totp_code(secret))[0])


def test_sign_in_waits_until_the_addresses_have_been_replicated(ada):
    missing_records = move_to_another_mirror(without='"verified"')
    client, answer = sign_in()
    assert answer.status_code == 503
    assert b"addresses have not been copied" in answer.content
    assert not is_signed_in(client)
    assert not EmailAddress.objects.exists(), "an address was invented"
    private_data.ingest(missing_records)
    assert is_signed_in(sign_in()[0])


def test_second_factor_removed_at_one_mirror_is_removed_at_all(ada, secret):
    before = all_events(), all_private_data()
    Authenticator.objects.filter(user=ada).delete()
    after = all_events()
    rebuild_in_random_order(*before)
    assert sign_in()[1]["Location"].startswith("/accounts/2fa/")
    ingest.ingest_events(after)
    assert not Authenticator.objects.exists() and is_signed_in(sign_in()[0])
    assert not PrivateData.objects.filter(body__contains=secret).exists()


def test_replaced_authenticator_app_is_the_only_one_accepted(ada, secret):
    before = all_events(), all_private_data()
    Authenticator.objects.filter(type="totp").delete()
    new_secret = generate_totp_secret()
    TOTP.activate(ada, new_secret)
    later_events = all_events()
    later_records = all_private_data()
    cache.clear()
    rebuild_in_random_order(*before)
    ingest.ingest_events(later_events)
    assert sign_in()[1].status_code == 503, "a factor was accepted before the new one arrived"
    private_data.ingest(later_records)
    assert not is_signed_in(sign_in(totp_code(secret))[0])
    assert is_signed_in(sign_in(totp_code(new_secret))[0])


def test_latest_addresses_and_verification_are_replicated(ada):
    before = all_events(), all_private_data()
    second = EmailAddress.objects.create(user=ada, email="countess@example.org")
    second.set_verified()
    second.set_as_primary()
    later_events = all_events()
    later_records = all_private_data()
    rebuild_in_random_order(*before)
    ingest.ingest_events(later_events)
    private_data.ingest(later_records)
    rows = EmailAddress.objects.order_by("email").values_list("email", "verified", "primary")
    assert list(rows) == [("ada@example.org", True, False), ("countess@example.org", True, True)]
    assert User.objects.get(pk=ada.pk).email == "countess@example.org"


def test_site_older_than_its_log_records_existing_factors(ada, secret):
    state_before = projection.current_state(f"access:{ada.pk}")
    LogEvent.objects.all().delete()
    Aggregate.objects.all().delete()
    PrivateData.objects.all().delete()
    for row in Authenticator.objects.all():
        Authenticator.objects.filter(pk=row.pk).update(
            data={k: v for k, v in row.data.items() if k != "id"}
        )
    record_existing_rows()
    state_after = projection.current_state(f"access:{ada.pk}")
    own_key = site_identity.identity().key
    factors_before, factors_after = (
        state["mirrors"][own_key]["factors"] for state in (state_before, state_after)
    )
    assert sorted(kind for kind, _ in factors_after.values()) == sorted(
        kind for kind, _ in factors_before.values()
    )
    assert is_signed_in(sign_in(totp_code(secret))[0])
    assert projection.current_state(f"access:{ada.pk}") == state_after, (
        "factors were recorded twice"
    )


def test_events_hold_no_secret_and_deletion_erases_factors(ada, secret):
    seed = Authenticator.objects.get(type="recovery_codes").data["seed"]
    private_bodies = "".join(PrivateData.objects.values_list("body", flat=True))
    assert secret in private_bodies and seed in private_bodies
    event_texts = "".join(
        [
            *LogEvent.objects.values_list("body", flat=True),
            *Aggregate.objects.values_list("state", flat=True),
        ]
    )
    assert secret not in event_texts and seed not in event_texts and "ada@" not in event_texts
    before = all_events(), all_private_data()
    delete_account(ada, ada)
    after = all_events()
    for _ in ("here", "elsewhere"):
        assert not Authenticator.objects.exists() and not EmailAddress.objects.exists()
        assert not PrivateData.objects.exists()
        assert projection.current_state(f"access:{ada.pk}") is None
        empty_tables()
        rebuild_in_random_order(*before)
        ingest.ingest_events(after)


def test_passkey_of_another_host_shows_where_it_works(ada, registered_passkey):
    RecoveryCodes.activate(ada)
    (unused, *_) = RecoveryCodes(Authenticator.objects.get(type="recovery_codes")).generate_codes()
    move_to_another_mirror()
    client, _ = sign_in()
    page = client.get("/accounts/2fa/authenticate/").content.decode()
    assert "added at a.example.org" in page and "Use a security key" not in page
    answer = client.post("/accounts/2fa/authenticate/", {"code": unused})
    assert answer.status_code == 302 and is_signed_in(client)
    client, _ = sign_in()
    page = client.get("/accounts/2fa/authenticate/", headers={"host": "a.example.org"})
    assert page.status_code == 400 or "Use a security key" in page.content.decode()


@pytest.fixture
def registered_passkey(ada) -> Authenticator:
    """Register a passkey as a browser at a.example.org does: a P-256 key without attestation."""
    public_key = ES256.from_cryptography_key(ec.generate_private_key(ec.SECP256R1()).public_key())
    credential_data = AttestedCredentialData.create(b"\0" * 16, b"credential", public_key)
    flags = AuthenticatorData.FLAG.UP | AuthenticatorData.FLAG.UV | AuthenticatorData.FLAG.AT
    data = AuthenticatorData.create(b"\1" * 32, flags, 0, credential_data)

    def to_base64url(raw: bytes) -> str:
        return urlsafe_b64encode(raw).decode().rstrip("=")

    client_data = {
        "type": "webauthn.create",
        "challenge": "eA",
        "origin": "https://a.example.org",
        "crossOrigin": False,
    }
    credential = {
        "id": to_base64url(b"credential"),
        "rawId": to_base64url(b"credential"),
        "type": "public-key",
        "clientExtensionResults": {},
        "response": {
            "clientDataJSON": to_base64url(json.dumps(client_data).encode()),
            "attestationObject": to_base64url(bytes(AttestationObject.create("none", data, {}))),
        },
    }
    return WebAuthn.add(ada, "This laptop", credential).instance


def test_passkey_and_its_name_are_replicated(ada, registered_passkey):
    passkey = registered_passkey.wrap()
    passkey.name = "The old laptop"
    registered_passkey.save()
    move_to_another_mirror()
    (authenticator,) = Authenticator.objects.filter(type="webauthn")
    assert authenticator.wrap().name == "The old laptop"
    assert mfa_forms.passkey_host(authenticator) == "a.example.org"
    assert authenticator.wrap().authenticator_data.credential_data.credential_id == b"credential"
    assert credential_sync.missing_credentials(ada) == ""
