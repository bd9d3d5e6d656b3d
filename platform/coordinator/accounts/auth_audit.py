"""Write allauth's events, such as a changed password, into the audit log."""

from collections.abc import Callable
from typing import Any

from allauth.account import signals as account
from allauth.mfa import signals as mfa

from coordinator.audit.log import record

AUDIT_ACTIONS = {
    account.user_signed_up: "user.sign_up",
    account.password_changed: "user.password",
    account.password_set: "user.password",
    account.password_reset: "user.password_reset",
    account.email_changed: "user.address",
    mfa.authenticator_added: "user.factor_added",
    mfa.authenticator_removed: "user.factor_removed",
    mfa.authenticator_reset: "user.factor_reset",
}


def connect_signals() -> None:
    """Connect to allauth's signals."""
    for signal, action in AUDIT_ACTIONS.items():
        signal.connect(_make_recorder(action), weak=False, dispatch_uid=f"audit {action}")


def _make_recorder(action: str) -> Callable[..., None]:
    def record_action(sender: Any, user: Any, authenticator: Any = None, **kwargs: Any) -> None:
        record(
            action, user, actor=user, **({"factor": authenticator.type} if authenticator else {})
        )

    return record_action
