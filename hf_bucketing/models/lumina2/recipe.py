"""How Lumina 2 is trained: flow matching, with one shift; text after the pipeline's system prompt, masked."""

from __future__ import annotations

from ...buckets.sizes import LatentSpec
from ..objectives import Shift
from ..recipe import Recipe, image_spec
from ..shift import scheduler_shift
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

    def shift(self) -> Shift:
        """Return the scheduler's shift, the same for all sizes: the pipeline counts the channels as tokens."""
        shift = scheduler_shift(self.pipeline.scheduler.config)
        return shift((self.latent_channels, 1, 1)) if callable(shift) else shift


RECIPES = (Lumina2Recipe,)
