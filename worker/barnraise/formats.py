"""Write sizes, rates and durations for people, and read the sizes that they type. Pure."""

from barnraise.errors import StateError

BYTE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def format_bytes(count: float) -> str:
    """Write a number of bytes in decimal units: 3 kB, 1.5 MB, 24 GB, 1.2 TB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:,.1f}".removesuffix(".0") + f" {unit}"
    return f"{count / 1e3:,.0f} kB"


def format_byte_rate(bytes_per_second: float) -> str:
    """Write a transfer rate: 12 kB/s, 3.4 MB/s."""
    return f"{format_bytes(bytes_per_second)}/s"


def format_count(count: int) -> str:
    """Write a large number in few characters: 850, 12.3 K, 3.2 M, 1.56 B."""
    for unit, scale, decimals in (("B", 1e9, 2), ("M", 1e6, 1), ("K", 1e3, 1)):
        if count >= scale:
            return f"{count / scale:,.{decimals}f} {unit}"
    return f"{count:,}"


def format_parameters(count: int) -> str:
    """Write a model's size: 850 parameters, 12.3 K, 3.2 M or 1.56 B parameters."""
    return f"{format_count(count)} parameters"


def format_seconds(seconds: float) -> str:
    """Write a duration in the unit that suits it: 3.1 ms, 12.0 s, 15 min, 12.5 h."""
    if seconds < 1.0:
        return f"{seconds * 1e3:,.1f} ms"
    if seconds < 600:
        return f"{seconds:,.1f} s"
    if seconds < 36e3:
        return f"{seconds / 60:,.0f} min"
    return f"{seconds / 3600:,.1f} h"


def format_duration(seconds: float) -> str:
    """Write how long people wait: 40 s, 35 min, 5 h 20 min, 3 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{seconds / 86_400:,.0f} days"


def parse_bytes(text: str) -> int:
    """Read a size as people type it: '24GB', '1.5T', '800 mb' or, with binary units, '4GiB'.

    Raises:
        StateError: the text is not a size.
    """
    plain = text.strip().upper().replace(" ", "").removesuffix("B")
    binary = plain.endswith("I")
    plain = plain.removesuffix("I")
    unit = plain[-1:] if plain[-1:] in BYTE_UNITS else ""
    try:
        number = float(plain.removesuffix(unit))
    except ValueError:
        raise StateError(f"'{text}' is not a size; write it like 24GB, 1.5TB or 4GiB") from None
    if not 0 <= number < 1e18:
        raise StateError(f"'{text}' is not a size a machine could have")
    scale = 1024 ** (" KMGT".index(unit) if unit else 0) if binary else BYTE_UNITS[unit]
    return int(number * scale)
