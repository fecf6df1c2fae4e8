"""Amounts as people read them."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """Return a number of bytes in GiB, or below 0.1 GiB in MiB, with two decimals.

    Example:
        >>> format_bytes(3 * 2**30), format_bytes(2**30 / 20), format_bytes(0)
        ('3.00 GiB', '51.20 MiB', '0.00 MiB')
    """
    return f"{count / 2**30:.2f} GiB" if count >= 0.1 * 2**30 else f"{count / 2**20:.2f} MiB"


def format_seconds(count: float) -> str:
    """Return a time in hours, minutes or seconds, with two digits.

    Example:
        >>> format_seconds(0.25), format_seconds(90), format_seconds(5400), format_seconds(360_000)
        ('0.25 s', '90 s', '90 min', '100 h')
    """
    for unit, seconds in (("h", 3600), ("min", 60)):
        if count >= 2 * seconds:
            return f"{_two_digits(count / seconds)} {unit}"
    return f"{_two_digits(count)} s"


def _two_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
