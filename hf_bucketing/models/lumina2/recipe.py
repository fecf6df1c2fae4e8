"""How Lumina 2 is trained: flow matching, with one shift; text after the pipeline's system prompt, masked."""

from __future__ import annotations

from ...buckets.sizes import LatentSpec
from ..recipe import Recipe, image_spec
from .packing import FAMILY


class Lumina2Recipe(Recipe):
    """Recipe of `Lumina2Pipeline`; see [`Recipe`]."""

    pipeline_class = "Lumina2Pipeline"
    family = FAMILY
    image_vae = True
    default_sequence_length = 256
    native_sizes = ((1024, 1024),)

    @classmethod
    def read_spec(cls, name_or_path: str) -> LatentSpec:
        """Read the stride of the VAE and the patch of the transformer."""
        return image_spec(name_or_path)

    def shift(self) -> float:
        """Return the scheduler's shift, the same for all sizes: the pipeline counts the channels as tokens."""
        shift = super().shift()
        return shift if isinstance(shift, float) else shift(tokens=self.latent_channels, pixels=1)


RECIPES = (Lumina2Recipe,)
