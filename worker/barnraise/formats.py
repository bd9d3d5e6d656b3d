"""Write sizes, rates and durations for people, and read the sizes that they type. Pure.

Terminals, pages and the frontend's `src/format.ts` write each of them alike: bytes in decimal
units, counts with three significant digits. `tests/contract/golden/formats.json` has examples.
"""

from barnraise.errors import StateError

BYTE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def format_bytes(count: float) -> str:
    """Write a number of bytes in decimal units: 3 kB, 1.5 MB, 24 GB, 1.2 TB."""
    if count < 999_500:
        return f"{count / 1e3:,.0f} kB"
    for unit, scale in (("MB", 1e6), ("GB", 1e9)):
        if count < 999.95 * scale:
            return f"{count / scale:.1f}".removesuffix(".0") + f" {unit}"
    return f"{count / 1e12:,.1f}".removesuffix(".0") + " TB"


def format_byte_rate(bytes_per_second: float) -> str:
    """Write a transfer rate: 12 kB/s, 3.4 MB/s."""
    return f"{format_bytes(bytes_per_second)}/s"


def format_count(count: float) -> str:
    """Write a number with three significant digits: 850, 12.3 K, 3.20 M, 1.56 B."""
    if count < 999.5:
        return f"{count:.0f}"
    value = float(count)
    for unit in ("K", "M", "B", "T"):
        value /= 1000
        if value < 999.5:
            return f"{_three_digits(value)} {unit}"
    return f"{_three_digits(value / 1000)} P"


def _three_digits(value: float) -> str:
    """Write a number from 1 to 999 with three significant digits."""
    if value < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def format_loss(loss: float | None) -> str:
    """Write a loss with three decimals; – without one."""
    return "–" if loss is None else f"{loss:.3f}"


def format_amount(count: int, noun: str) -> str:
    """Write a number with its noun, such as "1 file" or "3,012 files"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_share(share: float) -> str:
    """Write a share of 1 as a percentage; it is 100 % only when it is complete."""
    value = max(0.0, min(1.0, float(share))) * 100
    if value in (0, 100):
        return f"{value:.0f} %"
    return f"{value:.1f} %" if value < 9.95 else f"{int(value)} %"


def format_parameters(count: int) -> str:
    """Write a model's size: 850 parameters, 12.3 K, 3.20 M or 1.56 B parameters."""
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
        raise StateError(f"'{text}' is not a size; write it like 24GB or 1.5TB") from None
    scale = 1024 ** (" KMGT".index(unit) if unit else 0) if binary else BYTE_UNITS[unit]
    if not 0 <= number * scale < 1e18:
        raise StateError(f"'{text}' is not a size a machine could have")
    return int(number * scale)
