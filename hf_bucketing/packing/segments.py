"""Which tokens attend to which: the value that attention backends read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SegmentSpans:
    """Which queries attend to which keys: segment `i` is `query[slice(*queries[i])]` and `key[slice(*keys[i])]`.

    Args:
        queries (tuple of `(start, stop)`): Ascending, without overlap.
        keys (tuple of `(start, stop)`): As many as queries.
        num_queries (`int`): Tokens on the query side, padding included.
        num_keys (`int`): Tokens on the key side, padding included.
    """

    queries: tuple[tuple[int, int], ...]
    keys: tuple[tuple[int, int], ...]
    num_queries: int
    num_keys: int
