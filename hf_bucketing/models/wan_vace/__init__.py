"""Wan VACE: Wan with a branch of blocks that reads a control video."""

from .packing import FAMILY, WanVACEFamily

__all__ = ["FAMILY", "WanVACEFamily"]
