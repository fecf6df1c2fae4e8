"""Qwen-Image."""

from .packing import FAMILY, QwenImageFamily

__all__ = ["FAMILY", "QwenImageFamily"]
