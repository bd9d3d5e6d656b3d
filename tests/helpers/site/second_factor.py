"""Real second factors for staff, whom the admin refuses without one."""

import base64
import hashlib
import hmac
import time
from typing import Any

SECRET = "JBSWY3DPEHPK3PXPJBSWY3DPEHPK3PXP"  # of a test's authenticator app, in base 32
STEP_SECONDS = 30
PREVIOUS_CODE_SECONDS = 8  # of a step, in which the previous step's code is used


def add_authenticator_app(user: Any) -> None:
    """Give a person an authenticator app with SECRET."""
    from allauth.mfa.totp.internal.auth import TOTP

    TOTP.activate(user, SECRET)


def code_of_step(step: int) -> str:
    """Return the app's code in a time step (RFC 4226, section 5.3)."""
    mac = hmac.digest(base64.b32decode(SECRET), step.to_bytes(8, "big"), hashlib.sha1)
    offset = mac[-1] & 15
    number = int.from_bytes(mac[offset : offset + 4], "big") & 0x7FFFFFFF
    return f"{number % 1_000_000:06}"


class AuthenticatorApp:
    """Generate codes, each of them once, as a site accepts each once."""

    def __init__(self) -> None:
        self._last_step = 0

    def next_code(self) -> str:
        """Return a code that was not returned before; wait for the next one if necessary."""
        while True:
            now, elapsed = divmod(time.time(), STEP_SECONDS)
            # The previous step's code serves only while a slow page has time to send it.
            oldest = int(now) - (elapsed < PREVIOUS_CODE_SECONDS)
            step = max(self._last_step + 1, oldest)
            if step <= now + 1:  # a site accepts the previous and the next code as well
                self._last_step = step
                return code_of_step(step)
            time.sleep(0.5)
