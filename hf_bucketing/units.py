"""Amounts as people read them."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """Return a number of bytes in GiB, or below 0.1 GiB in MiB, with two decimals.

    Example:
        >>> format_bytes(3 * 2**30), format_bytes(2**30 / 20), format_bytes(0)
        ('3.00 GiB', '51.20 MiB', '0.00 MiB')
    """
    return f"{count / 2**30:.2f} GiB" if count >= 0.1 * 2**30 else f"{count / 2**20:.2f} MiB"
