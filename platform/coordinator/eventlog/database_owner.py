"""Compare this host's keys with those that the database belongs to.

Several hosts may serve one site. Each reads the site's key and Django's secret from a state folder
or the environment; a host with others would sign people out and end the log of the first one.
"""

from blake3 import blake3
from django.conf import settings
from django.db import DatabaseError, connection

from coordinator.eventlog import writer
from coordinator.eventlog.models import LogState, Origin
from coordinator.lib import site_identity
from coordinator.lib.exceptions import OtherSiteError


def find_owner_key() -> str | None:
    """Return the public key of the mirror that this database belongs to; None before its first."""
    if Origin._meta.db_table not in connection.introspection.table_names():
        return None
    return Origin.objects.filter(ours=True).values_list("key", flat=True).first()


def check_database_owner() -> None:
    """Check that this host has the keys of this database; store the secret's fingerprint first.

    Raises:
        OtherSiteError: It has others.
        DatabaseError: The database does not answer, or has no tables yet.
    """
    owner = find_owner_key()
    if owner:
        site_identity.check_key(owner)
    fingerprint = _fingerprint_secret()
    stored = LogState.objects.values_list("secret_fingerprint", flat=True).first()
    if stored == "":
        LogState.objects.filter(secret_fingerprint="").update(secret_fingerprint=fingerprint)
    elif stored not in (None, fingerprint):
        raise OtherSiteError(
            "this database belongs to a site with another SECRET_KEY: people would be signed out. "
            "Copy secret_key of the first host's state folder, or set SECRET_KEY as it does. "
            f"{site_identity.DELIBERATE_CHANGE}"
        )


def change_owner() -> None:
    """Let this database belong to this host's keys from now on, in a new log."""
    with writer.log_transaction() as log_state:
        log_state.secret_fingerprint = _fingerprint_secret()
        log_state.save(update_fields=["secret_fingerprint"])
        if find_owner_key() not in (None, site_identity.identity().key):
            writer.start_log(log_state)


def describe_refusal() -> str:
    """Return why this host must not serve the database, in a sentence.

    It is empty if the host may, and while the database does not answer: each event that is appended
    checks the key again.
    """
    try:
        check_database_owner()
    except OtherSiteError as error:
        return error.sentence
    except DatabaseError:
        return ""
    return ""


def _fingerprint_secret() -> str:
    context = "barnraise 2026 fingerprint of the secret key"
    return blake3(settings.SECRET_KEY.encode(), derive_key_context=context).hexdigest()
