"""Allegro: rotary positions over frames, rows and columns, made by its pipeline."""

from .packing import FAMILY, AllegroFamily

__all__ = ["FAMILY", "AllegroFamily"]
