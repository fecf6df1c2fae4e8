"""How Motif-Video is trained: flow matching, shifted by size; text as its encoder makes it, its padding masked."""

from __future__ import annotations

from ..hunyuan_video_15.recipe import GuiderRecipe
from .packing import FAMILY


class MotifVideoRecipe(GuiderRecipe):
    """Recipe of `MotifVideoPipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe]."""

    pipeline_class = "MotifVideoPipeline"
    family = FAMILY
    default_sequence_length = 512
    trims_text = True
    prompt_outputs = ("values", "", "mask")
    native_sizes = ((736, 1280),)


RECIPES = (MotifVideoRecipe,)

REFUSED = {
    "MotifVideoImage2VideoPipeline": (
        "the text encoder's tokens of an image stand beside the text in its transformer, where packs hold text alone"
    )
}
