"""Refuse Ed25519 public keys that identify nobody. Pure.

Edwards25519 has eight points of small order. For such a point as a public key, one signature fits
every message, so a party can use a key that nobody holds. A y coordinate of p or more is a second
spelling of another key, which would let one key count as two. See RFC 8032, section 5.1.3, and
Chalkias, Garillot and Nikolaenko, "Taming the many EdDSAs" (2020), section 2.
"""

FIELD_PRIME = 2**255 - 19
SIGN_BIT = 1 << 255  # of x, in the encoding of a point
# The y coordinates of the eight points whose order divides 8.
SMALL_ORDER_Y = frozenset(
    {
        0,
        1,
        FIELD_PRIME - 1,
        0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7,
        0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826,
    }
)


def key_problem(key: str) -> str:
    """Return why nobody can be known by this public key; "" if somebody can.

    Args:
        key: 64 hex digits.
    """
    y = int.from_bytes(bytes.fromhex(key), "little") & ~SIGN_BIT
    if y >= FIELD_PRIME:
        return "is a second spelling of another key"
    if y in SMALL_ORDER_Y:
        return "is a point of small order, for which anybody can sign"
    return ""


def require_sound_key(key: str) -> str:
    """Return the key unchanged.

    Raises:
        ValueError: The key is a point of small order or a second spelling.
    """
    if problem := key_problem(key):
        raise ValueError(f"the key {key[:8]}… {problem}")
    return key
