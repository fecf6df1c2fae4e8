"""Attention inside the segments of a pack: one specification, several backends."""

from .dispatch import Backend, choose_backend, packed_attention, prepare_segments, resolve_backend

__all__ = ["Backend", "choose_backend", "packed_attention", "prepare_segments", "resolve_backend"]
