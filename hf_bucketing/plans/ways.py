"""Names of the ways of batching, for settings that are read before anything that trains is imported."""

from __future__ import annotations

from typing import Literal

WayName = Literal["bucket", "pack", "length"]

CachedAs = Literal["bucket", "pack"]
"""Ways that caches are made for: latents at the size of their bucket, or at their own."""


def stacks(batching: WayName) -> bool:
    """Return whether the samples of a batch have one size, that of their bucket, and are stacked.

    Otherwise each keeps its own size.
    """
    return batching == "bucket"
