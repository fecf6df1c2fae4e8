"""HunyuanVideo 1.5: two texts and image tokens in joint attention; a first frame as channels of the latent."""

from .packing import FAMILY, HunyuanVideo15Family

__all__ = ["FAMILY", "HunyuanVideo15Family"]
