"""CogView4."""

from .packing import FAMILY, CogView4Family

__all__ = ["FAMILY", "CogView4Family"]
