"""HunyuanImage 2.1."""

from .packing import FAMILY, HunyuanImageFamily

__all__ = ["FAMILY", "HunyuanImageFamily"]
