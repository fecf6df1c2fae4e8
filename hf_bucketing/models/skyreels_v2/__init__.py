"""SkyReels-V2: Wan's transformer with diffusion forcing, a timestep per latent frame."""

from .packing import FAMILY, SkyReelsV2Family

__all__ = ["FAMILY", "SkyReelsV2Family"]
