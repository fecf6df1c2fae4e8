"""Types of packs that need no torch."""

from __future__ import annotations

from typing import Literal

Backend = Literal["auto", "segments", "dense", "flex", "varlen"]
"""Backends of packed attention; `"auto"` chooses one."""

Grid = tuple[int, int, int]
"""Frames, rows and columns of tokens, or of latent pixels."""
