"""Attention inside the segments of a pack: one specification, several backends."""

from .dispatch import choose_backend, packed_attention, prepare_segments, resolve_backend

__all__ = ["choose_backend", "packed_attention", "prepare_segments", "resolve_backend"]
