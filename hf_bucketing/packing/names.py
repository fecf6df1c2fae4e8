"""Types of packs that need no torch."""

from __future__ import annotations

from typing import Literal

Backend = Literal["auto", "segments", "dense", "flex", "varlen", "varlen:fa4", "varlen:torch", "varlen:fa2"]
"""Backends of packed attention; `"auto"` chooses one, and `"varlen"` a kernel of variable lengths."""

Grid = tuple[int, int, int]
"""Frames, rows and columns of tokens, or of latent pixels."""
