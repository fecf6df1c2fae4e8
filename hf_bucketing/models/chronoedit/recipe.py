"""How ChronoEdit is trained: as Wan 2.1 image-to-video, on clips whose last frames are the edit of their first."""

from __future__ import annotations

from ...buckets.sizes import Size
from ..first_frame import ENDS
from ..wan.recipe import WanImageToVideoRecipe
from .packing import FAMILY


class ChronoEditRecipe(WanImageToVideoRecipe):
    """Recipe of `ChronoEditPipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe].

    A clip of five frames, two latent ones, is an image and its edit; longer clips lead from one to the other.
    """

    pipeline_class = "ChronoEditPipeline"
    family = FAMILY
    shown = ENDS[:1]

    @property
    def drawn_kinds(self) -> tuple[str, ...]:
        """None: a clip is the edit of its first frame."""
        return ()

    @classmethod
    def size_arguments(cls, size: Size) -> dict[str, int]:
        """Return the sides alone: by default the pipeline renders an image and its edit, five frames."""
        return {"height": size.height, "width": size.width}


RECIPES = (ChronoEditRecipe,)
